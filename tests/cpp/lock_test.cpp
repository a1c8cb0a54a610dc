// The lock of an engine: it is taken once, and nobody waits for it with the GIL.
#include "engine/lock.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>

namespace memswap {
namespace {

// Whether another thread gets a lock within a while. If it does not, the calling thread has the
// lock, as before.
bool comes_in(Lock& lock, std::chrono::milliseconds within) {
  std::atomic<bool> taken{false};
  std::thread other([&] {
    const Locked locked(lock);
    taken = true;
  });
  const auto deadline = std::chrono::steady_clock::now() + within;
  while (!taken && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::yield();
  }
  const bool found = taken;
  if (!found) {
    lock.unlock();
  }
  other.join();
  if (!found) {
    lock.lock();
  }
  return found;
}

bool is_free(Lock& lock) { return comes_in(lock, std::chrono::seconds(10)); }
bool is_held(Lock& lock) { return !comes_in(lock, std::chrono::milliseconds(20)); }

TEST(EngineLock, WhoHasItIsRefusedItASecondTimeAndDoesNotHang) {
  Lock lock;
  {
    const Locked locked(lock);
    EXPECT_THROW(lock.lock(), std::logic_error);
    EXPECT_THROW(LockedFor(lock, Caller::kHasNoLock), std::logic_error);
    EXPECT_TRUE(is_held(lock)) << "a refusal has given it up";
  }
  EXPECT_TRUE(is_free(lock));
  const Locked again(lock);
}

TEST(EngineLock, WhatWaitsDoesSoWithoutItUnlessTheCallerHasIt) {
  Lock lock;
  bool was_free = false;
  {
    LockedFor locked(lock, Caller::kHasNoLock);
    EXPECT_TRUE(is_held(lock));
    locked.aside([&] { was_free = is_free(lock); });
    EXPECT_TRUE(was_free) << "a transfer is waited for under the lock";
    EXPECT_TRUE(is_held(lock)) << "it was not taken again";
  }
  EXPECT_TRUE(is_free(lock));
  const Locked held(lock);
  LockedFor locked(lock, Caller::kHasLock);
  bool was_held = false;
  locked.aside([&] { was_held = is_held(lock); });
  EXPECT_TRUE(was_held) << "the caller's lock was given up";
}

TEST(EngineLock, AFailureWhileItIsAsideLeavesItFree) {
  Lock lock;
  const auto fails = [&] {
    LockedFor locked(lock, Caller::kHasNoLock);
    locked.aside([] { throw std::runtime_error("lost"); });
  };
  EXPECT_THROW(fails(), std::runtime_error);
  EXPECT_TRUE(is_free(lock));
}

TEST(EngineLock, IsGivenUpForAWhile) {
  Lock lock;
  const Locked held(lock);
  {
    const Unlocked unlocked(lock);
    EXPECT_TRUE(is_free(lock));
  }
  EXPECT_TRUE(is_held(lock));
}

// --- the GIL: a thread says whether it has it
// -----------------------------------------------------

thread_local bool has_gil = false;
std::atomic<int> given_up{0};

class WithAGil : public ::testing::Test {
 protected:
  WithAGil() {
    given_up = 0;
    set_gil_hooks({.release_if_held = []() -> void* {
                     if (!has_gil) {
                       return nullptr;
                     }
                     has_gil = false;
                     ++given_up;
                     return &given_up;
                   },
                   .take_back = [](void*) { has_gil = true; }});
  }
  ~WithAGil() override { set_gil_hooks({}); }
};

TEST_F(WithAGil, WhoWaitsForTheLockDoesNotHaveIt) {
  Lock lock;
  lock.lock();
  std::atomic<bool> has_both{false};
  std::thread waits([&] {
    has_gil = true;
    const Locked locked(lock);
    has_both = has_gil;
  });
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (given_up == 0 && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::yield();
  }
  EXPECT_EQ(given_up, 1) << "whoever has the lock and wants the GIL would wait for ever";
  lock.unlock();
  waits.join();
  EXPECT_TRUE(has_both);
}

TEST_F(WithAGil, ALockThatIsFreeIsTakenWithIt) {
  Lock lock;
  has_gil = true;
  {
    const Locked locked(lock);
    EXPECT_THROW(lock.lock(), std::logic_error);
  }
  has_gil = false;
  EXPECT_EQ(given_up, 0);
}

}  // namespace
}  // namespace memswap
