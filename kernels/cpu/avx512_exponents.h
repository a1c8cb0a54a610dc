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
