// Elements as unsigned integers, and floats split into E and R (docs/format.md section 2).
#pragma once

#include <stdint.h>
#include <string.h>

#include <bit>

#include "by_dtype.h"

namespace memswap::cpu::scalar {

template <frame::Dtype dtype>
struct Float {
  using Bits = UnsignedOf<frame::width_of(dtype)>;
  static constexpr uint32_t kExponentBits = frame::split_of(dtype).exponent_bits;
  static constexpr uint32_t kRestBits = 8 * sizeof(Bits) - kExponentBits;
  static_assert(kExponentBits != 0);

  static constexpr Bits rotate(Bits element) { return std::rotl(element, 1); }
  static constexpr Bits rotate_back(Bits rotated) { return std::rotr(rotated, 1); }
  static constexpr uint8_t exponent(Bits rotated) {
    return static_cast<uint8_t>(rotated >> kRestBits);
  }
  // `rest` has no bit at or above kRestBits; the exponent counts modulo 2^kExponentBits.
  static constexpr Bits join(uint8_t exponent, Bits rest) {
    return static_cast<Bits>(static_cast<Bits>(exponent) << kRestBits | rest);
  }
};

// Input and output are aligned to their width at most as far as the compiler may know: blocks also
// come from byte buffers.
template <typename Bits>
void load_elements(Bits* elements, const void* from) {
  memcpy(elements, from, frame::kBlockElements * sizeof(Bits));
}

template <typename Bits>
void store_elements(void* to, const Bits* elements) {
  memcpy(to, elements, frame::kBlockElements * sizeof(Bits));
}

}  // namespace memswap::cpu::scalar
