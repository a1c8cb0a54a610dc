// Vectors whose lanes are whole elements, rotated: which are zeros, and the survivors in a row.
#pragma once

#include "avx512_floats.h"

MEMSWAP_AVX512_BEGIN

namespace memswap::cpu::avx512 {
namespace {

template <uint32_t kWidth>
inline constexpr uint32_t kElementLanes = kLanes / kWidth;

// Survivors are neither 0 nor 1, which a rotated -0 is.
template <uint32_t kWidth>
inline uint64_t survivors_of(Vector rotated) {
  if constexpr (kWidth == 1) {
    return _mm512_test_epi8_mask(rotated, broadcast(0xfe));
  } else if constexpr (kWidth == 2) {
    return _mm512_test_epi16_mask(rotated, _mm512_set1_epi16(-2));
  } else if constexpr (kWidth == 4) {
    return _mm512_test_epi32_mask(rotated, _mm512_set1_epi32(-2));
  } else {
    return _mm512_test_epi64_mask(rotated, _mm512_set1_epi64(-2));
  }
}

template <uint32_t kWidth>
inline uint64_t negative_zeros_of(Vector rotated) {
  if constexpr (kWidth == 1) {
    return _mm512_cmpeq_epi8_mask(rotated, broadcast(1));
  } else if constexpr (kWidth == 2) {
    return _mm512_cmpeq_epi16_mask(rotated, _mm512_set1_epi16(1));
  } else if constexpr (kWidth == 4) {
    return _mm512_cmpeq_epi32_mask(rotated, _mm512_set1_epi32(1));
  } else {
    return _mm512_cmpeq_epi64_mask(rotated, _mm512_set1_epi64(1));
  }
}

// The lanes of a mask's low bits, moved together; and lanes that lie together moved apart, the
// others 0.
template <uint32_t kWidth>
inline Vector compress_lanes(uint64_t lanes, Vector value) {
  if constexpr (kWidth == 1) {
    return _mm512_maskz_compress_epi8(lanes, value);
  } else if constexpr (kWidth == 2) {
    return _mm512_maskz_compress_epi16(static_cast<__mmask32>(lanes), value);
  } else if constexpr (kWidth == 4) {
    return _mm512_maskz_compress_epi32(static_cast<__mmask16>(lanes), value);
  } else {
    return _mm512_maskz_compress_epi64(static_cast<__mmask8>(lanes), value);
  }
}

template <uint32_t kWidth>
inline Vector expand_lanes(uint64_t lanes, Vector value) {
  if constexpr (kWidth == 1) {
    return _mm512_maskz_expand_epi8(lanes, value);
  } else if constexpr (kWidth == 2) {
    return _mm512_maskz_expand_epi16(static_cast<__mmask32>(lanes), value);
  } else if constexpr (kWidth == 4) {
    return _mm512_maskz_expand_epi32(static_cast<__mmask16>(lanes), value);
  } else {
    return _mm512_maskz_expand_epi64(static_cast<__mmask8>(lanes), value);
  }
}

// `value`, with -0 in the chosen lanes.
template <uint32_t kWidth>
inline Vector with_negative_zeros(Vector value, uint64_t lanes) {
  if constexpr (kWidth == 1) {
    return _mm512_mask_mov_epi8(value, lanes, broadcast(0x80));
  } else if constexpr (kWidth == 2) {
    return _mm512_mask_set1_epi16(value, static_cast<__mmask32>(lanes), INT16_MIN);
  } else if constexpr (kWidth == 4) {
    return _mm512_mask_set1_epi32(value, static_cast<__mmask16>(lanes), INT32_MIN);
  } else {
    return _mm512_mask_set1_epi64(value, static_cast<__mmask8>(lanes), INT64_MIN);
  }
}

}  // namespace
}  // namespace memswap::cpu::avx512

MEMSWAP_AVX512_END
