// The lock of one engine.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "work/without_gil.h"

namespace memswap {

// [Note: The engine's lock and the GIL]
// A thread that waits for the lock does not have the GIL meanwhile. So a thread that has the lock
// may give up the GIL and take it again, in whatever order, and no two threads wait for one
// another.
//
// A thread that has the lock does not take it again. What the lock serialises is said beside each
// class; what takes it by itself may not be called by who has it. A function of the user's and a
// batch's `on_demand` may call whatever there is, so they are called without the lock
// (Engine::save, Batch::notice_demand). A director and who opens transfers are asked with it
// (engine_host.h), and call nothing that takes it. The end of an entry takes no lock: it may come
// wherever Python collects.
class Lock {
 public:
  Lock() = default;
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

  // Throws std::logic_error where the calling thread has the lock: it would wait for itself.
  void lock() {
    const std::thread::id self = std::this_thread::get_id();
    if (owner_.load(std::memory_order_relaxed) == self) {
      throw std::logic_error(
          "a thread takes the lock of a memswap engine twice; this is a bug in memswap, please "
          "report it with this traceback");
    }
    if (!mutex_.try_lock()) {
      const WithoutGil released;
      mutex_.lock();
    }
    owner_.store(self, std::memory_order_relaxed);
  }
  void unlock() {
    owner_.store({}, std::memory_order_relaxed);
    mutex_.unlock();
  }

 private:
  std::mutex mutex_;
  std::atomic<std::thread::id> owner_{};  // who has it; nobody: a default id
};
using Locked = std::lock_guard<Lock>;

// Whether the caller of a function has the lock of its engine. It keeps the lock then, also while
// the function waits.
enum class Caller : uint8_t { kHasNoLock, kHasLock };

// The lock for the lifetime of the object, taken unless the caller has it.
class LockedFor {
 public:
  LockedFor(Lock& lock, Caller caller) : lock_(lock, std::defer_lock) {
    if (caller == Caller::kHasNoLock) {
      lock_.lock();
    }
  }

  // Runs a function that waits: without the lock, unless the caller has it. If the function throws,
  // the lock is not taken again.
  template <class Wait>
  void aside(const Wait& wait) {
    if (!lock_.owns_lock()) {
      wait();
      return;
    }
    lock_.unlock();
    wait();
    lock_.lock();
  }

 private:
  std::unique_lock<Lock> lock_;
};

// For the lifetime of the object the calling thread does not have the lock that it has around it.
class Unlocked {
 public:
  explicit Unlocked(Lock& lock) : lock_(lock) { lock_.unlock(); }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;
  ~Unlocked() { lock_.lock(); }

 private:
  Lock& lock_;
};

}  // namespace memswap
