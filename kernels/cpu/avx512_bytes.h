// Vectors of 64 bytes: memory, planes, streams, and elements cut into byte planes.
#pragma once

#include "avx512_target.h"
#include "block.h"

MEMSWAP_AVX512_BEGIN

namespace memswap::cpu::avx512 {
namespace {

using Vector = __m512i;

inline constexpr uint32_t kLanes = 64;
inline constexpr uint32_t kLineBytes = kLanes;  // of a cache
inline constexpr uint32_t kPlane1Bytes = frame::kBlockElements / 8;
inline constexpr uint32_t kVectors = frame::kBlockElements / kLanes;  // of a byte per element

// A byte of each of a block's elements.
struct Bytes {
  Vector vector[kVectors];
};

// Room for a block's symbols in a row, and for the vector behind them that appending writes.
struct alignas(64) Row {
  uint8_t byte[frame::kBlockElements + kLanes];
};

// [Note: rows within a page]
// A load or store that crosses the end of a page takes long (Zen 5: a store 23 cycles), and a row
// is read or written by some that begin at any of its bytes. Where a stack begins is drawn by
// chance for each process: without this alignment an encoder loses up to 40 % in one out of three.
inline constexpr uint32_t kRowAlignment = 2048;
static_assert(sizeof(Row) <= kRowAlignment && kPageBytes % kRowAlignment == 0);

struct alignas(kRowAlignment) AlignedRow : Row {};

inline Bytes no_bytes() {
  Bytes bytes;
  for (Vector& vector : bytes.vector) {
    vector = _mm512_setzero_si512();
  }
  return bytes;
}

inline Vector load(const void* from) { return _mm512_loadu_si512(from); }
inline void store(void* to, Vector value) { _mm512_storeu_si512(to, value); }
inline Vector broadcast(uint32_t byte) { return _mm512_set1_epi8(static_cast<char>(byte)); }

// Bypasses the caches where nobody reads the line soon; `to` is then a multiple of 64.
template <bool kStreaming>
inline void store_line(void* to, Vector value) {
  if constexpr (kStreaming) {
    _mm512_stream_si512(static_cast<__m512i*>(to), value);
  } else {
    store(to, value);
  }
}

// Asks for a line that is soon needed; an address outside of all memory does no harm. Not
// _mm_prefetch: GCC removes loops and functions that do nothing else.
inline void prefetch(const uint8_t* from, uint32_t ahead) {
  asm volatile("prefetcht0 (%0)" : : "r"(reinterpret_cast<uintptr_t>(from) + ahead));
}

inline bool is_line_aligned(const void* address) {
  return reinterpret_cast<uintptr_t>(address) % kLanes == 0;
}

// `bytes` is a multiple of 64.
template <bool kStreaming>
inline void copy_lines(uint8_t* to, const uint8_t* from, uint32_t bytes) {
  for (uint32_t i = 0; i < bytes; i += kLanes) {
    store_line<kStreaming>(to + i, load(from + i));
  }
}

inline void store64(void* to, uint64_t value) { __builtin_memcpy(to, &value, sizeof value); }
inline uint64_t load64(const void* from) {
  uint64_t value;
  __builtin_memcpy(&value, from, sizeof value);
  return value;
}

inline uint32_t count_bits(uint64_t mask) { return static_cast<uint32_t>(_mm_popcnt_u64(mask)); }

// The first `count` lanes; all of them from 64 on.
inline __mmask64 first_lanes(uint32_t count) {
  return count >= kLanes ? ~uint64_t{0} : _bzhi_u64(~uint64_t{0}, count);
}

// [Note: compressing into a zero]
// vpcompress and vpexpand wait for what their destination held, also where they zero the lanes that
// they do not fill (Zen 5: one in 5 cycles where all have the same destination, as in a loop, and
// one in 1.4 to 2 otherwise). So their result is merged into a zero; the compiler may not know that
// it is one, or it would zero lanes instead.
inline Vector opaque_zero() {
  Vector zero = _mm512_setzero_si512();
  asm("" : MEMSWAP_AVX512_OPERAND(zero));
  return zero;
}

// Appends the chosen lanes to `to` (64 bytes are written) and returns its new end. The register
// form: compressing straight to memory is microcode on Zen 4, and takes 4 cycles on Zen 5.
inline uint8_t* append(uint8_t* to, __mmask64 chosen, Vector value) {
  store(to, _mm512_mask_compress_epi8(opaque_zero(), chosen, value));
  return to + count_bits(chosen);
}

inline constexpr uint32_t bytes_of_bits(uint32_t bits) { return (bits + 7) / 8; }
inline constexpr uint32_t units_of_bytes(uint32_t bytes) {
  return (bytes + frame::kUnitBytes - 1) / frame::kUnitBytes;
}

// Bytes shifted by kBits; shifts of words, whose stray bits are masked away.
template <uint32_t kBits>
inline Vector shift_right(Vector value) {
  return _mm512_and_si512(_mm512_srli_epi16(value, kBits), broadcast(0xffu >> kBits));
}
template <uint32_t kBits>
inline Vector shift_left(Vector value) {
  return _mm512_and_si512(_mm512_slli_epi16(value, kBits), broadcast(0xffu << kBits));
}

// --- Planes (docs/format.md section 2) of the bits from kShift on -------------------------------

template <uint32_t kShift, bool kStreaming>
inline void store_plane4(uint8_t* plane, const Bytes& bytes) {
  const Vector low = broadcast(15);
  for (uint32_t i = 0; i < 8; ++i) {
    const Vector a = _mm512_and_si512(_mm512_srli_epi16(bytes.vector[i], kShift), low);
    const Vector b = _mm512_and_si512(_mm512_srli_epi16(bytes.vector[8 + i], kShift), low);
    store_line<kStreaming>(plane + kLanes * i, _mm512_or_si512(a, _mm512_slli_epi16(b, 4)));
  }
}

// The fields are masked at their final places: one instruction merges and masks.
template <uint32_t kShift>
inline Vector place2(Vector merged, Vector value, uint32_t at) {
  const Vector placed =
      at >= kShift ? _mm512_slli_epi16(value, at - kShift) : _mm512_srli_epi16(value, kShift - at);
  return _mm512_ternarylogic_epi64(merged, placed, broadcast(3u << at), 0xf8);  // a | (b & c)
}

template <uint32_t kShift, bool kStreaming>
inline void store_plane2(uint8_t* plane, const Bytes& bytes) {
  for (uint32_t i = 0; i < 4; ++i) {
    Vector merged = place2<kShift>(_mm512_setzero_si512(), bytes.vector[i], 0);
    merged = place2<kShift>(merged, bytes.vector[4 + i], 2);
    merged = place2<kShift>(merged, bytes.vector[8 + i], 4);
    merged = place2<kShift>(merged, bytes.vector[12 + i], 6);
    store_line<kStreaming>(plane + kLanes * i, merged);
  }
}

template <uint32_t kShift>
inline void store_plane1(uint8_t* plane, const Bytes& bytes) {
  for (uint32_t i = 0; i < kVectors; ++i) {
    store64(plane + 8 * i, _mm512_test_epi8_mask(bytes.vector[i], broadcast(1u << kShift)));
  }
}

// The bytes of a plane of 2 bits.
inline void load_plane2(Bytes& bytes, const uint8_t* plane) {
  const Vector low = broadcast(3);
  for (uint32_t i = 0; i < 4; ++i) {
    const Vector merged = load(plane + kLanes * i);
    bytes.vector[i] = _mm512_and_si512(merged, low);
    bytes.vector[4 + i] = _mm512_and_si512(_mm512_srli_epi16(merged, 2), low);
    bytes.vector[8 + i] = _mm512_and_si512(_mm512_srli_epi16(merged, 4), low);
    bytes.vector[12 + i] = _mm512_and_si512(_mm512_srli_epi16(merged, 6), low);
  }
}

// These set the bits that were 0.
template <uint32_t kShift>
inline void add_plane4(Bytes& bytes, const uint8_t* plane) {
  const Vector mask = broadcast(15u << kShift);
  for (uint32_t i = 0; i < 8; ++i) {
    const Vector merged = load(plane + kLanes * i);
    Vector& a = bytes.vector[i];
    Vector& b = bytes.vector[8 + i];
    a = _mm512_ternarylogic_epi64(a, _mm512_slli_epi16(merged, kShift), mask, 0xf8);
    b = _mm512_ternarylogic_epi64(b, _mm512_srli_epi16(merged, 4 - kShift), mask, 0xf8);
  }
}

template <uint32_t kShift>
inline void add_plane2(Bytes& bytes, const uint8_t* plane) {
  const Vector mask = broadcast(3u << kShift);
  for (uint32_t i = 0; i < 4; ++i) {
    const Vector merged = load(plane + kLanes * i);
    for (uint32_t quarter = 0; quarter < 4; ++quarter) {
      const uint32_t at = 2 * quarter;
      const Vector moved = at >= kShift ? _mm512_srli_epi16(merged, at - kShift)
                                        : _mm512_slli_epi16(merged, kShift - at);
      Vector& to = bytes.vector[4 * quarter + i];
      to = _mm512_ternarylogic_epi64(to, moved, mask, 0xf8);
    }
  }
}

template <uint32_t kShift>
inline void add_plane1(Bytes& bytes, const uint8_t* plane) {
  for (uint32_t i = 0; i < kVectors; ++i) {
    Vector& to = bytes.vector[i];
    to = _mm512_mask_add_epi8(to, load64(plane + 8 * i), to, broadcast(1u << kShift));
  }
}

// A field of 0 to 8 - kShift bits (at most 7), cut into planes of 4, 2 and 1.
template <uint32_t kShift>
inline void store_field(uint8_t* planes, const Bytes& bytes, uint32_t bits) {
  if ((bits & 4) != 0) {
    store_plane4<kShift, false>(planes, bytes);
    planes += 4 * kPlane1Bytes;
    if ((bits & 2) != 0) {
      store_plane2<kShift + 4, false>(planes, bytes);
      planes += 2 * kPlane1Bytes;
    }
    if ((bits & 1) != 0) {
      if ((bits & 2) == 0) {
        store_plane1<kShift + 4>(planes, bytes);
      } else if constexpr (kShift < 2) {
        store_plane1<kShift + 6>(planes, bytes);
      }
    }
  } else if ((bits & 2) != 0) {
    store_plane2<kShift, false>(planes, bytes);
    if ((bits & 1) != 0) {
      store_plane1<kShift + 2>(planes + 2 * kPlane1Bytes, bytes);
    }
  } else if (bits != 0) {
    store_plane1<kShift>(planes, bytes);
  }
}

template <uint32_t kShift>
inline void add_field(Bytes& bytes, const uint8_t* planes, uint32_t bits) {
  if ((bits & 4) != 0) {
    add_plane4<kShift>(bytes, planes);
    planes += 4 * kPlane1Bytes;
    if ((bits & 2) != 0) {
      add_plane2<kShift + 4>(bytes, planes);
      planes += 2 * kPlane1Bytes;
    }
    if ((bits & 1) != 0) {
      if ((bits & 2) == 0) {
        add_plane1<kShift + 4>(bytes, planes);
      } else if constexpr (kShift < 2) {
        add_plane1<kShift + 6>(bytes, planes);
      }
    }
  } else if ((bits & 2) != 0) {
    add_plane2<kShift>(bytes, planes);
    if ((bits & 1) != 0) {
      add_plane1<kShift + 2>(bytes, planes + 2 * kPlane1Bytes);
    }
  } else if (bits != 0) {
    add_plane1<kShift>(bytes, planes);
  }
}

// --- Streams -----------------------------------------------------------------------------------

// 64 symbols of 2 bits each, one per byte, as 16 bytes.
inline void store_symbols2(uint8_t* stream, Vector symbols) {
  const Vector places = _mm512_set1_epi32(0x40100401);  // 1, 4, 16, 64
  const Vector packed = _mm512_dpbusd_epi32(_mm512_setzero_si512(), symbols, places);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(stream), _mm512_cvtepi32_epi8(packed));
}

// 64 symbols of 4 bits each, one per byte, as 32 bytes.
inline void store_symbols4(uint8_t* stream, Vector symbols) {
  const Vector packed = _mm512_maddubs_epi16(symbols, _mm512_set1_epi16(0x1001));  // 1, 16
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(stream), _mm512_cvtepi16_epi8(packed));
}

// The reverse; what is above a byte's low 2 or 4 bits is its neighbours', for look-ups that ignore
// it.
inline Vector load_symbols2(const uint8_t* stream) {
  const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(stream));
  const Vector places = _mm512_set1_epi64(0x0e0c0a0806040200);
  return _mm512_multishift_epi64_epi8(places, _mm512_cvtepu16_epi64(packed));
}
inline Vector load_symbols4(const uint8_t* stream) {
  const __m256i packed = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(stream));
  const Vector places = _mm512_set1_epi64(0x1c1814100c080400);
  return _mm512_multishift_epi64_epi8(places, _mm512_cvtepu32_epi64(packed));
}

// --- Elements as byte planes -------------------------------------------------------------------

// Byte indices for a permutation, computed by the compiler.
struct alignas(64) Indices {
  uint8_t at[kLanes];
};

// Bytes p, p + step, ... of two vectors' 128 bytes in the first half, bytes p + 1, p + 1 + step,
// ... in the second.
constexpr Indices pick(uint32_t first, uint32_t step, uint32_t second) {
  Indices indices{};
  const uint32_t run = 128 / step;
  for (uint32_t i = 0; i < kLanes; ++i) {
    indices.at[i] = static_cast<uint8_t>(i % run * step + (i / run % 2 == 0 ? first : second));
  }
  return indices;
}

// Lanes of `a` and `b` in turns, from lane `first` on.
constexpr Indices interleave(uint32_t first) {
  Indices indices{};
  for (uint32_t i = 0; i < kLanes; ++i) {
    indices.at[i] = static_cast<uint8_t>(first + i / 2 + (i % 2) * kLanes);
  }
  return indices;
}

struct alignas(64) WordIndices {
  uint16_t at[kLanes / 2];
};

constexpr WordIndices interleave_words(uint32_t first) {
  WordIndices indices{};
  for (uint32_t i = 0; i < kLanes / 2; ++i) {
    indices.at[i] = static_cast<uint16_t>(first + i / 2 + (i % 2) * (kLanes / 2));
  }
  return indices;
}

// Within each 64-byte vector of 8 elements of 8 bytes: byte p of element e to 8 p + e, and back.
constexpr Indices transpose8() {
  Indices indices{};
  for (uint32_t i = 0; i < kLanes; ++i) {
    indices.at[i] = static_cast<uint8_t>(i % 8 * 8 + i / 8);
  }
  return indices;
}

inline constexpr Indices kEvenBytes = pick(0, 2, 0);
inline constexpr Indices kOddBytes = pick(1, 2, 1);
inline constexpr Indices kBytes01Of4 = pick(0, 4, 1);
inline constexpr Indices kBytes23Of4 = pick(2, 4, 3);
inline constexpr Indices kInterleaveLow = interleave(0);
inline constexpr Indices kInterleaveHigh = interleave(32);
inline constexpr WordIndices kInterleaveWordsLow = interleave_words(0);
inline constexpr WordIndices kInterleaveWordsHigh = interleave_words(16);
inline constexpr Indices kTranspose8 = transpose8();

inline Vector permute(const Indices& indices, Vector a) {
  return _mm512_permutexvar_epi8(load(indices.at), a);
}
inline Vector permute(const Indices& indices, Vector a, Vector b) {
  return _mm512_permutex2var_epi8(a, load(indices.at), b);
}

// 8 x 8 64-bit numbers, each row a vector.
inline void transpose_words(Vector (&row)[8]) {
  Vector pairs[8];
  for (uint32_t i = 0; i < 8; i += 2) {
    pairs[i] = _mm512_unpacklo_epi64(row[i], row[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_epi64(row[i], row[i + 1]);
  }
  Vector quads[8];
  for (uint32_t i = 0; i < 2; ++i) {
    for (uint32_t half = 0; half < 2; ++half) {
      const Vector a = pairs[4 * i + half];
      const Vector b = pairs[4 * i + 2 + half];
      quads[4 * i + half] = _mm512_shuffle_i64x2(a, b, 0x88);
      quads[4 * i + 2 + half] = _mm512_shuffle_i64x2(a, b, 0xdd);
    }
  }
  for (uint32_t i = 0; i < 4; ++i) {
    // quads[i] and quads[4 + i]: columns i and i + 4, of rows 0 to 3 and 4 to 7.
    row[i] = _mm512_shuffle_i64x2(quads[i], quads[4 + i], 0x88);
    row[4 + i] = _mm512_shuffle_i64x2(quads[i], quads[4 + i], 0xdd);
  }
}

// 64 elements of kWidth bytes, in kWidth vectors, to byte planes and back.
template <uint32_t kWidth>
inline void split_bytes(Vector (&v)[kWidth]) {
  if constexpr (kWidth == 2) {
    const Vector low = permute(kEvenBytes, v[0], v[1]);
    v[1] = permute(kOddBytes, v[0], v[1]);
    v[0] = low;
  } else if constexpr (kWidth == 4) {
    const Vector low01 = permute(kBytes01Of4, v[0], v[1]);
    const Vector low23 = permute(kBytes23Of4, v[0], v[1]);
    const Vector high01 = permute(kBytes01Of4, v[2], v[3]);
    const Vector high23 = permute(kBytes23Of4, v[2], v[3]);
    v[0] = _mm512_shuffle_i64x2(low01, high01, 0x44);
    v[1] = _mm512_shuffle_i64x2(low01, high01, 0xee);
    v[2] = _mm512_shuffle_i64x2(low23, high23, 0x44);
    v[3] = _mm512_shuffle_i64x2(low23, high23, 0xee);
  } else if constexpr (kWidth == 8) {
    for (Vector& vector : v) {
      vector = permute(kTranspose8, vector);
    }
    transpose_words(v);
  }
}

template <uint32_t kWidth>
inline void join_bytes(Vector (&v)[kWidth]) {
  if constexpr (kWidth == 2) {
    const Vector low = permute(kInterleaveLow, v[0], v[1]);
    v[1] = permute(kInterleaveHigh, v[0], v[1]);
    v[0] = low;
  } else if constexpr (kWidth == 4) {
    // Bytes 0 and 1 of each element, bytes 2 and 3, then both as 16-bit numbers in turns.
    const Vector low01 = permute(kInterleaveLow, v[0], v[1]);
    const Vector high01 = permute(kInterleaveHigh, v[0], v[1]);
    const Vector low23 = permute(kInterleaveLow, v[2], v[3]);
    const Vector high23 = permute(kInterleaveHigh, v[2], v[3]);
    const Vector first = load(kInterleaveWordsLow.at);
    const Vector second = load(kInterleaveWordsHigh.at);
    v[0] = _mm512_permutex2var_epi16(low01, first, low23);
    v[1] = _mm512_permutex2var_epi16(low01, second, low23);
    v[2] = _mm512_permutex2var_epi16(high01, first, high23);
    v[3] = _mm512_permutex2var_epi16(high01, second, high23);
  } else if constexpr (kWidth == 8) {
    transpose_words(v);
    for (Vector& vector : v) {
      vector = permute(kTranspose8, vector);
    }
  }
}

}  // namespace
}  // namespace memswap::cpu::avx512

MEMSWAP_AVX512_END
