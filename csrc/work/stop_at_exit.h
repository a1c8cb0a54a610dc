// Ends threads before the process does.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace memswap {

// Threads that must have ended before the program that they serve does: afterwards a storage that
// they drop may need a GIL that is gone, and a driver may have been torn down.
class StopAtExit {
 public:
  // `stop` is called with the owner of threads, if it is still there. Returns the owner.
  template <class T>
  std::shared_ptr<T> add(std::shared_ptr<T> owner, void (T::*stop)()) {
    const std::lock_guard lock(mutex_);
    std::erase_if(owners_, [](const Owner& known) { return known.alive.expired(); });
    owners_.push_back({owner, [stop](void* object) { (static_cast<T*>(object)->*stop)(); }});
    return owner;
  }

  void stop_all() {
    std::vector<Owner> owners;
    {
      const std::lock_guard lock(mutex_);
      owners.swap(owners_);
    }
    for (const Owner& owner : owners) {
      if (const auto object = owner.alive.lock()) {
        owner.stop(object.get());
      }
    }
  }

 private:
  struct Owner {
    std::weak_ptr<void> alive;
    std::function<void(void*)> stop;
  };
  std::mutex mutex_;
  std::vector<Owner> owners_;
};

// Lives as long as the process: the last pools are dropped after every module is.
inline StopAtExit& stop_at_exit() {
  static auto& at_exit = *new StopAtExit;  // NOLINT: leaked on purpose
  return at_exit;
}

}  // namespace memswap
