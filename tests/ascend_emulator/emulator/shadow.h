// What is known of each byte of an allocation, in pages that exist once they differ from the rest:
// an arena of megabytes of which a kernel touches little costs little.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <vector>

namespace ascend_emulator {

template <class T>
class Shadow {
 public:
  Shadow() = default;
  Shadow(uint64_t bytes, T initial)
      : initial_(initial), pages_((bytes + kPageBytes - 1) / kPageBytes) {}

  T get(uint64_t i) const {
    const auto& page = pages_[i / kPageBytes];
    return page ? (*page)[i % kPageBytes] : initial_;
  }
  T& at(uint64_t i) {
    auto& page = pages_[i / kPageBytes];
    if (!page) {
      page = std::make_unique<Page>();
      page->fill(initial_);
    }
    return (*page)[i % kPageBytes];
  }
  // All bytes are as at first.
  void clear() {
    for (auto& page : pages_) {
      page.reset();
    }
  }

 private:
  static constexpr uint64_t kPageBytes = 4096;
  using Page = std::array<T, kPageBytes>;

  T initial_{};
  std::vector<std::unique_ptr<Page>> pages_;
};

}  // namespace ascend_emulator
