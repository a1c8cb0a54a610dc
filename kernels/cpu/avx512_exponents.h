// The symbols E of a block: statistics, centers, and the modes LQ2, LQ3 and FW.
#pragma once

#include "avx512_bytes.h"

MEMSWAP_AVX512_BEGIN

namespace memswap::cpu::avx512 {
namespace {

// --- Statistics --------------------------------------------------------------------------------

struct Range {
  uint32_t minimum, maximum;
};

// The smallest byte of 16, by the only horizontal minimum there is.
inline uint32_t minimum_of(__m128i bytes) {
  const __m128i pairs = _mm_min_epu8(bytes, _mm_srli_epi16(bytes, 8));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_minpos_epu16(pairs))) & 0xff;
}

inline uint32_t minimum_of(Vector bytes) {
  const __m256i half =
      _mm256_min_epu8(_mm512_castsi512_si256(bytes), _mm512_extracti64x4_epi64(bytes, 1));
  return minimum_of(_mm_min_epu8(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1)));
}

inline Range range_of(const Bytes& symbols, uint32_t vectors) {
  Vector minimum = broadcast(255);
  Vector maximum = _mm512_setzero_si512();
  for (uint32_t i = 0; i < vectors; ++i) {
    minimum = _mm512_min_epu8(minimum, symbols.vector[i]);
    maximum = _mm512_max_epu8(maximum, symbols.vector[i]);
  }
  return {minimum_of(minimum), 255 - minimum_of(_mm512_xor_si512(maximum, broadcast(255)))};
}

inline Vector partial_sums(Vector bytes) { return _mm512_sad_epu8(bytes, _mm512_setzero_si512()); }
inline uint32_t total(Vector sums) { return static_cast<uint32_t>(_mm512_reduce_add_epi64(sums)); }

// Of the symbols that are not 0.
struct Distances {
  uint32_t sum;  // of min(maximum - E, 31)
  uint32_t count;
};

// Eight times 31 fits into a byte.
template <bool kWithZeros>
inline Distances distances_of(const Bytes& symbols, uint32_t vectors, uint32_t maximum) {
  const Vector top = broadcast(maximum);
  const Vector limit = broadcast(31);
  const Vector one = broadcast(1);
  Vector sums = _mm512_setzero_si512();
  Vector present = _mm512_setzero_si512();
  for (uint32_t i = 0; i < vectors; i += 8) {
    const uint32_t end = i + 8 < vectors ? i + 8 : vectors;
    Vector sum = _mm512_setzero_si512();
    for (uint32_t j = i; j < end; ++j) {
      const Vector value = symbols.vector[j];
      const Vector distance = _mm512_sub_epi8(top, value);
      if constexpr (kWithZeros) {
        const __mmask64 nonzero = _mm512_test_epi8_mask(value, value);
        sum = _mm512_add_epi8(sum, _mm512_maskz_min_epu8(nonzero, distance, limit));
        present = _mm512_add_epi8(present, _mm512_min_epu8(value, one));
      } else {
        sum = _mm512_add_epi8(sum, _mm512_min_epu8(distance, limit));
      }
    }
    sums = _mm512_add_epi64(sums, partial_sums(sum));
  }
  return {total(sums), kWithZeros ? total(partial_sums(present)) : vectors * kLanes};
}

inline uint32_t count_nonzero(const Bytes& symbols) {
  const Vector one = broadcast(1);
  Vector present = _mm512_setzero_si512();
  for (const Vector& value : symbols.vector) {
    present = _mm512_add_epi8(present, _mm512_min_epu8(value, one));
  }
  return total(partial_sums(present));
}

// Section 5: the center of a code whose middle is `eighths` below the maximum.
inline uint8_t center_of(uint32_t maximum, const Distances& distances, uint32_t eighths) {
  const uint32_t count = distances.count == 0 ? 1 : distances.count;
  const uint32_t sum = 8 * distances.sum;
  const uint32_t quotient = sum > eighths * count ? (sum - eighths * count) / (8 * count) : 0;
  return static_cast<uint8_t>(maximum + 1 - quotient);
}

// --- Escapes -----------------------------------------------------------------------------------

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

// The nibbles of `count` values v, then a byte E for each 15. Returns the end.
inline uint8_t* encode_nibbles(const NibbleCode& code, const Row& values, uint32_t count,
                               uint8_t center, uint8_t* out) {
  const Vector table = load(code.nibble);
  const Vector centers = broadcast(center);
  Row raw;
  uint8_t* raw_end = raw.byte;
  for (uint32_t i = 0; i < count; i += kLanes) {
    const Vector value = load(values.byte + i);
    const __mmask64 live = first_lanes(count - i);
    const Vector index =
        _mm512_min_epu8(_mm512_add_epi8(value, broadcast(code.shift)), broadcast(63));
    Vector nibble = _mm512_maskz_permutexvar_epi8(live, index, table);
    const __mmask64 escaped = _mm512_cmpeq_epi8_mask(nibble, broadcast(15));
    if (escaped != 0) {
      const __mmask64 zero = _mm512_mask_cmpeq_epi8_mask(escaped, value, centers);
      nibble = _mm512_mask_mov_epi8(nibble, zero, broadcast(14));
      raw_end = append(raw_end, escaped & ~zero, _mm512_sub_epi8(centers, value));
    }
    store_symbols4(out + i / 2, nibble);
  }
  out += bytes_of_bits(4 * count);
  const uint32_t raw_count = static_cast<uint32_t>(raw_end - raw.byte);
  for (uint32_t i = 0; i < raw_count; i += kLanes) {
    store(out + i, load(raw.byte + i));
  }
  return out + raw_count;
}

// The reverse: `count` symbols E into `symbols`. Returns the end, or NULL if it is behind `end`.
inline const uint8_t* decode_nibbles(const NibbleCode& code, const uint8_t* in, const uint8_t* end,
                                     uint32_t count, uint8_t center, Row& symbols) {
  const uint8_t* raw = in + bytes_of_bits(4 * count);
  if (raw > end) {
    return nullptr;
  }
  // By nibble, the symbol; nibble 14 is symbol 0.
  Vector table = _mm512_sub_epi8(broadcast(center), load(code.value));
  table = _mm512_maskz_mov_epi8(0x3fff3fff3fff3fff, table);
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
      symbol = _mm512_mask_expand_epi8(symbol, escaped, load(raw));
      raw += bytes;
    }
    store(symbols.byte + i, symbol);
  }
  return raw;
}

// The values v of LQ2's escapes, and of those among them that S1 does not tell apart. Both are
// taken from the elements: taking the second out of the first would wait for its stores twice.
struct Escapes {
  Row all;
  Row deeper;
  uint32_t count;
  uint32_t deeper_count;
};

// S1, S2 and the bytes of LQ2.
inline uint8_t* encode_escapes2(const Escapes& escapes, uint8_t center, uint8_t* out) {
  // v = 0: 0, 4: 1, 5: 2; 1, 2 and 3 do not escape.
  const Vector table =
      _mm512_broadcast_i32x4(_mm_setr_epi8(0, 3, 3, 3, 1, 2, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3));
  for (uint32_t i = 0; i < escapes.count; i += kLanes) {
    const Vector value = _mm512_min_epu8(load(escapes.all.byte + i), broadcast(6));
    const __mmask64 live = first_lanes(escapes.count - i);
    store_symbols2(out + i / 4, _mm512_maskz_shuffle_epi8(live, table, value));
  }
  return encode_nibbles(kLq2Nibbles, escapes.deeper, escapes.deeper_count, center,
                        out + bytes_of_bits(2 * escapes.count));
}

inline const uint8_t* decode_escapes2(const uint8_t* in, const uint8_t* end, uint32_t count,
                                      uint8_t center, Row& symbols) {
  const uint8_t* second = in + bytes_of_bits(2 * count);
  if (second > end) {
    return nullptr;
  }
  // By the index's low 2 bits: the symbols of v = 0, 4, 5, and of 3 nothing.
  const Vector table = _mm512_sub_epi8(broadcast(center), _mm512_set1_epi32(0x00050400));
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
  Row deeper_symbols;
  const uint8_t* last =
      decode_nibbles(kLq2Nibbles, second, end, deeper_count, center, deeper_symbols);
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

// --- Sizes -------------------------------------------------------------------------------------

// Payload bytes of LQ2 over `symbols`, before they are rounded to units.
inline uint32_t size_of_lq2(const Bytes& symbols, uint8_t center, Range range) {
  const Vector centers = broadcast(center);
  const Vector below = broadcast(static_cast<uint8_t>(center - 1u));
  uint32_t escapes = 0;
  uint32_t deeper = 0;
  for (const Vector& symbol : symbols.vector) {
    escapes += count_bits(_mm512_cmpgt_epu8_mask(_mm512_sub_epi8(below, symbol), broadcast(2)));
    deeper += count_bits(_mm512_cmpgt_epu8_mask(_mm512_sub_epi8(centers, symbol), broadcast(5)));
  }
  uint32_t raw = 0;
  // Most blocks have no v outside -2..17: with 2 added, none beyond 19.
  if (static_cast<int>(center) - static_cast<int>(range.maximum) < -2 ||
      center - static_cast<int>(range.minimum) > 17) {
    const Vector above = broadcast(static_cast<uint8_t>(center + 2u));
    for (const Vector& symbol : symbols.vector) {
      raw += count_bits(_mm512_mask_cmpgt_epu8_mask(_mm512_test_epi8_mask(symbol, symbol),
                                                    _mm512_sub_epi8(above, symbol), broadcast(19)));
    }
  }
  return bytes_of_bits(2 * escapes) + bytes_of_bits(4 * deeper) + raw;
}

inline uint32_t size_of_lq3(const Bytes& symbols, uint8_t center) {
  const Vector below = broadcast(static_cast<uint8_t>(center - 1u));
  const Vector above = broadcast(static_cast<uint8_t>(center + 1u));
  uint32_t escapes = 0;
  uint32_t raw = 0;
  for (const Vector& symbol : symbols.vector) {
    escapes += count_bits(_mm512_cmpgt_epu8_mask(_mm512_sub_epi8(below, symbol), broadcast(6)));
    raw += count_bits(_mm512_mask_cmpgt_epu8_mask(_mm512_test_epi8_mask(symbol, symbol),
                                                  _mm512_sub_epi8(above, symbol), broadcast(20)));
  }
  return kPlane1Bytes + bytes_of_bits(4 * escapes) + raw;
}

inline uint32_t size_of_fixed(uint32_t bits) { return kPlane1Bytes * (bits - 2); }

// --- Modes -------------------------------------------------------------------------------------

// Turns the symbols into codes, escapes into code 0, and lists the values v of the escapes.
inline void take_escapes2(Bytes& symbols, uint8_t center, Escapes& escapes) {
  const Vector centers = broadcast(center);
  uint8_t* end = escapes.all.byte;
  uint8_t* deeper_end = escapes.deeper.byte;
  for (Vector& symbol : symbols.vector) {
    const Vector value = _mm512_sub_epi8(centers, symbol);
    const __mmask64 coded =
        _mm512_cmplt_epu8_mask(_mm512_sub_epi8(value, broadcast(1)), broadcast(3));
    symbol = _mm512_maskz_mov_epi8(coded, value);
    end = append(end, ~coded, value);
    deeper_end = append(deeper_end, _mm512_cmpgt_epu8_mask(value, broadcast(5)), value);
  }
  escapes.count = static_cast<uint32_t>(end - escapes.all.byte);
  escapes.deeper_count = static_cast<uint32_t>(deeper_end - escapes.deeper.byte);
}

inline uint32_t take_escapes3(Bytes& symbols, uint8_t center, Row& values) {
  const Vector centers = broadcast(center);
  uint8_t* end = values.byte;
  for (Vector& symbol : symbols.vector) {
    const Vector value = _mm512_sub_epi8(centers, symbol);
    const __mmask64 coded =
        _mm512_cmplt_epu8_mask(_mm512_sub_epi8(value, broadcast(1)), broadcast(7));
    symbol = _mm512_maskz_mov_epi8(coded, value);
    end = append(end, ~coded, value);
  }
  return static_cast<uint32_t>(end - values.byte);
}

// A block's symbols as they come out of a payload: codes, and in a row what stands for the code 0,
// in the modes that have escapes. Joined only where elements are, vector by vector.
struct Symbols {
  Bytes codes;
  Row escapes;
  uint8_t center;
  bool has_escapes;
};

// Takes a block's symbols, 64 after 64.
template <bool kEscapes>
class SymbolCursor {
 public:
  explicit SymbolCursor(const Symbols& symbols)
      : symbols_(symbols), centers_(broadcast(symbols.center)), next_(symbols.escapes.byte) {}

  Vector take(uint32_t i) {
    const Vector code = symbols_.codes.vector[i];
    const Vector symbol = _mm512_sub_epi8(centers_, code);
    if constexpr (!kEscapes) {
      return symbol;
    }
    const __mmask64 escaped = _mm512_testn_epi8_mask(code, code);
    const Vector escapes = load(next_);
    next_ += count_bits(escaped);
    return _mm512_mask_expand_epi8(symbol, escaped, escapes);
  }

 private:
  const Symbols& symbols_;
  const Vector centers_;
  const uint8_t* next_;
};

inline uint32_t count_escapes(const Bytes& codes) {
  uint32_t count = 0;
  for (const Vector& code : codes.vector) {
    count += count_bits(_mm512_testn_epi8_mask(code, code));
  }
  return count;
}

template <bool kStreaming, typename Meanwhile>
inline uint8_t* encode_lq2(Bytes& symbols, uint8_t center, uint8_t* low, uint8_t* payload,
                           Meanwhile meanwhile) {
  Escapes escapes;
  take_escapes2(symbols, center, escapes);
  meanwhile();
  store_plane2<0, kStreaming>(low, symbols);
  return encode_escapes2(escapes, center, payload);
}

template <bool kStreaming, typename Meanwhile>
inline uint8_t* encode_lq3(Bytes& symbols, uint8_t center, uint8_t* low, uint8_t* payload,
                           Meanwhile meanwhile) {
  Row values;
  const uint32_t count = take_escapes3(symbols, center, values);
  meanwhile();
  store_plane2<0, kStreaming>(low, symbols);
  store_plane1<2>(payload, symbols);
  return encode_nibbles(kLq3Nibbles, values, count, center, payload + kPlane1Bytes);
}

template <bool kStreaming>
inline void encode_fixed(Bytes& symbols, uint8_t center, uint32_t bits, uint8_t* low,
                         uint8_t* payload) {
  for (Vector& symbol : symbols.vector) {
    symbol = _mm512_sub_epi8(broadcast(center), symbol);
  }
  store_plane2<0, kStreaming>(low, symbols);
  store_field<2>(payload, symbols, bits - 2);
}

// --- Blocks ------------------------------------------------------------------------------------

// Which mode section 5 wants, with what it costs.
struct Choice {
  uint32_t mode;
  uint8_t center;
  uint8_t center2;
  uint32_t nonzero;
  uint32_t units;
};

inline Choice choose_fast(const Bytes& symbols, uint32_t symbol_bits, uint8_t center) {
  const Range range = range_of(symbols, kVectors);
  Choice choice{};
  choice.center = choice.center2 = center;
  choice.nonzero = range.minimum > 0 ? frame::kBlockElements : count_nonzero(symbols);
  const uint32_t fixed = units_of_bytes(size_of_fixed(symbol_bits));
  const uint32_t lq2 = units_of_bytes(size_of_lq2(symbols, center, range));
  choice.mode = lq2 < fixed ? uint32_t{frame::kLq2} : frame::kFw2 + symbol_bits - 2;
  choice.units = lq2 < fixed ? lq2 : fixed;
  return choice;
}

inline Choice choose_canonical(const Bytes& symbols) {
  const Range range = range_of(symbols, kVectors);
  const Distances distances = range.minimum > 0
                                  ? distances_of<false>(symbols, kVectors, range.maximum)
                                  : distances_of<true>(symbols, kVectors, range.maximum);
  const uint32_t spread_bits =
      32 - static_cast<uint32_t>(_lzcnt_u32(range.maximum - range.minimum));
  const uint32_t bits = spread_bits < 2 ? 2 : spread_bits;
  Choice choice{};
  choice.center2 = center_of(range.maximum, distances, 7);
  choice.nonzero = distances.count;
  choice.mode = frame::kFw2 + bits - 2;
  choice.center = static_cast<uint8_t>(range.maximum);
  choice.units = units_of_bytes(size_of_fixed(bits));
  if (choice.units == 0) {
    return choice;
  }
  const uint32_t lq2 = units_of_bytes(size_of_lq2(symbols, choice.center2, range));
  if (lq2 < choice.units) {
    choice.mode = frame::kLq2;
    choice.center = choice.center2;
    choice.units = lq2;
  }
  // LQ3 has a plane of bits for a start, so it cannot win against anything as short.
  if (choice.units <= units_of_bytes(kPlane1Bytes)) {
    return choice;
  }
  const uint8_t center3 = center_of(range.maximum, distances, 19);
  const uint32_t lq3 = units_of_bytes(size_of_lq3(symbols, center3));
  if (lq3 < choice.units) {
    choice.mode = frame::kLq3;
    choice.center = center3;
    choice.units = lq3;
  }
  return choice;
}

// Writes the plane L0 to `low` and the payload; spoils `symbols`. Calls meanwhile() where stores
// have to come to rest before they are loaded again.
template <bool kStreaming, typename Meanwhile>
inline void encode_symbols(Bytes& symbols, const Choice& choice, uint8_t* low, uint8_t* payload,
                           Meanwhile meanwhile) {
  uint8_t* end = payload;
  if (choice.mode == frame::kLq2) {
    end = encode_lq2<kStreaming>(symbols, choice.center, low, payload, meanwhile);
  } else if (choice.mode == frame::kLq3) {
    end = encode_lq3<kStreaming>(symbols, choice.center, low, payload, meanwhile);
  } else {
    encode_fixed<kStreaming>(symbols, choice.center, choice.mode - frame::kFw2 + 2, low, payload);
    meanwhile();
    return;  // whole units
  }
  store64(end, 0);  // the rest of the last unit
}

// The symbols of a block in one of the modes 1 to 9; false where the payload has another length.
inline bool decode_symbols(Symbols& symbols, const uint8_t* low, const uint8_t* payload,
                           uint32_t mode, uint32_t units, uint8_t center) {
  symbols.center = center;
  load_plane2(symbols.codes, low);
  if (mode >= frame::kFw2) {
    const uint32_t bits = mode - frame::kFw2 + 2;
    if (units != units_of_bytes(size_of_fixed(bits))) {
      return false;
    }
    symbols.has_escapes = false;
    add_field<2>(symbols.codes, payload, bits - 2);
    return true;
  }
  symbols.has_escapes = true;
  const uint8_t* end = payload + units * frame::kUnitBytes;
  const uint8_t* last;
  if (mode == frame::kLq2) {
    last = decode_escapes2(payload, end, count_escapes(symbols.codes), center, symbols.escapes);
  } else {
    if (units < units_of_bytes(kPlane1Bytes)) {
      return false;
    }
    add_plane1<2>(symbols.codes, payload);
    last = decode_nibbles(kLq3Nibbles, payload + kPlane1Bytes, end, count_escapes(symbols.codes),
                          center, symbols.escapes);
  }
  // `last` is no later than `end`; is it in the last unit, or is the payload too long?
  return last != nullptr && units_of_bytes(static_cast<uint32_t>(last - payload)) == units;
}

}  // namespace
}  // namespace memswap::cpu::avx512

MEMSWAP_AVX512_END
