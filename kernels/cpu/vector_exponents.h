// The symbols E of a block to the modes LQ2, LQ3 and FW, and back.
#pragma once

#include "vector_escapes.h"
#include "vector_statistics.h"

MEMSWAP_VECTOR_BEGIN

namespace memswap::cpu::MEMSWAP_ISA {
namespace {

// --- Encoding ----------------------------------------------------------------------------------

constexpr Code code_of(uint32_t mode) {
  return mode == frame::kLq2 ? Code::kLq2 : mode == frame::kLq3 ? Code::kLq3 : Code::kFixed;
}

// Calls visit with the code as a constant.
template <typename Visit>
[[gnu::always_inline]] inline void for_code(Code code, Visit visit) {
  switch (code) {
    case Code::kLq2:
      return visit.template operator()<Code::kLq2>();
    case Code::kLq3:
      return visit.template operator()<Code::kLq3>();
    case Code::kFixed:
      return visit.template operator()<Code::kFixed>();
  }
}

// What of a block is not in its slab, before it is a payload.
struct Pending {
  Escapes escapes;             // kLq2, kLq3
  uint8_t high[kPlane1Bytes];  // kLq3: the codes' bit 2
};

// Writes L0. A code is v - 1 kept below a limit, plus 1: for what cannot be coded that is a power
// of two, all of whose bits in use are 0.
template <uint32_t kSymbolBits, Code kCode, bool kStreaming>
inline void encode_low_plane_as(const Bytes& symbols, uint8_t center, uint8_t* low,
                                Pending& pending) {
  const Vector first = broadcast(static_cast<uint8_t>(center - 1u));
  const Vector limit = broadcast(kCode == Code::kLq2 ? 3 : 7);
  const auto code_of_symbols = of_symbols<kSymbolBits>([=](Vector of) {
    const Vector behind = first - of;
    return (kCode == Code::kFixed ? behind : minimum(behind, limit)) + 1;
  });
  uint8_t escaped[kPlane1Bytes];
  for (uint32_t i = 0; i < kVectors / 4; ++i) {
    Vector merged{};
    for_quarters([&]<uint32_t kQuarter>() {
      const uint32_t at = kVectors / 4 * kQuarter + i;
      const Vector code = code_of_symbols(symbols.vector[at]);
      if constexpr (kCode != Code::kFixed) {
        store_mask(escaped + kLanes / 8 * at, mask_of(equal(code, limit + 1)));
      }
      if constexpr (kCode == Code::kLq3) {
        store_mask(pending.high + kLanes / 8 * at, mask_of_bit<2>(code));
      }
      merged |= move_bits<0, 2 * kQuarter, 2>(code);
    });
    store_line<kStreaming>(low + kLanes * i, merged);
  }
  if constexpr (kCode != Code::kFixed) {
    uint8_t* end = pending.escapes.symbol.byte;
    for (uint32_t i = 0; i < kVectors; ++i) {
      end = append(end, escaped + kLanes / 8 * i, symbols.vector[i]);
    }
    constexpr uint8_t kPadding = kCode == Code::kLq2 ? 0 : kLq3Nibbles.first;
    pending.escapes.end_at(end, static_cast<uint8_t>(center - kPadding));
  }
}

template <uint32_t kSymbolBits, bool kStreaming>
inline void encode_low_plane(const Bytes& symbols, const Choice& choice, uint8_t* low,
                             Pending& pending) {
  for_code(code_of(choice.mode), [&]<Code kCode>() {
    encode_low_plane_as<kSymbolBits, kCode, kStreaming>(symbols, choice.center, low, pending);
  });
}

// Writes the payload. What a guessed mode costs is found on the way; false if it is too much.
inline bool encode_payload(const Bytes& symbols, Choice& choice, const Pending& pending,
                           Escapes& deeper, uint8_t* payload) {
  if (choice.mode >= frame::kFw2) {
    if (choice.mode != frame::kFw2) {
      Bytes codes;
      for (uint32_t i = 0; i < kVectors; ++i) {
        codes.vector[i] = choice.center - symbols.vector[i];
      }
      store_field<2>(payload, codes, choice.mode - frame::kFw2);
    }
    return true;
  }
  const uint8_t* const limit = payload + choice.units * frame::kUnitBytes;
  uint8_t* end;
  if (choice.mode == frame::kLq2) {
    end = encode_escapes2(pending.escapes, choice.center, payload, limit, deeper);
  } else {
    __builtin_memcpy(payload, pending.high, kPlane1Bytes);
    end =
        encode_nibbles(kLq3Nibbles, pending.escapes, choice.center, payload + kPlane1Bytes, limit);
  }
  if (end == nullptr) {
    return false;
  }
  store_as<uint64_t>(end, 0);  // the rest of the last unit
  choice.units = units_of_bytes(static_cast<uint32_t>(end - payload));
  return true;
}

// --- Decoding ----------------------------------------------------------------------------------

// A block's symbols before they are joined with the rest of their elements, vector by vector: where
// the codes are, and in a row what stands for those that escape.
struct Symbols {
  AlignedRow escapes;  // kLq2, kLq3; placed
  Bytes codes;         // kLq3, with bit 2 lowest; kFixed
  Code code;
  uint8_t center;
  const uint8_t* low;  // kLq2: L0
};

// The codes of a quarter, from bit kTo on.
template <uint32_t kQuarter, uint32_t kTo>
inline Vector low_codes(const uint8_t* low, uint32_t i) {
  return move_bits<2 * kQuarter, kTo, 2>(load(low + kLanes * i));
}

// By code, the placed symbol; that of an escape has none.
template <Code kCode, typename Place>
inline Vector code_table(uint8_t center) {
  alignas(16) static constexpr uint8_t kValues[2][16] = {
      {0, 1, 2, 3}, {0, 4, 0, 0, 1, 5, 0, 0, 2, 6, 0, 0, 3, 7}};
  alignas(16) static constexpr uint8_t kCoded[16] = {0,   255, 255, 255, 255, 255, 255, 255,
                                                     255, 255, 255, 255, 255, 255, 255, 255};
  const Vector value = repeat16(kValues[kCode == Code::kLq3]);
  return Place::of((broadcast(center) - value) & repeat16(kCoded));
}

// Takes a block's placed symbols, kLanes after kLanes.
template <Code kCode, typename Place>
class SymbolCursor {
 public:
  explicit SymbolCursor(const Symbols& symbols)
      : low_(symbols.low),
        codes_(symbols.codes.vector),
        center_(broadcast(symbols.center)),
        table_(code_table<kCode, Place>(symbols.center)),
        next_(symbols.escapes.byte) {}

  // Those of vector i of the quarter, which is the next one.
  template <uint32_t kQuarter>
  [[gnu::always_inline]] Vector take(uint32_t i) {
    const uint32_t at = kVectors / 4 * kQuarter + i;
    if constexpr (kCode == Code::kFixed) {
      return Place::of(center_ - codes_[at]);
    } else {
      const Vector code = kCode == Code::kLq2 ? low_codes<kQuarter, 0>(low_, i) : codes_[at];
      const Expansion escaped(equal(code, Vector{}));
      return escaped.take_over(look_up(table_, code), next_);
    }
  }

 private:
  const uint8_t* const low_;   // kLq2
  const Vector* const codes_;  // kLq3, kFixed
  const Vector center_;        // kFixed
  const Vector table_;         // kLq2, kLq3
  const uint8_t* next_;
};

// The escapes of LQ2: fields of L0 that are 0.
inline uint32_t count_escapes2(const uint8_t* low) {
  Sums counts{};
  for (uint32_t i = 0; i < kVectors / 4; ++i) {
    counts = add_zero_fields2(counts, load(low + kLanes * i));
  }
  return total(counts);
}

// The codes of LQ3, of L0 and of the plane of bit 2, which becomes the lowest. Returns how many of
// them are 0: the escapes.
inline uint32_t join_codes3(Bytes& codes, const uint8_t* low, const uint8_t* high) {
  LaneCounter escapes;
  for_quarters([&]<uint32_t kQuarter>() {
    for (uint32_t i = 0; i < kVectors / 4; ++i) {
      const uint32_t at = kVectors / 4 * kQuarter + i;
      const Vector code =
          increment(low_codes<kQuarter, 2>(low, i), load_lanes(high + kLanes / 8 * at));
      codes.vector[at] = code;
      escapes.add(equal(code, Vector{}));
    }
  });
  return escapes.total();
}

// The symbols of a block in one of the modes 1 to 9; false where the payload has another length.
template <typename Place>
inline bool decode_symbols(Symbols& symbols, const uint8_t* low, const uint8_t* payload,
                           const CodedBlock& block) {
  const uint32_t mode = block.mode, units = block.units;
  const uint8_t center = block.center;
  symbols.center = center;
  symbols.low = low;
  symbols.code = code_of(mode);
  if (symbols.code == Code::kFixed) {
    const uint32_t bits = mode - frame::kFw2 + 2;
    if (units != units_of_bytes(size_of_fixed(bits))) {
      return false;
    }
    for_quarters([&]<uint32_t kQuarter>() {
      for (uint32_t i = 0; i < kVectors / 4; ++i) {
        symbols.codes.vector[kVectors / 4 * kQuarter + i] = low_codes<kQuarter, 0>(low, i);
      }
    });
    add_field<2>(symbols.codes, payload, bits - 2);
    return true;
  }
  const uint8_t* end = payload + units * frame::kUnitBytes;
  const uint8_t* last;
  if (mode == frame::kLq2) {
    last = decode_escapes2<Place>(payload, end, count_escapes2(low), center, symbols.escapes);
  } else {
    if (units < units_of_bytes(kPlane1Bytes)) {
      return false;
    }
    last = decode_nibbles<Place>(kLq3Nibbles, payload + kPlane1Bytes, end,
                                 join_codes3(symbols.codes, low, payload), center, symbols.escapes);
  }
  // `last` is no later than `end`; is it in the last unit, or is the payload too long?
  return last != nullptr && units_of_bytes(static_cast<uint32_t>(last - payload)) == units;
}

}  // namespace
}  // namespace memswap::cpu::MEMSWAP_ISA

MEMSWAP_VECTOR_END
