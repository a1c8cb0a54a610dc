// The lock of one engine.
#pragma once

#include <mutex>

#include "work/without_gil.h"

namespace memswap {

// Its thread may take it again: an entry may die wherever Python collects. Whoever has to wait for
// it does so without the GIL.
class Lock {
 public:
  Lock() = default;
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

  void lock() {
    if (!mutex_.try_lock()) {
      const WithoutGil released;
      mutex_.lock();
    }
  }
  void unlock() { mutex_.unlock(); }

 private:
  std::recursive_mutex mutex_;
};
using Locked = std::lock_guard<Lock>;

}  // namespace memswap
