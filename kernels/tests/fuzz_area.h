// Memory that is used again for every input, and outside of which AddressSanitizer sees each byte.
#pragma once

#include <sanitizer/asan_interface.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cstdlib>
#include <memory>

#include "memswap/frame.h"

namespace memswap::test {

// Room for one buffer. A malloc for each would take longer than a small input does.
class Area {
 public:
  explicit Area(size_t capacity)
      : capacity_((capacity + frame::kAlignmentBytes - 1) / frame::kAlignmentBytes *
                  frame::kAlignmentBytes),
        memory_(static_cast<uint8_t*>(
            std::aligned_alloc(frame::kAlignmentBytes, capacity_ + 2 * kGuardBytes))) {
    if (memory_ == nullptr) {
      std::abort();
    }
    ASAN_POISON_MEMORY_REGION(memory_.get(), capacity_ + 2 * kGuardBytes);
  }
  Area(const Area&) = delete;
  Area& operator=(const Area&) = delete;
  ~Area() { ASAN_UNPOISON_MEMORY_REGION(memory_.get(), capacity_ + 2 * kGuardBytes); }

  size_t capacity() const { return capacity_; }

  // From here on the buffer is the `bytes` bytes from a multiple of 128 plus `offset` on, each of
  // them `fill`; to touch any other byte is an error.
  uint8_t* use(size_t bytes, uint8_t fill, size_t offset = 0) {
    move_to(bytes, offset);
    memset(begin_, fill, bytes);
    return begin_;
  }

  uint8_t* copy(const uint8_t* data, size_t bytes, size_t offset = 0) {
    move_to(bytes, offset);
    if (bytes != 0) {
      memcpy(begin_, data, bytes);
    }
    return begin_;
  }

 private:
  static constexpr size_t kGuardBytes = 1024;

  struct Free {
    void operator()(uint8_t* memory) const { std::free(memory); }
  };

  void move_to(size_t bytes, size_t offset) {
    if (bytes + offset > capacity_) {
      std::abort();
    }
    ASAN_POISON_MEMORY_REGION(begin_, used_);
    begin_ = memory_.get() + kGuardBytes + offset;
    used_ = bytes;
    ASAN_UNPOISON_MEMORY_REGION(begin_, used_);
  }

  size_t capacity_;
  std::unique_ptr<uint8_t, Free> memory_;
  uint8_t* begin_ = memory_.get();
  size_t used_ = 0;
};

}  // namespace memswap::test
