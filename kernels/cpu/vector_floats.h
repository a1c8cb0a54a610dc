// Floats as R planes and symbols E, and back (docs/format.md section 2).
#pragma once

#include "by_dtype.h"
#include "vector_bytes.h"

MEMSWAP_VECTOR_BEGIN

namespace memswap::cpu::vector {
namespace {

// How a float's rotated bytes are laid out: byte planes below, then a byte of kRestBits bits of R
// and E above them.
template <frame::Dtype kDtype>
struct Float {
  static constexpr frame::Split kSplit = frame::split_of(kDtype);
  static constexpr uint32_t kWidth = kSplit.width;
  static constexpr uint32_t kBytePlanes = kSplit.byte_planes;
  static constexpr uint32_t kRestBits = kSplit.rest_bits;  // 0, 4, or 3 in fields of 2 and 1
  static constexpr uint32_t kFirstRestBits = kRestBits == 3 ? 2 : kRestBits;
  static constexpr uint32_t kSymbolBits = kSplit.exponent_bits;
  static constexpr uint32_t kRestOffset = frame::kBlockElements * kBytePlanes;
  static constexpr uint32_t kLowOffset = frame::rest_bytes(kSplit);
  static_assert(kBytePlanes + 1 == kWidth);
};

// kLanes elements, rotated, as byte planes.
template <uint32_t kWidth>
inline void load_rotated(const uint8_t* elements, Vector (&v)[kWidth]) {
  for (uint32_t j = 0; j < kWidth; ++j) {
    v[j] = rotate_left<kWidth>(load(elements + kLanes * j));
  }
  split_bytes<kWidth>(v);
}

template <uint32_t kWidth, bool kStreaming>
inline void store_rotated(uint8_t* elements, Vector (&v)[kWidth]) {
  join_bytes<kWidth>(v);
  for (uint32_t j = 0; j < kWidth; ++j) {
    store_line<kStreaming>(elements + kLanes * j, rotate_right<kWidth>(v[j]));
  }
}

}  // namespace
}  // namespace memswap::cpu::vector

MEMSWAP_VECTOR_END
