// What GCC's vector extensions lack or compilers do badly, for AVX2: moving chosen bytes together,
// packing bits, sums over all lanes. vector_neon.h has the same functions.
#pragma once

#include "vector_extensions.h"

MEMSWAP_VECTOR_BEGIN

namespace memswap::cpu::MEMSWAP_ISA {
namespace {

inline __m256i native(Vector value) { return reinterpret_cast<__m256i>(value); }
inline Vector vector(__m256i value) { return reinterpret_cast<Vector>(value); }
inline __m128i low_half(Vector value) { return _mm256_castsi256_si128(native(value)); }
inline __m128i high_half(Vector value) { return _mm256_extracti128_si256(native(value), 1); }

inline void fence() { _mm_sfence(); }

// Bypasses the caches where nobody reads the line soon; `to` is aligned then.
template <bool kStreaming>
inline void store_line(void* to, Vector value) {
  if constexpr (kStreaming) {
    _mm256_stream_si256(static_cast<__m256i*>(to), native(value));
  } else {
    store(to, value);
  }
}

inline uint32_t count_bits(uint32_t bits) {
  return static_cast<uint32_t>(__builtin_popcount(bits));
}

// Which lanes are chosen.
using Mask = uint32_t;

inline Mask mask_of(Lanes lanes) {
  return static_cast<uint32_t>(_mm256_movemask_epi8(native(lanes)));
}
template <uint32_t kBit>
inline Mask mask_of_bit(Vector value) {
  return mask_of(vector(_mm256_slli_epi16(native(value), 7 - kBit)));
}
inline uint32_t count_of(Mask mask) { return count_bits(mask); }
inline bool any(Mask mask) { return mask != 0; }

// A bit for each lane, and back.
inline void store_mask(uint8_t* to, Mask mask) { store_as(to, mask); }
inline Mask load_mask(const uint8_t* from) { return load_as<Mask>(from); }
inline Lanes lanes_of(Mask mask) {
  const __m256i all = _mm256_set1_epi32(static_cast<int>(mask));
  const Vector spread = vector(_mm256_shuffle_epi8(
      all, _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303)));
  const Vector bit = load(kLaneNumbers.bit);
  return equal(spread & bit, bit);
}
inline Lanes load_lanes(const uint8_t* from) { return lanes_of(load_mask(from)); }

// The bits of a stream from bit `at` on, in the chosen lanes.
inline Lanes spread_bits(const uint8_t* stream, uint32_t at, Lanes chosen) {
  const auto bits = static_cast<uint32_t>(load_as<uint64_t>(stream + at / 8) >> at % 8);
  return lanes_of(_pdep_u32(bits, mask_of(chosen)));
}

// By lane, entry `index`, below 16, of the table, which is there twice.
inline Vector repeat16(const uint8_t* table) {
  return vector(_mm256_broadcastsi128_si256(load_as<__m128i>(table)));
}
inline Vector look_up(Vector table, Vector index) {
  return vector(_mm256_shuffle_epi8(native(table), native(index)));
}

// Two rows of 8 of a table, as one control of a shuffle.
[[gnu::always_inline]] inline __m128i control_of(const uint8_t* first, const uint8_t* second) {
  return _mm_castps_si128(
      _mm_loadh_pi(_mm_castsi128_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(first))),
                   reinterpret_cast<const __m64*>(second)));
}

// The masks of 8 lanes are as long as addresses, which they become a part of.
[[gnu::always_inline]] inline uint8_t* append_half(uint8_t* to, size_t first, size_t second,
                                                   __m128i value) {
  const __m128i moved =
      _mm_shuffle_epi8(value, control_of(kChosenLanes[0].of[first], kChosenLanes[1].of[second]));
  uint8_t* const middle = to + __builtin_popcountll(first);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), moved);
  _mm_storeh_pi(reinterpret_cast<__m64*>(middle), _mm_castsi128_ps(moved));
  return middle + __builtin_popcountll(second);
}

// Appends the chosen lanes to `to` and returns its new end; up to kLanes bytes are written.
[[gnu::always_inline]] inline uint8_t* append(uint8_t* to, Mask chosen, Vector value) {
  to = append_half(to, chosen & 255, chosen >> 8 & 255, low_half(value));
  return append_half(to, chosen >> 16 & 255, chosen >> 24, high_half(value));
}
// The same by a mask in memory.
[[gnu::always_inline]] inline uint8_t* append(uint8_t* to, const uint8_t* chosen, Vector value) {
  to = append_half(to, chosen[0], chosen[1], low_half(value));
  return append_half(to, chosen[2], chosen[3], high_half(value));
}

// The 8 words of 4 bytes with these numbers, of which only 3 bits count.
[[gnu::always_inline]] inline Vector choose_words(Vector words, const uint8_t* numbers) {
  return vector(_mm256_permutevar8x32_epi32(
      native(words),
      _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(numbers)))));
}

// Appends the chosen ones of 8 elements, a bit for each, and returns the new end; up to the size of
// 8 elements is written.
template <uint32_t kWidth>
[[gnu::always_inline]] inline uint8_t* append_elements(uint8_t* to, size_t chosen,
                                                       const uint8_t* elements) {
  if constexpr (kWidth == 2) {
    const auto moved = _mm_shuffle_epi8(load_as<__m128i>(elements),
                                        load_as<__m128i>(kChosenParts<8, 2>.of[chosen]));
    store_as(to, moved);
  } else if constexpr (kWidth == 4) {
    store(to, choose_words(load(elements), kChosenLanes[0].of[chosen]));
  } else {
    static_assert(kWidth == 8);
    const size_t first = chosen & 15, second = chosen >> 4;
    store(to, choose_words(load(elements), kChosenParts<4, 2>.of[first]));
    to += kWidth * __builtin_popcountll(first);
    store(to, choose_words(load(elements + kLanes), kChosenParts<4, 2>.of[second]));
    return to + kWidth * __builtin_popcountll(second);
  }
  return to + kWidth * __builtin_popcountll(chosen);
}

// How many lanes are 255 and not 0: of both halves, the 16 lanes that a look-up reaches, and of the
// first one.
struct LaneCounts {
  size_t all, first;
};
[[gnu::always_inline]] inline LaneCounts count_lanes(Lanes lanes) {
  const size_t mask = mask_of(lanes);
  return {static_cast<size_t>(__builtin_popcountll(mask)),
          static_cast<size_t>(__builtin_popcountll(mask & 0xffff))};
}

// In each half, the bytes behind those that the lanes of the halves before it have.
[[gnu::always_inline]] inline Vector load_halves(const uint8_t* from, LaneCounts counts) {
  return vector(_mm256_inserti128_si256(_mm256_castsi128_si256(load_as<__m128i>(from)),
                                        load_as<__m128i>(from + counts.first), 1));
}

// Sums over lanes, of bytes of up to 64 vectors.
using Sums = Words64;
inline Sums add_bytes(Sums sums, Vector bytes) {
  return sums + reinterpret_cast<Sums>(_mm256_sad_epu8(native(bytes), _mm256_setzero_si256()));
}
inline uint32_t total(Sums sums) {
  const __m128i pair = _mm_add_epi64(_mm256_castsi256_si128(reinterpret_cast<__m256i>(sums)),
                                     _mm256_extracti128_si256(reinterpret_cast<__m256i>(sums), 1));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(pair) + _mm_extract_epi32(pair, 2));
}
inline uint32_t sum_of(Vector bytes) { return total(add_bytes(Sums{}, bytes)); }

// By the only horizontal minimum there is.
inline uint32_t lowest_of(Vector bytes) {
  const __m128i half = _mm_min_epu8(low_half(bytes), high_half(bytes));
  const __m128i pairs = _mm_min_epu8(half, _mm_srli_epi16(half, 8));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_minpos_epu16(pairs))) & 255;
}
inline uint32_t highest_of(Vector bytes) { return 255 - lowest_of(~bytes); }

// Of the low 32 bits of each lane.
inline Words64 multiply_low_halves(Words64 a, Words64 b) {
  return reinterpret_cast<Words64>(
      _mm256_mul_epu32(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
}

// kLanes symbols of 2 or 4 bits, one in a byte, as a stream, and back.
inline void store_symbols2(uint8_t* stream, Vector symbols) {
  const __m256i pairs = _mm256_maddubs_epi16(native(symbols), _mm256_set1_epi16(0x0401));
  const Vector bytes = vector(_mm256_madd_epi16(pairs, _mm256_set1_epi32(0x00100001)));
  const __m128i words = _mm_packus_epi32(low_half(bytes), high_half(bytes));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(stream), _mm_packus_epi16(words, words));
}
inline void store_symbols4(uint8_t* stream, Vector symbols) {
  const Vector bytes = vector(_mm256_maddubs_epi16(native(symbols), _mm256_set1_epi16(0x1001)));
  store_as(stream, _mm_packus_epi16(low_half(bytes), high_half(bytes)));
}
inline Vector load_symbols2(const uint8_t* stream) {
  // Each byte in 4 lanes, in the latter two from its bit 4 on. What is left of it, the lowest two
  // bits or those above them, is looked up.
  alignas(16) static constexpr uint8_t kSymbol[16] = {0, 1, 2, 3, 1, 0, 0, 0, 2, 0, 0, 0, 3};
  const __m256i all = _mm256_set1_epi64x(load_as<int64_t>(stream));
  const __m256i spread =
      _mm256_shuffle_epi8(all, _mm256_setr_epi64x(0x0101010100000000, 0x0303030302020202,
                                                  0x0505050504040404, 0x0707070706060606));
  const Vector mixed = vector(_mm256_blend_epi16(spread, _mm256_srli_epi16(spread, 4), 0xaa));
  return look_up(repeat16(kSymbol), mixed & vector(_mm256_set1_epi16(0x0c03)));
}
inline Vector load_symbols4(const uint8_t* stream) {
  using Words = Elements<uint16_t>::Vector;
  const auto bytes = reinterpret_cast<Words>(_mm256_cvtepu8_epi16(load_as<__m128i>(stream)));
  return reinterpret_cast<Vector>(bytes | bytes << 4) & 15;
}

// Bytes 0, 2, 4, ... or 1, 3, 5, ... of two vectors in a row, and the reverse.
inline Vector in_order(__m256i packed) { return vector(_mm256_permute4x64_epi64(packed, 0xd8)); }
inline Vector even_bytes(Vector a, Vector b) {
  const __m256i low = _mm256_set1_epi16(0xff);
  return in_order(
      _mm256_packus_epi16(_mm256_and_si256(native(a), low), _mm256_and_si256(native(b), low)));
}
inline Vector odd_bytes(Vector a, Vector b) {
  return in_order(
      _mm256_packus_epi16(_mm256_srli_epi16(native(a), 8), _mm256_srli_epi16(native(b), 8)));
}
// Lanes of two bytes and more that are all ones or 0, half as wide.
inline Vector narrow(Vector a, Vector b) {
  return in_order(_mm256_packs_epi16(native(a), native(b)));
}
// Lanes of two bytes and more to lanes half as wide that have their highest bits.
inline Vector narrow_signs(Vector a, Vector b) { return narrow(a, b); }
inline Vector interleave_low(Vector a, Vector b) {
  return vector(_mm256_permute2x128_si256(_mm256_unpacklo_epi8(native(a), native(b)),
                                          _mm256_unpackhi_epi8(native(a), native(b)), 0x20));
}
inline Vector interleave_high(Vector a, Vector b) {
  return vector(_mm256_permute2x128_si256(_mm256_unpacklo_epi8(native(a), native(b)),
                                          _mm256_unpackhi_epi8(native(a), native(b)), 0x31));
}
// The same of 4 bytes, and of pairs of bytes.
inline Vector even_words(Vector a, Vector b) {
  const __m256 words =
      _mm256_shuffle_ps(_mm256_castsi256_ps(native(a)), _mm256_castsi256_ps(native(b)), 0x88);
  return in_order(_mm256_castps_si256(words));
}
inline Vector odd_words(Vector a, Vector b) {
  const __m256 words =
      _mm256_shuffle_ps(_mm256_castsi256_ps(native(a)), _mm256_castsi256_ps(native(b)), 0xdd);
  return in_order(_mm256_castps_si256(words));
}
// Of 4 bytes, the lower and the upper half of the vector to 8 bytes.
inline Vector widen_low_words(Vector words) {
  return vector(_mm256_cvtepu32_epi64(low_half(words)));
}
inline Vector widen_high_words(Vector words) {
  return vector(_mm256_cvtepu32_epi64(high_half(words)));
}
inline Vector odd_halves(Vector a, Vector b) {
  return in_order(
      _mm256_packus_epi32(_mm256_srli_epi32(native(a), 16), _mm256_srli_epi32(native(b), 16)));
}
inline Vector interleave_low_halves(Vector a, Vector b) {
  return vector(_mm256_permute2x128_si256(_mm256_unpacklo_epi16(native(a), native(b)),
                                          _mm256_unpackhi_epi16(native(a), native(b)), 0x20));
}
inline Vector interleave_high_halves(Vector a, Vector b) {
  return vector(_mm256_permute2x128_si256(_mm256_unpacklo_epi16(native(a), native(b)),
                                          _mm256_unpackhi_epi16(native(a), native(b)), 0x31));
}

}  // namespace
}  // namespace memswap::cpu::MEMSWAP_ISA

MEMSWAP_VECTOR_END
