// The streams behind L0: S1, S2 and E bytes, of what the modes LQ2 and LQ3 cannot code.
#pragma once

#include "vector_bytes.h"

MEMSWAP_VECTOR_BEGIN

namespace memswap::cpu::MEMSWAP_ISA {
namespace {

// The v of nibbles 0 (then 11 more), 12 and 13; 14 means E = 0, 15 a byte E.
struct NibbleCode {
  uint8_t first, twelve, thirteen;
  alignas(16) uint8_t nibble[16];  // by v - first, kept below 13
  alignas(16) uint8_t value[16];   // the reverse; of 14 and 15 nothing
};
constexpr NibbleCode nibble_code(const frame::NibbleCode& of) {
  NibbleCode code{of.first, of.twelve, of.thirteen, {}, {}};
  for (uint8_t i = 0; i < 12; ++i) {
    code.nibble[i] = i;
    code.value[i] = static_cast<uint8_t>(of.first + i);
  }
  code.nibble[12] = 15;
  code.value[12] = of.twelve;
  code.value[13] = of.thirteen;
  return code;
}
inline constexpr NibbleCode kLq2Nibbles = nibble_code(frame::kLq2Nibbles);
inline constexpr NibbleCode kLq3Nibbles = nibble_code(frame::kLq3Nibbles);

// The symbols E of what has no code, in a row.
struct Escapes {
  Row symbol;
  uint32_t count;

  // What the last vector has behind them becomes `symbol`.
  void end_at(const uint8_t* end, uint32_t padding) {
    count = static_cast<uint32_t>(end - symbol.byte);
    store(symbol.byte + count, broadcast(padding));
  }
};

// A nibble for each, then a byte E for each 15. Behind the escapes stand symbols of nibble 0.
// Returns the end, or NULL if it would be behind `limit`, behind which no more than a vector is
// written.
//
// The bytes are appended where they belong. A row that is copied would be loaded again while the
// stores that made it are on their way to the cache, and a load that more than one of them has a
// part of waits for all. So the last nibbles, behind which their vector has room for more, are
// written before the first byte.
inline uint8_t* encode_nibbles(const NibbleCode& code, const Escapes& escapes, uint8_t center,
                               uint8_t* out, const uint8_t* limit) {
  uint8_t* const nibbles_end = out + bytes_of_bits(4 * escapes.count);
  if (nibbles_end > limit) {
    return nullptr;
  }
  const Vector table = repeat16(code.nibble);
  const Vector first = broadcast(static_cast<uint8_t>(center - code.first));
  const Vector twelve = broadcast(static_cast<uint8_t>(center - code.twelve));
  const Vector thirteen = broadcast(static_cast<uint8_t>(center - code.thirteen));
  // 15 also for E = 0.
  const auto nibbles_of = [&](Vector symbol) {
    Vector nibble = look_up(table, minimum(first - symbol, broadcast(12)));
    nibble ^= only(equal(symbol, twelve), broadcast(15 ^ 12));
    return nibble ^ only(equal(symbol, thirteen), broadcast(15 ^ 13));
  };
  const auto with_zeros = [&](Vector nibble, Vector symbol) {
    return nibble ^
           only(equal(nibble, broadcast(15)) & equal(symbol, Vector{}), broadcast(15 ^ 14));
  };
  const uint32_t last = escapes.count == 0 ? 0 : (escapes.count - 1) / kLanes * kLanes;
  const Vector last_symbols = load(escapes.symbol.byte + last);
  store_symbols4(out + last / 2, with_zeros(nibbles_of(last_symbols), last_symbols));
  uint8_t* end = nibbles_end;
  for (uint32_t i = 0; i < escapes.count; i += kLanes) {
    const Vector symbol = load(escapes.symbol.byte + i);
    const Vector nibble = nibbles_of(symbol);
    const Lanes escaped = equal(nibble, broadcast(15)) & nonzero(symbol);
    if (i != last) {
      store_symbols4(out + i / 2, with_zeros(nibble, symbol));
    }
    if (any(mask_of(escaped))) {
      if (count_of(mask_of(escaped)) > static_cast<size_t>(limit - end)) {
        return nullptr;
      }
      end = append(end, mask_of(escaped), symbol);
    }
  }
  return end;
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
  // By nibble, the symbol; nibble 14 is symbol 0, and so is 15 until its byte is added.
  alignas(kLanes) static constexpr uint8_t kCoded[16] = {255, 255, 255, 255, 255, 255, 255, 255,
                                                         255, 255, 255, 255, 255, 255, 0,   0};
  const Vector table = Place::of((broadcast(center) - repeat16(code.value)) & repeat16(kCoded));
  for (uint32_t i = 0; i < count; i += kLanes) {
    const Vector nibble = load_symbols4(in + i / 2);
    Vector symbol = look_up(table, nibble);
    const Lanes escaped = equal(nibble, broadcast(15));
    if (any(mask_of(escaped))) {
      const Expansion bytes(escaped & first_lanes(count - i));
      if (bytes.count() > static_cast<size_t>(end - raw)) {
        return nullptr;
      }
      symbol |= Place::of(bytes.take(raw));
    }
    store(symbols.byte + i, symbol);
  }
  return raw;
}

// Writes S1 of the escapes, behind which stand symbols of v = 0; `deeper` becomes those that need
// S2.
inline void split_escapes2(const Escapes& escapes, uint8_t center, uint8_t* out, Escapes& deeper) {
  // By v, kept below 16: 0: 0, 4: 1, 5: 2; 1, 2 and 3 do not escape.
  alignas(16) static constexpr uint8_t kFirst[16] = {0, 3, 3, 3, 1, 2, 3, 3,
                                                     3, 3, 3, 3, 3, 3, 3, 3};
  const Vector table = repeat16(kFirst);
  const Vector centers = broadcast(center);
  uint8_t* end = deeper.symbol.byte;
  for (uint32_t i = 0; i < escapes.count; i += kLanes) {
    const Vector symbol = load(escapes.symbol.byte + i);
    const Vector first = look_up(table, minimum(centers - symbol, broadcast(15)));
    store_symbols2(out + i / 4, first);
    end = append(end, mask_of(equal(first, broadcast(3))), symbol);
  }
  deeper.end_at(end, static_cast<uint8_t>(center - kLq2Nibbles.first));
}

// S1, S2 and the bytes of LQ2, as encode_nibbles; S1 is written in any case. `deeper` is room.
inline uint8_t* encode_escapes2(const Escapes& escapes, uint8_t center, uint8_t* out,
                                const uint8_t* limit, Escapes& deeper) {
  split_escapes2(escapes, center, out, deeper);
  return encode_nibbles(kLq2Nibbles, deeper, center, out + bytes_of_bits(2 * escapes.count), limit);
}

template <typename Place>
inline const uint8_t* decode_escapes2(const uint8_t* in, const uint8_t* end, uint32_t count,
                                      uint8_t center, Row& symbols) {
  const uint8_t* second = in + bytes_of_bits(2 * count);
  if (second > end) {
    return nullptr;
  }
  // The symbols of v = 0, 4, 5, and of 3 nothing.
  alignas(16) static constexpr uint8_t kValue[16] = {0, 4, 5};
  alignas(16) static constexpr uint8_t kCoded[16] = {255, 255, 255};
  const Vector table = Place::of((broadcast(center) - repeat16(kValue)) & repeat16(kCoded));
  Lanes deeper[kVectors];
  LaneCounter deeper_lanes;
  const auto read = [&](uint32_t i) {
    const Vector index = load_symbols2(in + i / 4);
    store(symbols.byte + i, look_up(table, index));
    return equal(index, broadcast(3));
  };
  uint32_t i = 0;
  for (; i + kLanes < count; i += kLanes) {
    deeper[i / kLanes] = read(i);
    deeper_lanes.add(deeper[i / kLanes]);
  }
  if (count != 0) {
    deeper[i / kLanes] = read(i) & first_lanes(count - i);
    deeper_lanes.add(deeper[i / kLanes]);
  }
  const uint32_t deeper_count = deeper_lanes.total();
  if (deeper_count == 0) {
    return second;
  }
  AlignedRow deeper_symbols;
  const uint8_t* last =
      decode_nibbles<Place>(kLq2Nibbles, second, end, deeper_count, center, deeper_symbols);
  if (last == nullptr) {
    return nullptr;
  }
  const uint8_t* next = deeper_symbols.byte;
  for (uint32_t j = 0; j < count; j += kLanes) {
    const Expansion expansion(deeper[j / kLanes]);
    store(symbols.byte + j, expansion.take_over(load(symbols.byte + j), next));
  }
  return last;
}

}  // namespace
}  // namespace memswap::cpu::MEMSWAP_ISA

MEMSWAP_VECTOR_END
