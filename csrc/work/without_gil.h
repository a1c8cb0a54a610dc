// Python's global lock, for code that knows no Python.
#pragma once

namespace memswap {

// How to give the lock up, and how to take it. The core knows no Python: the bindings install this
// once, and in a program without Python it stays empty.
struct GilHooks {
  void* (*release_if_held)() = nullptr;  // nullptr where this thread does not hold the lock
  void (*take_back)(void* released) = nullptr;
  void* (*take)() = nullptr;  // nullptr where there is nothing to take any more: Python has ended
  void (*release)(void* taken) = nullptr;
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

// For the lifetime of the object the calling thread holds the GIL, which serialises the ends of
// entries. For what operators call, on whatever thread they run.
class WithGil {
 public:
  WithGil();
  ~WithGil();
  WithGil(const WithGil&) = delete;
  WithGil& operator=(const WithGil&) = delete;

 private:
  void* taken_;
};

}  // namespace memswap
