#include "without_gil.h"

#include <atomic>

namespace memswap {

namespace {

std::atomic<void* (*)()> release_if_held{nullptr};
std::atomic<void (*)(void*)> take_again{nullptr};
std::atomic<void* (*)()> take{nullptr};
std::atomic<void (*)(void*)> release{nullptr};

}  // namespace

void set_gil_hooks(GilHooks hooks) {
  take_again = hooks.take_back;
  release_if_held = hooks.release_if_held;
  release = hooks.release;
  take = hooks.take;
}

WithoutGil::WithoutGil() : released_(nullptr) {
  if (auto* give_up = release_if_held.load()) {
    released_ = give_up();
  }
}

WithoutGil::~WithoutGil() {
  if (released_ != nullptr) {
    take_again.load()(released_);
  }
}

WithGil::WithGil() : taken_(nullptr) {
  if (auto* acquire = take.load()) {
    taken_ = acquire();
  }
}

WithGil::~WithGil() {
  if (taken_ != nullptr) {
    release.load()(taken_);
  }
}

}  // namespace memswap
