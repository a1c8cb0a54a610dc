// The streams behind L0: S1, S2 and E bytes, of what the modes LQ2 and LQ3 cannot code.
#pragma once

#include "avx512_bytes.h"

MEMSWAP_AVX512_BEGIN

namespace memswap::cpu::avx512 {
namespace {

// What a nibble of an escape stream means: v = center - E from a table, 14: E is 0, 15: a byte E.
struct NibbleCode {
  uint32_t shift;  // v + shift, kept below 64, indexes `nibble`
  alignas(64) uint8_t nibble[kLanes];
  alignas(64) uint8_t value[kLanes];  // by the low 4 bits of the index
};

// `first`: the v of nibble 0, then come 11 more; `twelve`, `thirteen`: those of nibbles 12 and 13.
constexpr NibbleCode nibble_code(uint32_t shift, uint8_t first, uint8_t twelve, uint8_t thirteen) {
  NibbleCode code{};
  code.shift = shift;
  for (uint32_t i = 0; i < kLanes; ++i) {
    const uint8_t v = static_cast<uint8_t>(i - shift);
    code.nibble[i] = 15;
    if (v >= first && v < first + 12) {
      code.nibble[i] = static_cast<uint8_t>(v - first);
    } else if (v == twelve) {
      code.nibble[i] = 12;
    } else if (v == thirteen) {
      code.nibble[i] = 13;
    }
    const uint32_t low = i % 16;
    code.value[i] = low < 12    ? static_cast<uint8_t>(first + low)
                    : low == 12 ? twelve
                    : low == 13 ? thirteen
                                : 0;
  }
  return code;
}

inline constexpr NibbleCode kLq2Nibbles = nibble_code(2, 6, 255, 254);
inline constexpr NibbleCode kLq3Nibbles = nibble_code(1, 8, 0, 255);

// The symbols E of what has no code, in a row.
struct Escapes {
  Row symbol;
  uint32_t count;
};

// A nibble for each, then a byte E for each 15. Returns the end.
inline uint8_t* encode_nibbles(const NibbleCode& code, const Escapes& escapes, uint8_t center,
                               uint8_t* out) {
  const Vector table = load(code.nibble);
  const Vector centers = broadcast(center + code.shift);
  Row raw;
  uint8_t* raw_end = raw.byte;
  for (uint32_t i = 0; i < escapes.count; i += kLanes) {
    const Vector symbol = load(escapes.symbol.byte + i);
    const __mmask64 live = first_lanes(escapes.count - i);
    const Vector index = _mm512_min_epu8(_mm512_sub_epi8(centers, symbol), broadcast(63));
    Vector nibble = _mm512_maskz_permutexvar_epi8(live, index, table);
    const __mmask64 escaped = _mm512_cmpeq_epi8_mask(nibble, broadcast(15));
    if (escaped != 0) {
      const __mmask64 zero = _mm512_mask_testn_epi8_mask(escaped, symbol, symbol);
      nibble = _mm512_mask_mov_epi8(nibble, zero, broadcast(14));
      raw_end = append(raw_end, escaped & ~zero, symbol);
    }
    store_symbols4(out + i / 2, nibble);
  }
  out += bytes_of_bits(4 * escapes.count);
  const uint32_t raw_count = static_cast<uint32_t>(raw_end - raw.byte);
  for (uint32_t i = 0; i < raw_count; i += kLanes) {
    store(out + i, load(raw.byte + i));
  }
  return out + raw_count;
}

// [Note: placed symbols]
// A decoder wants the symbols E where elements have them. Moving bits within a byte can be done
// before a look-up as well as behind it, so the tables and the rare bytes E are moved, and not a
// block's symbols. A Place says how: its of() keeps 0 as it is.

// The reverse: `count` placed symbols into `symbols`. Returns the end, or NULL if it is behind
// `end`.
template <typename Place>
inline const uint8_t* decode_nibbles(const NibbleCode& code, const uint8_t* in, const uint8_t* end,
                                     uint32_t count, uint8_t center, Row& symbols) {
  const uint8_t* raw = in + bytes_of_bits(4 * count);
  if (raw > end) {
    return nullptr;
  }
  // By nibble, the symbol; nibble 14 is symbol 0.
  Vector table = _mm512_sub_epi8(broadcast(center), load(code.value));
  table = Place::of(_mm512_maskz_mov_epi8(0x3fff3fff3fff3fff, table));
  const Vector low = broadcast(15);
  for (uint32_t i = 0; i < count; i += kLanes) {
    const Vector nibble = load_symbols4(in + i / 2);
    Vector symbol = _mm512_permutexvar_epi8(nibble, table);
    const __mmask64 escaped =
        _mm512_cmpeq_epi8_mask(_mm512_and_si512(nibble, low), low) & first_lanes(count - i);
    if (escaped != 0) {
      const uint32_t bytes = count_bits(escaped);
      if (bytes > static_cast<size_t>(end - raw)) {
        return nullptr;
      }
      symbol = _mm512_mask_expand_epi8(symbol, escaped, Place::of(load(raw)));
      raw += bytes;
    }
    store(symbols.byte + i, symbol);
  }
  return raw;
}

// S1, S2 and the bytes of LQ2.
inline uint8_t* encode_escapes2(const Escapes& escapes, uint8_t center, uint8_t* out) {
  // v = 0: 0, 4: 1, 5: 2; 1, 2 and 3 do not escape.
  const Vector table =
      _mm512_broadcast_i32x4(_mm_setr_epi8(0, 3, 3, 3, 1, 2, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3));
  const Vector centers = broadcast(center);
  Escapes deeper;
  uint8_t* end = deeper.symbol.byte;
  for (uint32_t i = 0; i < escapes.count; i += kLanes) {
    const Vector symbol = load(escapes.symbol.byte + i);
    const Vector value = _mm512_sub_epi8(centers, symbol);
    const __mmask64 live = first_lanes(escapes.count - i);
    end = append(end, _mm512_mask_cmpgt_epu8_mask(live, value, broadcast(5)), symbol);
    store_symbols2(out + i / 4,
                   _mm512_maskz_shuffle_epi8(live, table, _mm512_min_epu8(value, broadcast(6))));
  }
  deeper.count = static_cast<uint32_t>(end - deeper.symbol.byte);
  return encode_nibbles(kLq2Nibbles, deeper, center, out + bytes_of_bits(2 * escapes.count));
}

template <typename Place>
inline const uint8_t* decode_escapes2(const uint8_t* in, const uint8_t* end, uint32_t count,
                                      uint8_t center, Row& symbols) {
  const uint8_t* second = in + bytes_of_bits(2 * count);
  if (second > end) {
    return nullptr;
  }
  // By the index's low 2 bits: the symbols of v = 0, 4, 5, and of 3 nothing.
  const Vector table = Place::of(_mm512_sub_epi8(broadcast(center), _mm512_set1_epi32(0x00050400)));
  const Vector low = broadcast(3);
  __mmask64 deeper[kVectors];
  uint32_t deeper_count = 0;
  for (uint32_t i = 0; i < count; i += kLanes) {
    const Vector index = load_symbols2(in + i / 4);
    deeper[i / kLanes] =
        _mm512_cmpeq_epi8_mask(_mm512_and_si512(index, low), low) & first_lanes(count - i);
    deeper_count += count_bits(deeper[i / kLanes]);
    store(symbols.byte + i, _mm512_permutexvar_epi8(index, table));
  }
  if (deeper_count == 0) {
    return second;
  }
  alignas(kRowAlignment) Row deeper_symbols;
  const uint8_t* last =
      decode_nibbles<Place>(kLq2Nibbles, second, end, deeper_count, center, deeper_symbols);
  if (last == nullptr) {
    return nullptr;
  }
  const uint8_t* next = deeper_symbols.byte;
  for (uint32_t i = 0; i < count; i += kLanes) {
    const __mmask64 mask = deeper[i / kLanes];
    store(symbols.byte + i, _mm512_mask_expand_epi8(load(symbols.byte + i), mask, load(next)));
    next += count_bits(mask);
  }
  return last;
}

}  // namespace
}  // namespace memswap::cpu::avx512

MEMSWAP_AVX512_END
