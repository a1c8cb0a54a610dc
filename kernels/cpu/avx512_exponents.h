// The symbols E of a block to the modes LQ2, LQ3 and FW, and back.
#pragma once

#include "avx512_escapes.h"
#include "avx512_statistics.h"

MEMSWAP_AVX512_BEGIN

namespace memswap::cpu::avx512 {
namespace {

// --- Encoding ----------------------------------------------------------------------------------

// In each field of 2 bits of a plane: its value plus 1.
inline Vector increment2(Vector plane) {
  const Vector low = broadcast(0x55);
  // The low bit flips, and the high bit where the low one was set.
  const Vector carried = _mm512_and_si512(_mm512_slli_epi16(plane, 1), broadcast(0xaa));
  return _mm512_ternarylogic_epi64(plane, carried, low, 0x96);  // xor
}

// Writes L0 and lists the symbols that the mode cannot code. Every mode's code is v = center - E up
// to a limit, and 0 beyond it: the same as v - 1 kept below that limit, plus 1.
template <bool kStreaming>
inline void encode_low_plane(const Bytes& symbols, const Choice& choice, uint8_t* low,
                             Escapes& escapes) {
  const Vector first = broadcast(static_cast<uint8_t>(choice.center - 1u));
  const Vector limit = broadcast(choice.mode == frame::kLq2   ? 3
                                 : choice.mode == frame::kLq3 ? 7
                                                              : 255);
  uint8_t* end = escapes.symbol.byte;
  Vector plane[4];
  for (uint32_t quarter = 0; quarter < 4; ++quarter) {
    for (uint32_t i = 0; i < 4; ++i) {
      const Vector symbol = symbols.vector[4 * quarter + i];
      const Vector code = _mm512_min_epu8(_mm512_sub_epi8(first, symbol), limit);
      plane[i] = place2<0>(quarter == 0 ? _mm512_setzero_si512() : plane[i], code, 2 * quarter);
      end = append(end, _mm512_cmpeq_epi8_mask(code, limit), symbol);
    }
  }
  for (uint32_t i = 0; i < 4; ++i) {
    store_line<kStreaming>(low + kLanes * i, increment2(plane[i]));
  }
  escapes.count = static_cast<uint32_t>(end - escapes.symbol.byte);
}

// Writes the payload.
inline void encode_payload(const Bytes& symbols, const Choice& choice, const Escapes& escapes,
                           uint8_t* payload) {
  if (choice.mode == frame::kLq2) {
    store64(encode_escapes2(escapes, choice.center, payload), 0);  // the rest of the last unit
  } else if (choice.mode == frame::kLq3) {
    // Bit 2 of the code is set in 4, 5, 6 and 7.
    const Vector middle = broadcast(static_cast<uint8_t>(choice.center - 4u));
    for (uint32_t i = 0; i < kVectors; ++i) {
      store64(payload + 8 * i,
              _mm512_cmplt_epu8_mask(_mm512_sub_epi8(middle, symbols.vector[i]), broadcast(4)));
    }
    store64(encode_nibbles(kLq3Nibbles, escapes, choice.center, payload + kPlane1Bytes), 0);
  } else if (choice.mode != frame::kFw2) {
    Bytes codes;
    for (uint32_t i = 0; i < kVectors; ++i) {
      codes.vector[i] = _mm512_sub_epi8(broadcast(choice.center), symbols.vector[i]);
    }
    store_field<2>(payload, codes, choice.mode - frame::kFw2);
  }
}

// --- Decoding ----------------------------------------------------------------------------------

// How a mode codes symbols.
enum class Code { kLq2, kLq3, kFixed };

// A block's symbols before they are joined with the rest of their elements, vector by vector: where
// the codes are, and in a row what stands for those that escape.
struct Symbols {
  alignas(kRowAlignment) Row escapes;  // kLq2, kLq3; placed
  Code code;
  uint8_t center;
  uint32_t bits;                               // kFixed: of a code
  const uint8_t* low;                          // L0
  const uint8_t* payload;                      // kLq3, kFixed: planes of the codes' other bits
  alignas(kLanes) uint64_t escaped[kVectors];  // kLq3: which elements
};

// By the low 2 bits of an index: the placed symbol that is that and `above` below the center.
template <typename Place>
inline Vector code_table(uint8_t center, uint32_t above = 0) {
  const Vector codes = _mm512_set1_epi32(0x03020100);
  return Place::of(_mm512_sub_epi8(broadcast(center - above), codes));
}

// Takes a block's placed symbols, 64 after 64.
template <Code kCode, typename Place>
class SymbolCursor {
 public:
  explicit SymbolCursor(const Symbols& symbols)
      : symbols_(symbols),
        low_table_(code_table<Place>(symbols.center)),
        high_table_(code_table<Place>(symbols.center, 4)),
        next_(symbols.escapes.byte) {}

  // Those of vector i of the quarter, which is the next one.
  template <uint32_t kQuarter>
  Vector take(uint32_t i) {
    const uint32_t at = 4 * kQuarter + i;
    const Vector merged = load(symbols_.low + kLanes * i);
    const Vector index = _mm512_srli_epi16(merged, 2 * kQuarter);
    const Vector symbol = _mm512_permutexvar_epi8(index, low_table_);
    if constexpr (kCode == Code::kLq2) {
      return escape(symbol, _mm512_testn_epi8_mask(merged, broadcast(3u << 2 * kQuarter)));
    } else {
      const uint64_t high = load64(symbols_.payload + 8 * at);
      return escape(_mm512_mask_permutexvar_epi8(symbol, high, index, high_table_),
                    symbols_.escaped[at]);
    }
  }

 private:
  Vector escape(Vector symbol, uint64_t escaped) {
    const Vector escapes = load(next_);
    next_ += count_bits(escaped);
    return _mm512_mask_expand_epi8(symbol, escaped, escapes);
  }

  const Symbols& symbols_;
  const Vector low_table_;
  const Vector high_table_;  // kLq3: of codes with bit 2
  const uint8_t* next_;
};

template <typename Place>
class SymbolCursor<Code::kFixed, Place> {
 public:
  explicit SymbolCursor(const Symbols& symbols) : center_(broadcast(symbols.center)) {
    load_plane2(codes_, symbols.low);
    add_field<2>(codes_, symbols.payload, symbols.bits - 2);
  }

  template <uint32_t kQuarter>
  Vector take(uint32_t i) const {
    return Place::of(_mm512_sub_epi8(center_, codes_.vector[4 * kQuarter + i]));
  }

 private:
  const Vector center_;
  Bytes codes_;
};

// The escapes of LQ2: fields of L0 that are 0.
inline uint32_t count_escapes2(const uint8_t* low) {
  const Vector lowest = broadcast(0x55);
  Vector counts = _mm512_setzero_si512();
  for (uint32_t i = 0; i < 4; ++i) {
    const Vector merged = load(low + kLanes * i);
    const Vector zeros =  // ~(a | b) & c
        _mm512_ternarylogic_epi64(merged, _mm512_srli_epi16(merged, 1), lowest, 0x02);
    counts = _mm512_add_epi64(counts, _mm512_popcnt_epi64(zeros));
  }
  return total(counts);
}

// Those of LQ3, whose bit 2 is not set either.
inline uint32_t find_escapes3(const uint8_t* low, const uint8_t* high,
                              uint64_t (&escaped)[kVectors]) {
  uint32_t count = 0;
  for (uint32_t at = 0; at < kVectors; ++at) {
    const Vector field = broadcast(3u << at / 4 * 2);
    const uint64_t zeros = _mm512_testn_epi8_mask(load(low + kLanes * (at % 4)), field);
    escaped[at] = zeros & ~load64(high + 8 * at);
    count += count_bits(escaped[at]);
  }
  return count;
}

// The symbols of a block in one of the modes 1 to 9; false where the payload has another length.
template <typename Place>
inline bool decode_symbols(Symbols& symbols, const uint8_t* low, const uint8_t* payload,
                           uint32_t mode, uint32_t units, uint8_t center) {
  symbols.center = center;
  symbols.low = low;
  symbols.payload = payload;
  if (mode >= frame::kFw2) {
    symbols.code = Code::kFixed;
    symbols.bits = mode - frame::kFw2 + 2;
    return units == units_of_bytes(size_of_fixed(symbols.bits));
  }
  const uint8_t* end = payload + units * frame::kUnitBytes;
  const uint8_t* last;
  if (mode == frame::kLq2) {
    symbols.code = Code::kLq2;
    last = decode_escapes2<Place>(payload, end, count_escapes2(low), center, symbols.escapes);
  } else {
    if (units < units_of_bytes(kPlane1Bytes)) {
      return false;
    }
    symbols.code = Code::kLq3;
    last = decode_nibbles<Place>(kLq3Nibbles, payload + kPlane1Bytes, end,
                                 find_escapes3(low, payload, symbols.escaped), center,
                                 symbols.escapes);
  }
  // `last` is no later than `end`; is it in the last unit, or is the payload too long?
  return last != nullptr && units_of_bytes(static_cast<uint32_t>(last - payload)) == units;
}

}  // namespace
}  // namespace memswap::cpu::avx512

MEMSWAP_AVX512_END
