// A block's elements that are not zero, in a row: for AVX2 and NEON, which append elements in fewer
// steps than bytes. So elements are compacted, and then cut to planes; avx512_sparse.cpp does it
// the other way around. Measured (docs/benchmarks.md).
#pragma once

#include <type_traits>

#include "vector_bitmap.h"
#include "vector_floats.h"

MEMSWAP_VECTOR_BEGIN

namespace memswap::cpu::MEMSWAP_ISA {
namespace {

// Of kLanes elements in kWidth vectors, lanes of a byte that are 255 for all ones, and 0 for 0.
template <uint32_t kWidth>
[[gnu::always_inline]] inline Vector narrow_conditions(const Vector (&conditions)[kWidth]) {
  if constexpr (kWidth == 1) {
    return conditions[0];
  } else {
    Vector half[kWidth / 2];
    for (uint32_t i = 0; i < kWidth / 2; ++i) {
      half[i] = narrow(conditions[2 * i], conditions[2 * i + 1]);
    }
    return narrow_conditions<kWidth / 2>(half);
  }
}

// Likewise, a byte of each that has the element's sign.
template <uint32_t kWidth>
[[gnu::always_inline]] inline Vector signs_of(const Vector (&elements)[kWidth]) {
  if constexpr (kWidth == 1) {
    return elements[0];
  } else {
    Vector odd[kWidth / 2];
    for (uint32_t i = 0; i < kWidth / 2; ++i) {
      odd[i] = narrow_signs(elements[2 * i], elements[2 * i + 1]);
    }
    return signs_of<kWidth / 2>(odd);
  }
}

template <uint32_t kWidth>
class Survivors {
 public:
  // Bytes ahead of a block. Measured: see [Note: asking ahead].
  static constexpr uint32_t kLinesAhead = 8192;

  void find(const uint8_t* elements) {
    using Words = typename Elements<UnsignedOf<kWidth>>::Vector;
    using SignedWords = typename Elements<std::make_signed_t<UnsignedOf<kWidth>>>::Vector;
    uint8_t* end = bytes_;
    SignedWords lowest{};  // as a number, -0 is the lowest that there is
    for (uint32_t i = 0; i < kVectors; ++i) {
      const uint8_t* const from = elements + kLanes * kWidth * i;
      Vector zero[kWidth];
      for (uint32_t j = 0; j < kWidth; ++j) {
        const Vector element = load(from + kLanes * j);
        const Words words = reinterpret_cast<Words>(element);
        const SignedWords numbers = reinterpret_cast<SignedWords>(element);
        zero[j] = reinterpret_cast<Vector>(words + words == 0);
        lowest = numbers < lowest ? numbers : lowest;
      }
      end = append_survivors(end, ~mask_of(narrow_conditions(zero)), i, from);
    }
    for (uint32_t j = 0; j < kWidth; ++j) {
      store(end + kLanes * j, Vector{});
    }
    count_ = static_cast<uint32_t>(end - bytes_) / kWidth;
    constexpr auto kNegativeZero = static_cast<UnsignedOf<kWidth>>(1ull << (8 * kWidth - 1));
    const Words negative_zeros =
        reinterpret_cast<Words>(reinterpret_cast<Words>(lowest) == kNegativeZero);
    has_negative_zero_ = any(mask_of(reinterpret_cast<Vector>(negative_zeros)));
  }

  // By which elements they are.
  const Bitmap& bitmap() const { return bitmap_; }
  uint32_t count() const { return count_; }
  uint32_t vectors() const { return (count_ + kLanes - 1) / kLanes; }
  // Whether another element is.
  bool has_negative_zero() const { return has_negative_zero_; }

  // kLanes of them from `i` on, 0 behind the last: their byte planes are in plane() then, and the
  // rotated bytes that have E are returned.
  Vector cut(uint32_t i) {
    Vector v[kWidth];
    load_rotated<kWidth>(bytes_ + kWidth * i, v);
    for (uint32_t p = 0; p < kWidth - 1; ++p) {
      store(planes_[p].byte + i, v[p]);
    }
    return v[kWidth - 1];
  }
  const uint8_t* plane(uint32_t p) const { return planes_[p].byte; }

  // A byte for each other element, whose highest bit is the sign. `elements`: what find() had.
  void list_signs(const uint8_t* elements, Row& signs) const {
    uint8_t* end = signs.byte;
    for (uint32_t i = 0; i < kVectors; ++i) {
      Vector v[kWidth];
      for (uint32_t j = 0; j < kWidth; ++j) {
        v[j] = load(elements + kLanes * (kWidth * i + j));
      }
      end = append(end, ~load_mask(bitmap_.byte + kLanes / 8 * i), signs_of(v));
    }
    store(end, Vector{});
  }

 private:
  // Zeros come in rows as a rule: where masks, rectifiers and padding make them.
  uint8_t* append_survivors(uint8_t* end, Mask mask, uint32_t i, const uint8_t* from) {
    uint8_t* const chosen = bitmap_.byte + kLanes / 8 * i;
    store_mask(chosen, mask);
    if (!any(mask)) {
      return end;
    }
    if (!any(~mask)) {
      for (uint32_t j = 0; j < kWidth; ++j) {
        store(end + kLanes * j, load(from + kLanes * j));
      }
      return end + kLanes * kWidth;
    }
    if constexpr (kWidth == 1) {
      return append(end, chosen, load(from));
    } else {
      for (uint32_t j = 0; j < kLanes / 8; ++j) {
        end = append_elements<kWidth>(end, chosen[j], from + 8 * kWidth * j);
      }
      return end;
    }
  }

  alignas(kRowAlignment) uint8_t bytes_[frame::kBlockElements * kWidth + kLanes * kWidth];
  Row planes_[kWidth];  // one more than there are
  Bitmap bitmap_;
  uint32_t count_;
  bool has_negative_zero_;
};

}  // namespace
}  // namespace memswap::cpu::MEMSWAP_ISA

MEMSWAP_VECTOR_END
