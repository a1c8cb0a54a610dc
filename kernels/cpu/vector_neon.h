// What GCC's vector extensions lack or compilers do badly, for NEON. What each function does stands
// in vector_avx2.h.
#pragma once

#include "vector_extensions.h"

MEMSWAP_VECTOR_BEGIN

namespace memswap::cpu::MEMSWAP_ISA {
namespace {

inline uint8x16_t native(Vector value) { return reinterpret_cast<uint8x16_t>(value); }
inline uint16x8_t native_halves(Vector value) { return reinterpret_cast<uint16x8_t>(value); }
template <typename Native>
inline Vector vector(Native value) {
  return reinterpret_cast<Vector>(value);
}

inline void fence() {}

template <bool>
inline void store_line(void* to, Vector value) {
  store(to, value);
}

inline uint32_t lane_bits(uint64_t lanes) {
  return static_cast<uint32_t>((lanes & 0x8040201008040201) * 0x0101010101010101 >> 56);
}

using Mask = Vector;

inline Mask mask_of(Lanes lanes) { return lanes; }
template <uint32_t kBit>
inline Mask mask_of_bit(Vector value) {
  return vector(vtstq_u8(native(value), vdupq_n_u8(1 << kBit)));
}
inline uint32_t count_of(Mask mask) { return vaddvq_u8(native(mask & 1)); }
inline bool any(Mask mask) { return vmaxvq_u8(native(mask)) != 0; }

inline void store_mask(uint8_t* to, Mask mask) {
  const Words64 words = reinterpret_cast<Words64>(mask);
  to[0] = static_cast<uint8_t>(lane_bits(words[0]));
  to[1] = static_cast<uint8_t>(lane_bits(words[1]));
}
inline Lanes load_lanes(const uint8_t* from) {
  const Words64 spread = Words64{from[0], from[1]} * 0x0101010101010101;
  return ~equal(reinterpret_cast<Vector>(spread) & load(kLaneNumbers.bit), Vector{});
}

inline Mask load_mask(const uint8_t* from) { return load_lanes(from); }

inline Vector repeat16(const uint8_t* table) { return load(table); }
inline Vector look_up(Vector table, Vector index) {
  return vector(vqtbl1q_u8(native(table), native(index)));
}

inline uint64_t look_up8(uint64_t word, const uint8_t* indices) {
  return vget_lane_u64(vreinterpret_u64_u8(vtbl1_u8(vcreate_u8(word), vld1_u8(indices))), 0);
}
inline uint64_t compress8(uint64_t word, uint64_t lanes) {
  return look_up8(word, kChosenLanes[0].of[lane_bits(lanes)]);
}
inline uint32_t count_word(uint64_t lanes) {
  return static_cast<uint32_t>(__builtin_popcountll(lanes)) / 8;
}

[[gnu::always_inline]] inline uint8_t* append(uint8_t* to, Mask chosen, Vector value) {
  const Words64 lanes = reinterpret_cast<Words64>(chosen);
  const Words64 words = reinterpret_cast<Words64>(value);
  for (uint32_t i = 0; i < kWords; ++i) {
    store_as<uint64_t>(to, compress8(words[i], lanes[i]));
    to += count_word(lanes[i]);
  }
  return to;
}

[[gnu::always_inline]] inline uint8_t* append(uint8_t* to, const uint8_t* chosen, Vector value) {
  const Words64 words = reinterpret_cast<Words64>(value);
  for (uint32_t i = 0; i < kWords; ++i) {
    store_as<uint64_t>(to, look_up8(words[i], kChosenLanes[0].of[chosen[i]]));
    to += __builtin_popcount(chosen[i]);
  }
  return to;
}

template <uint32_t kWidth>
[[gnu::always_inline]] inline uint8_t* append_elements(uint8_t* to, size_t chosen,
                                                       const uint8_t* elements) {
  constexpr uint32_t kElements = kLanes / kWidth;
  for (uint32_t i = 0; i < 8; i += kElements) {
    const size_t here = chosen >> i & ((1u << kElements) - 1);
    store(to, look_up(load(elements + kWidth * i), load(kChosenParts<kElements, kWidth>.of[here])));
    to += kWidth * __builtin_popcountll(here);
  }
  return to;
}

// There is one half.
struct LaneCounts {
  size_t all;
};
[[gnu::always_inline]] inline LaneCounts count_lanes(Lanes lanes) { return {count_of(lanes)}; }
[[gnu::always_inline]] inline Vector load_halves(const uint8_t* from, LaneCounts) {
  return load(from);
}
using Sums = Elements<uint16_t>::Vector;
inline Sums add_bytes(Sums sums, Vector bytes) {
  return reinterpret_cast<Sums>(vpadalq_u8(reinterpret_cast<uint16x8_t>(sums), native(bytes)));
}
inline uint32_t total(Sums sums) { return vaddlvq_u16(reinterpret_cast<uint16x8_t>(sums)); }
inline uint32_t sum_of(Vector bytes) { return vaddlvq_u8(native(bytes)); }
inline uint32_t lowest_of(Vector bytes) { return vminvq_u8(native(bytes)); }
inline uint32_t highest_of(Vector bytes) { return vmaxvq_u8(native(bytes)); }

inline Words64 multiply_low_halves(Words64 a, Words64 b) {
  return reinterpret_cast<Words64>(vmull_u32(vmovn_u64(reinterpret_cast<uint64x2_t>(a)),
                                             vmovn_u64(reinterpret_cast<uint64x2_t>(b))));
}

inline uint16_t pack2(uint64_t word) {
  word &= 0x0303030303030303;
  word = (word | word >> 6) & 0x000f000f000f000f;
  word = (word | word >> 12) & 0x000000ff000000ff;
  return static_cast<uint16_t>(word | word >> 24);
}
inline uint32_t pack4(uint64_t word) {
  word &= 0x0f0f0f0f0f0f0f0f;
  word = (word | word >> 4) & 0x00ff00ff00ff00ff;
  word = (word | word >> 8) & 0x0000ffff0000ffff;
  return static_cast<uint32_t>(word | word >> 16);
}
inline uint64_t spread2(uint16_t packed) {
  uint64_t word = packed;
  word = (word | word << 24) & 0x000000ff000000ff;
  word = (word | word << 12) & 0x000f000f000f000f;
  return (word | word << 6) & 0x0303030303030303;
}
inline uint64_t spread4(uint32_t packed) {
  uint64_t word = packed;
  word = (word | word << 16) & 0x0000ffff0000ffff;
  word = (word | word << 8) & 0x00ff00ff00ff00ff;
  return (word | word << 4) & 0x0f0f0f0f0f0f0f0f;
}

inline void store_symbols2(uint8_t* stream, Vector symbols) {
  const Words64 words = reinterpret_cast<Words64>(symbols);
  for (uint32_t i = 0; i < kWords; ++i) {
    store_as<uint16_t>(stream + 2 * i, pack2(words[i]));
  }
}
inline void store_symbols4(uint8_t* stream, Vector symbols) {
  const Words64 words = reinterpret_cast<Words64>(symbols);
  for (uint32_t i = 0; i < kWords; ++i) {
    store_as<uint32_t>(stream + 4 * i, pack4(words[i]));
  }
}
inline Vector load_symbols2(const uint8_t* stream) {
  Words64 words{};
  for (uint32_t i = 0; i < kWords; ++i) {
    words[i] = spread2(load_as<uint16_t>(stream + 2 * i));
  }
  return reinterpret_cast<Vector>(words);
}
inline Vector load_symbols4(const uint8_t* stream) {
  Words64 words{};
  for (uint32_t i = 0; i < kWords; ++i) {
    words[i] = spread4(load_as<uint32_t>(stream + 4 * i));
  }
  return reinterpret_cast<Vector>(words);
}

inline Vector even_bytes(Vector a, Vector b) { return vector(vuzp1q_u8(native(a), native(b))); }
inline Vector odd_bytes(Vector a, Vector b) { return vector(vuzp2q_u8(native(a), native(b))); }
inline Vector narrow(Vector a, Vector b) { return even_bytes(a, b); }
inline Vector narrow_signs(Vector a, Vector b) { return odd_bytes(a, b); }
inline Vector interleave_low(Vector a, Vector b) { return vector(vzip1q_u8(native(a), native(b))); }
inline Vector interleave_high(Vector a, Vector b) {
  return vector(vzip2q_u8(native(a), native(b)));
}
inline Vector even_words(Vector a, Vector b) {
  return vector(vuzp1q_u32(reinterpret_cast<uint32x4_t>(a), reinterpret_cast<uint32x4_t>(b)));
}
inline Vector odd_words(Vector a, Vector b) {
  return vector(vuzp2q_u32(reinterpret_cast<uint32x4_t>(a), reinterpret_cast<uint32x4_t>(b)));
}
inline Vector widen_low_words(Vector words) {
  return vector(vmovl_u32(vget_low_u32(reinterpret_cast<uint32x4_t>(words))));
}
inline Vector widen_high_words(Vector words) {
  return vector(vmovl_high_u32(reinterpret_cast<uint32x4_t>(words)));
}
inline Vector odd_halves(Vector a, Vector b) {
  return vector(vuzp2q_u16(native_halves(a), native_halves(b)));
}
inline Vector interleave_low_halves(Vector a, Vector b) {
  return vector(vzip1q_u16(native_halves(a), native_halves(b)));
}
inline Vector interleave_high_halves(Vector a, Vector b) {
  return vector(vzip2q_u16(native_halves(a), native_halves(b)));
}

}  // namespace
}  // namespace memswap::cpu::MEMSWAP_ISA

MEMSWAP_VECTOR_END
