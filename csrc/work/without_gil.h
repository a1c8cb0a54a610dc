// Lets Python's other threads run while this one blocks.
#pragma once

namespace memswap {

// How to give up and take back Python's global lock. The core knows no Python: the bindings install
// this once, and in a program without Python it stays empty.
struct GilHooks {
  void* (*release_if_held)() = nullptr;  // nullptr where this thread does not hold the lock
  void (*take_back)(void* released) = nullptr;
};
void set_gil_hooks(GilHooks hooks);

// For the lifetime of the object the calling thread does not hold the GIL. For everything that may
// block and may be called with the lock held: a destructor that Python runs, above all.
class WithoutGil {
 public:
  WithoutGil();
  ~WithoutGil();
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  void* released_;
};

}  // namespace memswap
