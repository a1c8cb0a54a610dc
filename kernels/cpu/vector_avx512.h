// What GCC's vector extensions lack or compilers do badly, for AVX-512 with VBMI2. What each
// function does stands in vector_avx2.h.
#pragma once

#include "vector_lanes.h"

MEMSWAP_VECTOR_BEGIN

namespace memswap::cpu::MEMSWAP_ISA {
namespace {

inline __m512i native(Vector value) { return __builtin_bit_cast(__m512i, value); }
inline Vector vector(__m512i value) { return __builtin_bit_cast(Vector, value); }

inline void fence() { _mm_sfence(); }

template <bool kStreaming>
inline void store_line(void* to, Vector value) {
  if constexpr (kStreaming) {
    _mm512_stream_si512(static_cast<__m512i*>(to), native(value));
  } else {
    store(to, value);
  }
}

// Which lanes are chosen: a bit for each.
using Mask = uint64_t;
using Lanes = Mask;

inline Mask mask_of(Lanes lanes) { return lanes; }
inline Lanes equal(Vector a, Vector b) { return _mm512_cmpeq_epi8_mask(native(a), native(b)); }
inline Lanes less(Vector a, Vector b) { return _mm512_cmplt_epu8_mask(native(a), native(b)); }
inline Lanes nonzero(Vector value) { return _mm512_test_epi8_mask(native(value), native(value)); }
inline Vector only(Lanes lanes, Vector value) {
  return vector(_mm512_maskz_mov_epi8(lanes, native(value)));
}
inline Vector increment(Vector value, Lanes lanes) {
  return vector(_mm512_mask_add_epi8(native(value), lanes, native(value), _mm512_set1_epi8(1)));
}
template <uint32_t kBit>
inline Vector set_bit(Vector value, Lanes lanes) {
  const __m512i bit = _mm512_set1_epi8(static_cast<char>(1u << kBit));
  return vector(_mm512_mask_add_epi8(native(value), lanes, native(value), bit));
}
inline Lanes first_lanes(uint32_t count) {
  return count >= kLanes ? ~uint64_t{0} : _bzhi_u64(~uint64_t{0}, count);
}
template <uint32_t kBit>
inline Mask mask_of_bit(Vector value) {
  return _mm512_test_epi8_mask(native(value), _mm512_set1_epi8(static_cast<char>(1u << kBit)));
}
inline uint32_t count_of(Mask mask) { return static_cast<uint32_t>(_mm_popcnt_u64(mask)); }
inline bool any(Mask mask) { return mask != 0; }

class LaneCounter {
 public:
  void add(Lanes lanes) { count_ += count_of(lanes); }
  uint32_t total() const { return count_; }

 private:
  uint32_t count_ = 0;
};

inline void store_mask(uint8_t* to, Mask mask) { store_as(to, mask); }
inline Mask load_mask(const uint8_t* from) { return load_as<Mask>(from); }
inline Lanes load_lanes(const uint8_t* from) { return load_mask(from); }

inline Vector minimum(Vector a, Vector b) { return vector(_mm512_min_epu8(native(a), native(b))); }
inline Vector maximum(Vector a, Vector b) { return vector(_mm512_max_epu8(native(a), native(b))); }

// A matrix by which `count` bits from `from` on go to `to`; those of several moves are combined by
// |.
constexpr uint64_t matrix_of(uint32_t from, uint32_t to, uint32_t count) {
  uint64_t matrix = 0;
  for (uint32_t i = 0; i < count; ++i) {
    matrix |= uint64_t{1} << (8 * (7 - to - i) + from + i);
  }
  return matrix;
}
// One instruction where others have a shift of words and a mask.
template <uint64_t kMatrix>
inline Vector map_bits(Vector value) {
  return vector(_mm512_gf2p8affine_epi64_epi8(
      native(value), _mm512_set1_epi64(static_cast<long long>(kMatrix)), 0));
}

template <uint32_t kFrom, uint32_t kTo, uint32_t kCount>
inline Vector move_bits(Vector value) {
  if constexpr (kFrom == kTo) {
    return value & static_cast<uint8_t>(((1u << kCount) - 1) << kTo);
  } else {
    return map_bits<matrix_of(kFrom, kTo, kCount)>(value);
  }
}

// Any bits of a byte can go anywhere at once.
template <uint32_t kBits, uint32_t kAt>
inline Vector rest_of_byte(Vector element) {
  return map_bits<(matrix_of(7, kAt, 1) | matrix_of(0, kAt + 1, kBits - 1))>(element);
}
template <uint32_t kBits, uint32_t kAt>
inline Vector rest_in_byte(Vector rest) {
  return map_bits<(matrix_of(kAt, 7, 1) | matrix_of(kAt + 1, 0, kBits - 1))>(rest);
}

template <uint32_t kAt>
inline Vector rest3_in_byte(Vector low, Lanes high) {
  return set_bit<1>(rest_in_byte<2, kAt>(low), high);
}

template <uint32_t kWidth>
inline Vector rotate_left(Vector value) {
  if constexpr (kWidth == 2) {
    return vector(_mm512_shldi_epi16(native(value), native(value), 1));
  } else if constexpr (kWidth == 4) {
    return vector(_mm512_rol_epi32(native(value), 1));
  } else {
    static_assert(kWidth == 8 || kWidth == 1);
    return kWidth == 8 ? vector(_mm512_rol_epi64(native(value), 1))
                       : map_bits<(matrix_of(7, 0, 1) | matrix_of(0, 1, 7))>(value);
  }
}
template <uint32_t kWidth>
inline Vector rotate_right(Vector value) {
  if constexpr (kWidth == 2) {
    return vector(_mm512_shrdi_epi16(native(value), native(value), 1));
  } else if constexpr (kWidth == 4) {
    return vector(_mm512_ror_epi32(native(value), 1));
  } else {
    static_assert(kWidth == 8 || kWidth == 1);
    return kWidth == 8 ? vector(_mm512_ror_epi64(native(value), 1))
                       : map_bits<(matrix_of(0, 7, 1) | matrix_of(1, 0, 7))>(value);
  }
}

inline Vector repeat16(const uint8_t* table) {
  return vector(_mm512_broadcast_i32x4(load_as<__m128i>(table)));
}
inline Vector look_up(Vector table, Vector index) {
  return vector(_mm512_shuffle_epi8(native(table), native(index)));
}

// See [Note: tables of symbols].
inline constexpr uint32_t kTableSymbols = kLanes;
inline Vector look_up_symbols(Vector table, Vector symbols) {
  return vector(_mm512_permutexvar_epi8(native(symbols), native(table)));
}

// [Note: compressing into a zero]
// vpcompress and vpexpand wait for what their destination held, also where they zero the lanes that
// they do not fill (Zen 5: one in 5 cycles where all have the same destination, as in a loop, and
// one in 1.4 to 2 otherwise). So their result is merged into a zero; the compiler may not know that
// it is one, or it would zero lanes instead. And the register form: compressing straight to memory
// is microcode on Zen 4, and takes 4 cycles on Zen 5.
inline __m512i opaque_zero() {
  __m512i zero = _mm512_setzero_si512();
  asm("" : MEMSWAP_AVX512_OPERAND(zero));
  return zero;
}

[[gnu::always_inline]] inline uint8_t* append(uint8_t* to, Mask chosen, Vector value) {
  store(to, vector(_mm512_mask_compress_epi8(opaque_zero(), chosen, native(value))));
  return to + count_of(chosen);
}
[[gnu::always_inline]] inline uint8_t* append(uint8_t* to, const uint8_t* chosen, Vector value) {
  return append(to, load_mask(chosen), value);
}

using Sums = Words64;
inline Sums add_bytes(Sums sums, Vector bytes) {
  return sums + __builtin_bit_cast(Sums, _mm512_sad_epu8(native(bytes), _mm512_setzero_si512()));
}
inline uint32_t total(Sums sums) {
  return static_cast<uint32_t>(_mm512_reduce_add_epi64(__builtin_bit_cast(__m512i, sums)));
}
inline uint32_t sum_of(Vector bytes) { return total(add_bytes(Sums{}, bytes)); }

inline Sums add_zero_fields2(Sums sums, Vector fields) {
  const __m512i all = native(fields);
  const __m512i zeros =  // ~(a | b) & c
      _mm512_ternarylogic_epi64(all, _mm512_srli_epi16(all, 1), _mm512_set1_epi8(0x55), 0x02);
  return sums + __builtin_bit_cast(Sums, _mm512_popcnt_epi64(zeros));
}

inline uint32_t lowest_of(Vector bytes) {
  const __m512i all = native(bytes);
  const __m256i half =
      _mm256_min_epu8(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
  const __m128i quarter =
      _mm_min_epu8(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  const __m128i pairs = _mm_min_epu8(quarter, _mm_srli_epi16(quarter, 8));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_minpos_epu16(pairs))) & 255;
}
inline uint32_t highest_of(Vector bytes) { return 255 - lowest_of(~bytes); }

inline Words64 multiply_low_halves(Words64 a, Words64 b) {
  return __builtin_bit_cast(
      Words64, _mm512_mul_epu32(__builtin_bit_cast(__m512i, a), __builtin_bit_cast(__m512i, b)));
}

inline void store_symbols2(uint8_t* stream, Vector symbols) {
  const __m512i places = _mm512_set1_epi32(0x40100401);  // 1, 4, 16, 64
  const __m512i packed = _mm512_dpbusd_epi32(_mm512_setzero_si512(), native(symbols), places);
  store_as(stream, _mm512_cvtepi32_epi8(packed));
}
inline void store_symbols4(uint8_t* stream, Vector symbols) {
  const __m512i packed = _mm512_maddubs_epi16(native(symbols), _mm512_set1_epi16(0x1001));
  store_as(stream, _mm512_cvtepi16_epi8(packed));
}
inline Vector load_symbols2(const uint8_t* stream) {
  const __m512i places = _mm512_set1_epi64(0x0e0c0a0806040200);
  const __m512i spread = _mm512_cvtepu16_epi64(load_as<__m128i>(stream));
  return vector(_mm512_multishift_epi64_epi8(places, spread)) & 3;
}
inline Vector load_symbols4(const uint8_t* stream) {
  const __m512i places = _mm512_set1_epi64(0x1c1814100c080400);
  const __m512i spread = _mm512_cvtepu32_epi64(load_as<__m256i>(stream));
  return vector(_mm512_multishift_epi64_epi8(places, spread)) & 15;
}

// Numbers of lanes of two vectors in a row.
struct alignas(64) LaneChoice {
  uint8_t lane[kLanes];
};
constexpr LaneChoice every(uint32_t size, uint32_t step, uint32_t first) {
  LaneChoice choice{};
  for (uint32_t i = 0; i < kLanes; ++i) {
    choice.lane[i] = static_cast<uint8_t>((i / size * step + first) * size + i % size);
  }
  return choice;
}
constexpr LaneChoice in_turns(uint32_t size, uint32_t first) {
  LaneChoice choice{};
  for (uint32_t i = 0; i < kLanes; ++i) {
    const uint32_t element = i / size;
    choice.lane[i] =
        static_cast<uint8_t>(first + element / 2 * size + element % 2 * kLanes + i % size);
  }
  return choice;
}
inline Vector choose(const LaneChoice& choice, Vector a, Vector b) {
  return vector(_mm512_permutex2var_epi8(native(a), native(load(choice.lane)), native(b)));
}
inline constexpr LaneChoice kEvenBytes = every(1, 2, 0), kOddBytes = every(1, 2, 1);
inline constexpr LaneChoice kEvenWords = every(4, 2, 0), kOddWords = every(4, 2, 1);
inline constexpr LaneChoice kOddHalves = every(2, 2, 1);
inline constexpr LaneChoice kBytesLow = in_turns(1, 0), kBytesHigh = in_turns(1, kLanes / 2);
inline constexpr LaneChoice kHalvesLow = in_turns(2, 0), kHalvesHigh = in_turns(2, kLanes / 2);

inline Vector even_bytes(Vector a, Vector b) { return choose(kEvenBytes, a, b); }
inline Vector odd_bytes(Vector a, Vector b) { return choose(kOddBytes, a, b); }
inline Vector interleave_low(Vector a, Vector b) { return choose(kBytesLow, a, b); }
inline Vector interleave_high(Vector a, Vector b) { return choose(kBytesHigh, a, b); }
inline Vector even_words(Vector a, Vector b) { return choose(kEvenWords, a, b); }
inline Vector odd_words(Vector a, Vector b) { return choose(kOddWords, a, b); }
inline Vector widen_low_words(Vector words) {
  return vector(_mm512_cvtepu32_epi64(_mm512_castsi512_si256(native(words))));
}
inline Vector widen_high_words(Vector words) {
  return vector(_mm512_cvtepu32_epi64(_mm512_extracti64x4_epi64(native(words), 1)));
}
inline Vector odd_halves(Vector a, Vector b) { return choose(kOddHalves, a, b); }
inline Vector interleave_low_halves(Vector a, Vector b) { return choose(kHalvesLow, a, b); }
inline Vector interleave_high_halves(Vector a, Vector b) { return choose(kHalvesHigh, a, b); }

inline constexpr bool kLooksAtMasks = false;

// The reverse of append: what vector_expansion.h says.
class Expansion {
 public:
  [[gnu::always_inline]] explicit Expansion(Lanes chosen) : chosen_(chosen) {}
  [[gnu::always_inline]] Vector of(const uint8_t* row) const {
    return vector(_mm512_mask_expand_epi8(opaque_zero(), chosen_, native(load(row))));
  }
  [[gnu::always_inline]] Vector take(const uint8_t*& row) const {
    const Vector expanded = of(row);
    row += count();
    return expanded;
  }
  [[gnu::always_inline]] Vector take_over(Vector base, const uint8_t*& row) const {
    const __m512i next = native(load(row));
    row += count();
    return vector(_mm512_mask_expand_epi8(native(base), chosen_, next));
  }
  uint32_t count() const { return count_of(chosen_); }

 private:
  Lanes chosen_;
};

// The bits of a stream from bit `at` on, in the chosen lanes. The two loads agree in the bits that
// both have: no branch asks whether `at` begins a byte.
inline Lanes spread_bits(const uint8_t* stream, uint32_t at, Lanes chosen) {
  const uint8_t* from = stream + at / 8;
  const uint64_t bits = load_as<uint64_t>(from) >> (at % 8) | load_as<uint64_t>(from + 1)
                                                                  << (8 - at % 8);
  return _pdep_u64(bits, chosen);
}

inline void copy_around_caches(void* to, const void* from, size_t bytes) {
  auto* out = static_cast<uint8_t*>(to);
  const auto* in = static_cast<const uint8_t*>(from);
  const auto copy_some = [&](size_t some) {
    const Lanes lanes = first_lanes(static_cast<uint32_t>(some));
    _mm512_mask_storeu_epi8(out, lanes, _mm512_maskz_loadu_epi8(lanes, in));
    out += some;
    in += some;
    bytes -= some;
  };
  const size_t before_line = (0 - reinterpret_cast<uintptr_t>(to)) % kLanes;
  copy_some(before_line < bytes ? before_line : bytes);
  for (; bytes >= kLanes; bytes -= kLanes) {
    store_line<true>(out, load(in));
    out += kLanes;
    in += kLanes;
  }
  copy_some(bytes);
}

}  // namespace
}  // namespace memswap::cpu::MEMSWAP_ISA

MEMSWAP_VECTOR_END
