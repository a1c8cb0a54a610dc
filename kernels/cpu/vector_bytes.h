// Vectors of bytes from GCC's vector extensions: one source that is AVX2 and BMI2 on x86-64 and
// NEON on aarch64. What the extensions do not have (moving chosen bytes together, cutting bits out
// of words) is in the first part, once per target; internal linkage throughout, as these files are
// compiled for more than the baseline on x86-64.
#pragma once

#include <stddef.h>
#include <stdint.h>

#if defined(__x86_64__)
#include <immintrin.h>
// clang-format off
#if defined(__clang__)
#define MEMSWAP_VECTOR_BEGIN                                                                  \
  _Pragma("clang attribute push(__attribute__((target(\"avx2,bmi,bmi2,popcnt\"))), apply_to = function)")
#define MEMSWAP_VECTOR_END _Pragma("clang attribute pop")
#else
#define MEMSWAP_VECTOR_BEGIN                                                                  \
  _Pragma("GCC push_options")                                                                 \
  _Pragma("GCC target(\"avx2,bmi,bmi2,popcnt\")")
#define MEMSWAP_VECTOR_END _Pragma("GCC pop_options")
#endif
// clang-format on
#else
#include <arm_neon.h>
#define MEMSWAP_VECTOR_BEGIN
#define MEMSWAP_VECTOR_END
#endif

#include "block.h"

MEMSWAP_VECTOR_BEGIN

namespace memswap::cpu::vector {
namespace {

#if defined(__x86_64__)

inline constexpr uint32_t kLanes = 32;

// The bytes of `word` whose lane is 255, moved together; lanes are 0 or 255.
inline uint64_t compress8(uint64_t word, uint64_t lanes) { return _pext_u64(word, lanes); }
// The reverse; other lanes become 0.
inline uint64_t expand8(uint64_t word, uint64_t lanes) { return _pdep_u64(word, lanes); }

// The low 2 or 4 bits of each byte, moved together, and back.
inline uint16_t pack2(uint64_t word) {
  return static_cast<uint16_t>(_pext_u64(word, 0x0303030303030303));
}
inline uint32_t pack4(uint64_t word) {
  return static_cast<uint32_t>(_pext_u64(word, 0x0f0f0f0f0f0f0f0f));
}
inline uint64_t spread2(uint16_t packed) { return _pdep_u64(packed, 0x0303030303030303); }
inline uint64_t spread4(uint32_t packed) { return _pdep_u64(packed, 0x0f0f0f0f0f0f0f0f); }

inline void fence() { _mm_sfence(); }

#else

inline constexpr uint32_t kLanes = 16;

// By which of 8 lanes are chosen: their numbers in a row, and each lane's place in that row. 255:
// none.
struct LaneTables {
  uint8_t chosen[256][8];
  uint8_t place[256][8];
};
constexpr LaneTables make_lane_tables() {
  LaneTables tables{};
  for (uint32_t lanes = 0; lanes < 256; ++lanes) {
    uint8_t count = 0;
    for (uint8_t lane = 0; lane < 8; ++lane) {
      tables.chosen[lanes][lane] = 255;
      tables.place[lanes][lane] = 255;
    }
    for (uint8_t lane = 0; lane < 8; ++lane) {
      if ((lanes >> lane & 1) != 0) {
        tables.place[lanes][lane] = count;
        tables.chosen[lanes][count++] = lane;
      }
    }
  }
  return tables;
}
inline constexpr LaneTables kLaneTables = make_lane_tables();

inline uint32_t lane_bits(uint64_t lanes) {
  return static_cast<uint32_t>((lanes & 0x8040201008040201) * 0x0101010101010101 >> 56);
}
inline uint64_t look_up8(uint64_t word, const uint8_t* indices) {
  return vget_lane_u64(vreinterpret_u64_u8(vtbl1_u8(vcreate_u8(word), vld1_u8(indices))), 0);
}
inline uint64_t compress8(uint64_t word, uint64_t lanes) {
  return look_up8(word, kLaneTables.chosen[lane_bits(lanes)]);
}
inline uint64_t expand8(uint64_t word, uint64_t lanes) {
  return look_up8(word, kLaneTables.place[lane_bits(lanes)]);
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

inline void fence() {}

#endif

// --- What follows is the same everywhere --------------------------------------------------------

typedef uint8_t Vector __attribute__((vector_size(kLanes)));
typedef uint16_t Words16 __attribute__((vector_size(kLanes)));
typedef uint32_t Words32 __attribute__((vector_size(kLanes)));
typedef uint64_t Words64 __attribute__((vector_size(kLanes)));

inline constexpr uint32_t kWords = kLanes / 8;
inline constexpr uint32_t kVectors = frame::kBlockElements / kLanes;  // of a byte per element
inline constexpr uint32_t kPlane1Bytes = frame::kBlockElements / 8;

struct Bytes {
  Vector vector[kVectors];
};

// Room for a block's symbols in a row, and for what moving whole vectors touches behind them.
struct alignas(64) Row {
  uint8_t byte[frame::kBlockElements + 64];
};

template <typename Value>
inline Value load_as(const void* from) {
  Value value;
  __builtin_memcpy(&value, from, sizeof value);
  return value;
}
template <typename Value>
inline void store_as(void* to, Value value) {
  __builtin_memcpy(to, &value, sizeof value);
}
inline Vector load(const void* from) { return load_as<Vector>(from); }
inline void store(void* to, Vector value) { store_as(to, value); }
inline Vector broadcast(uint32_t byte) { return Vector{} + static_cast<uint8_t>(byte); }

// Bypasses the caches where the target can and nobody reads the line soon; `to` is aligned then.
template <bool kStreaming>
inline void store_line(void* to, Vector value) {
#if defined(__x86_64__)
  if constexpr (kStreaming) {
    _mm256_stream_si256(static_cast<__m256i*>(to), reinterpret_cast<__m256i>(value));
    return;
  }
#endif
  store(to, value);
}

inline bool is_line_aligned(const void* address) {
  return reinterpret_cast<uintptr_t>(address) % 64 == 0;
}

inline Vector minimum(Vector a, Vector b) { return a < b ? a : b; }
inline Vector maximum(Vector a, Vector b) { return a > b ? a : b; }
// Lanes of 0 or 255.
typedef int8_t Condition __attribute__((vector_size(kLanes)));
inline Vector lanes_where(Condition condition) { return reinterpret_cast<Vector>(condition); }
inline Vector select(Vector lanes, Vector yes, Vector no) { return (yes & lanes) | (no & ~lanes); }

inline uint32_t count_lanes(uint64_t lanes) {
  return static_cast<uint32_t>(__builtin_popcountll(lanes)) / 8;
}

inline uint32_t sum_of(Vector bytes) {
  const Words64 words = reinterpret_cast<Words64>(bytes);
  uint32_t sum = 0;
  for (uint32_t i = 0; i < kWords; ++i) {
    const uint64_t pairs = (words[i] & 0x00ff00ff00ff00ff) + (words[i] >> 8 & 0x00ff00ff00ff00ff);
    sum += static_cast<uint32_t>(pairs * 0x0001000100010001 >> 48);
  }
  return sum;
}

// The lanes whose number is below `count`.
inline Vector first_lanes(uint32_t count) {
  Vector numbers;
  for (uint32_t i = 0; i < kLanes; ++i) {
    numbers[i] = static_cast<uint8_t>(i);
  }
  return lanes_where(numbers < broadcast(count < kLanes ? count : kLanes));
}

// Appends the chosen lanes to `to` and returns its new end; up to kLanes bytes are written.
inline uint8_t* append(uint8_t* to, Vector chosen, Vector value) {
  const Words64 lanes = reinterpret_cast<Words64>(chosen);
  const Words64 words = reinterpret_cast<Words64>(value);
  for (uint32_t i = 0; i < kWords; ++i) {
    store_as<uint64_t>(to, compress8(words[i], lanes[i]));
    to += count_lanes(lanes[i]);
  }
  return to;
}

// `otherwise`, its chosen lanes replaced by the next bytes of `from`.
inline Vector expand(Vector otherwise, Vector chosen, const uint8_t*& from) {
  const Words64 lanes = reinterpret_cast<Words64>(chosen);
  Words64 words{};
  for (uint32_t i = 0; i < kWords; ++i) {
    words[i] = expand8(load_as<uint64_t>(from), lanes[i]);
    from += count_lanes(lanes[i]);
  }
  return reinterpret_cast<Vector>(words) | (otherwise & ~chosen);
}

// A bit for each lane, and back.
inline void store_bits(uint8_t* to, Vector lanes) {
#if defined(__x86_64__)
  store_as<uint32_t>(to,
                     static_cast<uint32_t>(_mm256_movemask_epi8(reinterpret_cast<__m256i>(lanes))));
#else
  const Words64 words = reinterpret_cast<Words64>(lanes);
  to[0] = static_cast<uint8_t>(lane_bits(words[0]));
  to[1] = static_cast<uint8_t>(lane_bits(words[1]));
#endif
}
inline Vector load_bits(const uint8_t* from) {
  Vector spread, bit;
#if defined(__x86_64__)
  const auto all = _mm256_set1_epi32(static_cast<int>(load_as<uint32_t>(from)));
  spread = reinterpret_cast<Vector>(_mm256_shuffle_epi8(
      all, _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303)));
#else
  spread = reinterpret_cast<Vector>(Words64{from[0], from[1]} * 0x0101010101010101);
#endif
  for (uint32_t i = 0; i < kLanes; ++i) {
    bit[i] = static_cast<uint8_t>(1u << i % 8);
  }
  return lanes_where((spread & bit) != 0);
}

// Bytes 0, 2, 4, ... or 1, 3, 5, ... of two vectors in a row, and the reverse.
#if defined(__x86_64__)
#define MEMSWAP_LANES(lane)                                                                     \
  lane(0), lane(1), lane(2), lane(3), lane(4), lane(5), lane(6), lane(7), lane(8), lane(9),     \
      lane(10), lane(11), lane(12), lane(13), lane(14), lane(15), lane(16), lane(17), lane(18), \
      lane(19), lane(20), lane(21), lane(22), lane(23), lane(24), lane(25), lane(26), lane(27), \
      lane(28), lane(29), lane(30), lane(31)
#else
#define MEMSWAP_LANES(lane)                                                                 \
  lane(0), lane(1), lane(2), lane(3), lane(4), lane(5), lane(6), lane(7), lane(8), lane(9), \
      lane(10), lane(11), lane(12), lane(13), lane(14), lane(15)
#endif
#define MEMSWAP_EVEN(i) 2 * i
#define MEMSWAP_ODD(i) 2 * i + 1
#define MEMSWAP_LOW(i) \
  i / 2 + i % 2 * int { kLanes }
#define MEMSWAP_HIGH(i) \
  int{kLanes} / 2 + i / 2 + i % 2 * int { kLanes }
inline Vector even_bytes(Vector a, Vector b) {
  return __builtin_shufflevector(a, b, MEMSWAP_LANES(MEMSWAP_EVEN));
}
inline Vector odd_bytes(Vector a, Vector b) {
  return __builtin_shufflevector(a, b, MEMSWAP_LANES(MEMSWAP_ODD));
}
inline Vector interleave_low(Vector a, Vector b) {
  return __builtin_shufflevector(a, b, MEMSWAP_LANES(MEMSWAP_LOW));
}
inline Vector interleave_high(Vector a, Vector b) {
  return __builtin_shufflevector(a, b, MEMSWAP_LANES(MEMSWAP_HIGH));
}
#undef MEMSWAP_LANES
#undef MEMSWAP_EVEN
#undef MEMSWAP_ODD
#undef MEMSWAP_LOW
#undef MEMSWAP_HIGH

// kLanes elements of kWidth bytes, in kWidth vectors, to byte planes and back.
template <uint32_t kWidth>
inline void split_bytes(Vector (&v)[kWidth]) {
  if constexpr (kWidth == 2) {
    const Vector low = even_bytes(v[0], v[1]);
    v[1] = odd_bytes(v[0], v[1]);
    v[0] = low;
  } else if constexpr (kWidth == 4) {
    const Vector even01 = even_bytes(v[0], v[1]), even23 = even_bytes(v[2], v[3]);
    const Vector odd01 = odd_bytes(v[0], v[1]), odd23 = odd_bytes(v[2], v[3]);
    v[0] = even_bytes(even01, even23);
    v[1] = even_bytes(odd01, odd23);
    v[2] = odd_bytes(even01, even23);
    v[3] = odd_bytes(odd01, odd23);
  }
}
template <uint32_t kWidth>
inline void join_bytes(Vector (&v)[kWidth]) {
  if constexpr (kWidth == 2) {
    const Vector low = interleave_low(v[0], v[1]);
    v[1] = interleave_high(v[0], v[1]);
    v[0] = low;
  } else if constexpr (kWidth == 4) {
    const Vector even01 = interleave_low(v[0], v[2]), even23 = interleave_high(v[0], v[2]);
    const Vector odd01 = interleave_low(v[1], v[3]), odd23 = interleave_high(v[1], v[3]);
    v[0] = interleave_low(even01, odd01);
    v[1] = interleave_high(even01, odd01);
    v[2] = interleave_low(even23, odd23);
    v[3] = interleave_high(even23, odd23);
  }
}

template <uint32_t kWidth>
inline Vector rotate_left(Vector value) {
  if constexpr (kWidth == 2) {
    const Words16 words = reinterpret_cast<Words16>(value);
    return reinterpret_cast<Vector>(words << 1 | words >> 15);
  } else {
    const Words32 words = reinterpret_cast<Words32>(value);
    return reinterpret_cast<Vector>(words << 1 | words >> 31);
  }
}
template <uint32_t kWidth>
inline Vector rotate_right(Vector value) {
  if constexpr (kWidth == 2) {
    const Words16 words = reinterpret_cast<Words16>(value);
    return reinterpret_cast<Vector>(words >> 1 | words << 15);
  } else {
    const Words32 words = reinterpret_cast<Words32>(value);
    return reinterpret_cast<Vector>(words >> 1 | words << 31);
  }
}

// --- Planes of the bits from kShift on (docs/format.md section 2) --------------------------------

template <uint32_t kShift, uint32_t kWidth, bool kStreaming>
inline void store_plane(uint8_t* plane, const Bytes& bytes) {
  if constexpr (kWidth == 1) {
    constexpr uint8_t kBit = 1 << kShift;
    for (uint32_t i = 0; i < kVectors; ++i) {
      store_bits(plane + kLanes / 8 * i, lanes_where((bytes.vector[i] & kBit) != 0));
    }
  } else {
    constexpr uint32_t kParts = 8 / kWidth;
    constexpr uint32_t kPlaneVectors = kVectors / kParts;
    constexpr uint8_t kMask = (1 << kWidth) - 1;
    for (uint32_t i = 0; i < kPlaneVectors; ++i) {
      Vector merged{};
      for (uint32_t part = 0; part < kParts; ++part) {
        const Vector field = bytes.vector[kPlaneVectors * part + i] >> kShift & kMask;
        merged |= field << static_cast<uint8_t>(kWidth * part);
      }
      store_line<kStreaming>(plane + kLanes * i, merged);
    }
  }
}

// Sets the bits that were 0.
template <uint32_t kShift, uint32_t kWidth>
inline void add_plane(Bytes& bytes, const uint8_t* plane) {
  if constexpr (kWidth == 1) {
    constexpr uint8_t kBit = 1 << kShift;
    for (uint32_t i = 0; i < kVectors; ++i) {
      bytes.vector[i] |= load_bits(plane + kLanes / 8 * i) & kBit;
    }
  } else {
    constexpr uint32_t kParts = 8 / kWidth;
    constexpr uint32_t kPlaneVectors = kVectors / kParts;
    constexpr uint8_t kMask = (1 << kWidth) - 1;
    for (uint32_t i = 0; i < kPlaneVectors; ++i) {
      const Vector merged = load(plane + kLanes * i);
      for (uint32_t part = 0; part < kParts; ++part) {
        const Vector field = merged >> static_cast<uint8_t>(kWidth * part) & kMask;
        bytes.vector[kPlaneVectors * part + i] |= field << kShift;
      }
    }
  }
}

inline constexpr uint32_t bytes_of_bits(uint32_t bits) { return (bits + 7) / 8; }
inline constexpr uint32_t units_of_bytes(uint32_t bytes) {
  return (bytes + frame::kUnitBytes - 1) / frame::kUnitBytes;
}

// --- Streams: kLanes symbols, one per byte -------------------------------------------------------

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

}  // namespace
}  // namespace memswap::cpu::vector

MEMSWAP_VECTOR_END
