// Whose turn it is: 0, 1, 2 and so on, each after the one before.
#pragma once

#include <stdint.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace memswap::cpu {

// Threads that call wait_for(n) return in the order of n, each after pass_to(n). Waits are short as
// a rule: a thread looks a few times before it sleeps.
//
// [Note: no atomic wait]
// std::atomic's wait and notify would do, but libstdc++ 12 loses wakeups where the value is stored
// with less than seq_cst order: notify_all() looks whether anybody waits before the store is
// visible, the waiter sleeps on the old value, and both threads of an encode wait for ever.
class Turns {
 public:
  void wait_for(uint32_t turn) {
    for (int looks = 0; looks < 16; ++looks) {
      if (turn_.load(std::memory_order_acquire) == turn) {
        return;
      }
      std::this_thread::yield();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    passed_.wait(lock, [&] { return turn_.load(std::memory_order_relaxed) == turn; });
  }

  void pass_to(uint32_t turn) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      turn_.store(turn, std::memory_order_release);
    }
    passed_.notify_all();
  }

 private:
  std::atomic<uint32_t> turn_{0};
  std::mutex mutex_;
  std::condition_variable passed_;
};

}  // namespace memswap::cpu
