#include "without_gil.h"

#include <atomic>

namespace memswap {

namespace {

std::atomic<void* (*)()> release_if_held{nullptr};
std::atomic<void (*)(void*)> take_back{nullptr};

}  // namespace

void set_gil_hooks(GilHooks hooks) {
  take_back = hooks.take_back;
  release_if_held = hooks.release_if_held;
}

WithoutGil::WithoutGil() : released_(nullptr) {
  if (auto* release = release_if_held.load()) {
    released_ = release();
  }
}

WithoutGil::~WithoutGil() {
  if (released_ != nullptr) {
    take_back.load()(released_);
  }
}

}  // namespace memswap
