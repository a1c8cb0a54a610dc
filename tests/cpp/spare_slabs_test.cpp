#include "pool/spare_slabs.h"

#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <thread>

#include "fakes.h"
#include "pool/pool.h"

namespace memswap {
namespace {

using testing::FakeSlabs;
using Memory = SpareSlabs::Memory;

constexpr size_t kMiB = size_t{1} << 20;
constexpr size_t kGiB = size_t{1} << 30;

HostLimits machine(size_t available) {
  HostLimits limits;
  limits.available = available;
  limits.total = 64 * kGiB;
  return limits;
}

SpareSlabs::Options looking(HostLimits& limits, Memory memory = Memory::kPinned) {
  return {.memory = memory, .look = [&limits] { return limits; }, .folder = ""};
}

TEST(SpareSlabs, LeavesTheMachineASixteenth) {
  const auto below = std::make_shared<FakeSlabs>();
  HostLimits limits = machine(4 * kGiB + kMiB);
  SpareSlabs source(below, looking(limits));
  EXPECT_TRUE(source.acquire(kMiB).slab);
  const auto refused = source.acquire(kMiB + 1);
  EXPECT_FALSE(refused.slab) << "less than the spare is left";
  EXPECT_NE(refused.refusal.find("4096 MiB of host memory"), std::string::npos) << refused.refusal;
  EXPECT_NE(refused.refusal.find("on the machine"), std::string::npos) << refused.refusal;
  EXPECT_EQ(below->asked_for.size(), 1U) << "the system was asked for what it cannot spare";
}

TEST(SpareSlabs, LeavesAGroupASixteenthOfItsLimit) {
  const auto below = std::make_shared<FakeSlabs>();
  HostLimits limits = machine(60 * kGiB);
  limits.group_total = kGiB;
  limits.group = 64 * kMiB + kMiB;
  SpareSlabs source(below, looking(limits));
  EXPECT_TRUE(source.acquire(kMiB).slab);
  const auto refused = source.acquire(2 * kMiB);
  EXPECT_NE(refused.refusal.find("in the control group"), std::string::npos) << refused.refusal;
}

TEST(SpareSlabs, OrdinaryMemoryMayGoFurther) {
  const auto below = std::make_shared<FakeSlabs>();
  HostLimits limits = machine(3 * kGiB);
  SpareSlabs pinned(below, looking(limits));
  SpareSlabs ordinary(below, looking(limits, Memory::kOrdinary));
  EXPECT_FALSE(pinned.acquire(kMiB).slab);
  EXPECT_TRUE(ordinary.acquire(kMiB).slab);
}

TEST(SpareSlabs, WhatOthersTakeCountsAtOnce) {
  const auto below = std::make_shared<FakeSlabs>();
  HostLimits limits = machine(16 * kGiB);
  SpareSlabs source(below, looking(limits));
  EXPECT_TRUE(source.acquire(kMiB).slab);
  limits.available = kGiB;  // another rank's pool has grown
  EXPECT_FALSE(source.acquire(kMiB).slab);
  limits.available = 16 * kGiB;  // and its process has died
  EXPECT_TRUE(source.acquire(kMiB).slab) << "a rank that is gone still counts";
}

TEST(SpareSlabs, StaysBelowTheLimitOfLockedMemoryWherePinningCounts) {
  const auto below = std::make_shared<FakeSlabs>();
  HostLimits limits = machine(32 * kGiB);
  limits.lockable = 16 * kMiB;
  below->at_acquire = [&] { limits.locked += 6 * kMiB; };
  SpareSlabs source(below, looking(limits));
  EXPECT_TRUE(source.acquire(6 * kMiB).slab);
  EXPECT_TRUE(source.acquire(6 * kMiB).slab);
  const auto refused = source.acquire(4 * kMiB);  // would be 16, of which one is left alone
  EXPECT_FALSE(refused.slab);
  EXPECT_NE(refused.refusal.find("ulimit -l"), std::string::npos) << refused.refusal;
}

TEST(SpareSlabs, ALimitOfLockedMemoryIsNoneWherePinningDoesNotCount) {
  const auto below = std::make_shared<FakeSlabs>();
  HostLimits limits = machine(32 * kGiB);
  limits.lockable = 64 * 1024;  // a usual limit, and a driver that pins past it
  SpareSlabs source(below, looking(limits));
  for (int round = 0; round < 3; ++round) {
    EXPECT_TRUE(source.acquire(6 * kMiB).slab);
  }
}

// Another process, forked from this one, that does what it is told and waits to be killed.
class Other {
 public:
  template <class Work>
  explicit Other(Work work) {
    int ready[2];
    EXPECT_EQ(pipe(ready), 0);
    pid_ = fork();
    if (pid_ == 0) {
      work();
      (void)!write(ready[1], "x", 1);
      pause();
      _exit(0);
    }
    char byte = 0;
    EXPECT_EQ(read(ready[0], &byte, 1), 1);
    close(ready[0]);
    close(ready[1]);
  }
  ~Other() { kill(); }
  void kill() {
    if (pid_ > 0) {
      ::kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
      pid_ = 0;
    }
  }

 private:
  pid_t pid_ = 0;
};

TEST(SpareSlabs, NearTheLimitProcessesTakeOneAfterAnotherAndADeadOneHoldsNothing) {
  const std::string folder =
      std::filesystem::temp_directory_path() / ("memswap-" + std::to_string(getpid()));
  std::filesystem::create_directory(folder);
  Other other([&] {
    const int descriptor = open(folder.c_str(), O_RDONLY | O_DIRECTORY);
    flock(descriptor, LOCK_EX);
  });
  const auto below = std::make_shared<FakeSlabs>();
  HostLimits limits = machine(4 * kGiB + 8 * kMiB);
  auto options = looking(limits);
  options.folder = folder;
  SpareSlabs source(below, options);
  std::atomic<bool> taken = false;
  std::thread taker([&] {
    EXPECT_TRUE(source.acquire(kMiB).slab);
    taken = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  EXPECT_FALSE(taken) << "two processes took at the same time";
  other.kill();
  taker.join();
  EXPECT_TRUE(taken) << "a process that was killed still holds the lock";
  EXPECT_TRUE(std::filesystem::is_empty(folder)) << "something was written down";
  std::filesystem::remove(folder);
}

TEST(SpareSlabs, FarFromTheLimitNobodyWaits) {
  const std::string folder =
      std::filesystem::temp_directory_path() / ("memswap-far-" + std::to_string(getpid()));
  std::filesystem::create_directory(folder);
  Other other([&] {
    const int descriptor = open(folder.c_str(), O_RDONLY | O_DIRECTORY);
    flock(descriptor, LOCK_EX);
  });
  const auto below = std::make_shared<FakeSlabs>();
  HostLimits limits = machine(32 * kGiB);
  auto options = looking(limits);
  options.folder = folder;
  SpareSlabs source(below, options);
  const auto start = std::chrono::steady_clock::now();
  EXPECT_TRUE(source.acquire(kMiB).slab);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
  other.kill();
  std::filesystem::remove(folder);
}

TEST(PageableSlabs, GoesOnWithOrdinaryMemoryAndSaysWhy) {
  const auto pinned = std::make_shared<FakeSlabs>();
  const auto ordinary = std::make_shared<FakeSlabs>();
  PageableSlabs source(pinned, ordinary);
  EXPECT_TRUE(source.acquire(64).why_pageable.empty());
  EXPECT_EQ(ordinary->asked_for.size(), 0U) << "pinned memory was to be had";
  pinned->fail = true;
  auto second = source.acquire(64);
  ASSERT_TRUE(second.slab);
  EXPECT_NE(second.why_pageable.find("no more memory can be pinned"), std::string::npos);
  ordinary->fail = true;
  EXPECT_THROW(source.acquire(64), std::runtime_error);  // for the pool's own FallbackSlabs
}

TEST(PageableSlabs, RefusesInTheWordsOfBoth) {
  const auto ordinary =
      std::make_shared<BudgetedSlabs>(std::make_shared<FakeSlabs>(), /*budget=*/10);
  const auto pinned = std::make_shared<FakeSlabs>();
  pinned->fail = true;
  const auto refused = PageableSlabs(pinned, ordinary).acquire(64);
  EXPECT_FALSE(refused.slab);
  for (const char* words : {"can be pinned", "budget of 10 bytes"}) {
    EXPECT_NE(refused.refusal.find(words), std::string::npos) << refused.refusal;
  }
}

TEST(PageableSlabs, APoolCountsWhatIsNotPinned) {
  const auto pinned = std::make_shared<FakeSlabs>();
  Pool pool(std::make_shared<PageableSlabs>(pinned, std::make_shared<FakeSlabs>()),
            {.slab_bytes = 1024});
  BlockPtr first = pool.allocate(1024);
  const size_t pinned_bytes = pool.statistics().reserved_bytes;
  EXPECT_EQ(pool.statistics().pageable_bytes, 0U);
  pinned->fail = true;
  BlockPtr second = pool.allocate(4096);
  const auto statistics = pool.statistics();
  EXPECT_EQ(statistics.pageable_bytes + pinned_bytes, statistics.reserved_bytes);
  EXPECT_NE(statistics.why_pageable.find("pinned"), std::string::npos);
  second.reset();
  pool.trim();
  EXPECT_EQ(pool.statistics().pageable_bytes, 0U) << "memory that was given back still counts";
}

}  // namespace
}  // namespace memswap
