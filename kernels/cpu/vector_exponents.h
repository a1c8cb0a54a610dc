// The symbols E of a block, or of a sparse block's survivors: center, escapes, and the modes LQ2,
// LQ3 and FW.
#pragma once

#include "memswap/canonical.h"
#include "vector_bytes.h"

MEMSWAP_VECTOR_BEGIN

namespace memswap::cpu::vector {
namespace {

// --- Statistics --------------------------------------------------------------------------------

struct Statistics {
  uint32_t minimum, maximum;
  uint32_t sum;    // of min(maximum - E, 31) where E is not 0
  uint32_t count;  // of E that are not 0
};

inline Statistics statistics_of(const Bytes& symbols, uint32_t vectors) {
  Vector low = broadcast(255);
  Vector high{};
  for (uint32_t i = 0; i < vectors; ++i) {
    low = minimum(low, symbols.vector[i]);
    high = maximum(high, symbols.vector[i]);
  }
  Statistics statistics{lowest_of(low), highest_of(high), 0, 0};
  const Vector top = broadcast(statistics.maximum);
  Vector present{};  // at most kVectors, 64, in each lane
  for (uint32_t i = 0; i < vectors; i += 8) {
    Vector sum{};  // eight times 31 fits into a byte
    for (uint32_t j = i; j < i + 8 && j < vectors; ++j) {
      const Vector nonzero = lanes_where(symbols.vector[j] != 0);
      sum += minimum(top - symbols.vector[j], broadcast(canonical::kClip)) & nonzero;
      present -= nonzero;
    }
    statistics.sum += sum_of(sum);
  }
  statistics.count = sum_of(present);
  return statistics;
}

// See [Note: outliers] in memswap/canonical.h. The lowest symbol of the window that most of the
// sample is in; 0 if there is none.
inline uint32_t crowded_window(const Bytes& symbols, uint32_t vectors) {
  Vector samples[canonical::kSamples / kLanes]{};
  for (uint32_t i = 0; i < canonical::kSamples; ++i) {
    const uint32_t at = canonical::kSampleStep * i;
    if (at / kLanes < vectors) {
      samples[i / kLanes][i % kLanes] = symbols.vector[at / kLanes][at % kLanes];
    }
  }
  const auto count_samples = [&](uint32_t low, uint32_t span) {
    uint32_t count = 0;
    for (const Vector& sample : samples) {
      count += sum_of(lanes_where(sample - broadcast(low) <= broadcast(span)) & 1);
    }
    return count;
  };
  const uint32_t count = count_samples(1, 254);
  uint32_t median = 0;
  for (uint32_t bit = 128; bit >= canonical::kMedianStep; bit /= 2) {
    median += 2 * count_samples(median + bit, 255 - median - bit) >= count ? bit : 0;
  }
  uint32_t low = median > canonical::kBelowMedian ? median - canonical::kBelowMedian : 1;
  low = low < canonical::kHighestWindow ? low : canonical::kHighestWindow;
  return 2 * count_samples(low, canonical::kWindow - 1) > count ? low : 0;
}

// Takes the maximum, the sum and the count from the symbols in the window alone.
inline void count_crowd(const Bytes& symbols, uint32_t vectors, uint32_t low,
                        Statistics& statistics) {
  const Vector lowest = broadcast(low);
  Vector highest{}, present{};
  uint32_t sum = 0;
  for (uint32_t i = 0; i < vectors; i += 8) {
    Vector sums{};  // eight times 31 fits into a byte
    for (uint32_t j = i; j < i + 8 && j < vectors; ++j) {
      const Vector above = symbols.vector[j] - lowest;
      const Vector inside = lanes_where(above < broadcast(canonical::kWindow));
      highest = maximum(highest, above & inside);
      sums += above & inside;
      present -= inside;
    }
    sum += sum_of(sums);
  }
  const uint32_t span = highest_of(highest);
  statistics.maximum = low + span;
  statistics.count = sum_of(present);
  statistics.sum = statistics.count * span - sum;
}

inline bool may_have_outliers(const Statistics& statistics) {
  return statistics.sum >= canonical::kFar * statistics.count && statistics.count != 0;
}

// Section 5: the center of a code whose middle is `eighths` below the maximum.
inline uint8_t center_of(const Statistics& statistics, uint32_t eighths) {
  const uint32_t count = statistics.count == 0 ? 1 : statistics.count;
  const uint32_t sum = 8 * statistics.sum;
  const uint32_t quotient = sum > eighths * count ? (sum - eighths * count) / (8 * count) : 0;
  return static_cast<uint8_t>(statistics.maximum + 1 - quotient);
}

// --- Escapes -----------------------------------------------------------------------------------

// The v of nibbles 0 (then 11 more), 12 and 13; 14 means E = 0, 15 a byte E.
struct NibbleCode {
  uint8_t first, twelve, thirteen;
};
inline constexpr NibbleCode kLq2Nibbles = {6, 255, 254};
inline constexpr NibbleCode kLq3Nibbles = {8, 0, 255};

// The nibbles of `count` values v, then a byte E for each 15. Returns the end.
inline uint8_t* encode_nibbles(const NibbleCode& code, const Row& values, uint32_t count,
                               uint8_t center, uint8_t* out) {
  Row raw;
  uint8_t* raw_end = raw.byte;
  for (uint32_t i = 0; i < count; i += kLanes) {
    const Vector value = load(values.byte + i);
    const Vector live = first_lanes(count - i);
    const Vector near = value - code.first;
    const Vector is_near = lanes_where(near < 12);
    const Vector is_twelve = lanes_where(value == code.twelve);
    const Vector is_thirteen = lanes_where(value == code.thirteen);
    const Vector is_zero = lanes_where(value == center);
    Vector nibble = select(is_zero, broadcast(14), broadcast(15));
    nibble = select(is_thirteen, broadcast(13), nibble);
    nibble = select(is_twelve, broadcast(12), nibble);
    nibble = select(is_near, near, nibble) & live;
    raw_end = append(raw_end, lanes_where(nibble == 15), center - value);
    store_symbols4(out + i / 2, nibble);
  }
  out += bytes_of_bits(4 * count);
  const auto raw_count = static_cast<uint32_t>(raw_end - raw.byte);
  __builtin_memcpy(out, raw.byte, raw_count);
  return out + raw_count;
}

// The reverse: `count` symbols E into `symbols`. Returns the end, or NULL if it is behind `end`.
inline const uint8_t* decode_nibbles(const NibbleCode& code, const uint8_t* in, const uint8_t* end,
                                     uint32_t count, uint8_t center, Row& symbols) {
  const uint8_t* raw = in + bytes_of_bits(4 * count);
  if (raw > end) {
    return nullptr;
  }
  for (uint32_t i = 0; i < count; i += kLanes) {
    const Vector nibble = load_symbols4(in + i / 2);
    Vector value = nibble + code.first;
    value = select(lanes_where(nibble == 12), broadcast(code.twelve), value);
    value = select(lanes_where(nibble == 13), broadcast(code.thirteen), value);
    const Vector symbol = (center - value) & lanes_where(nibble < 14);
    const Vector escaped = lanes_where(nibble == 15) & first_lanes(count - i);
    const uint32_t bytes = sum_of(escaped & 1);
    if (bytes > static_cast<size_t>(end - raw)) {
      return nullptr;
    }
    store(symbols.byte + i, expand(symbol, escaped, raw));
  }
  return raw;
}

// S1, S2 and the bytes of LQ2, for the values v of `count` escapes.
inline uint8_t* encode_escapes2(const Row& values, uint32_t count, uint8_t center, uint8_t* out) {
  Row deeper;
  uint8_t* deeper_end = deeper.byte;
  for (uint32_t i = 0; i < count; i += kLanes) {
    const Vector value = load(values.byte + i);
    // v = 0: 0, 4: 1, 5: 2, else 3.
    Vector symbol = broadcast(3) ^ (lanes_where(value == 0) & 3) ^ (lanes_where(value == 4) & 2) ^
                    (lanes_where(value == 5) & 1);
    symbol &= first_lanes(count - i);
    store_symbols2(out + i / 4, symbol);
    deeper_end = append(deeper_end, lanes_where(symbol == 3), value);
  }
  return encode_nibbles(kLq2Nibbles, deeper, static_cast<uint32_t>(deeper_end - deeper.byte),
                        center, out + bytes_of_bits(2 * count));
}

inline const uint8_t* decode_escapes2(const uint8_t* in, const uint8_t* end, uint32_t count,
                                      uint8_t center, Row& symbols) {
  const uint8_t* second = in + bytes_of_bits(2 * count);
  if (second > end) {
    return nullptr;
  }
  Vector deeper[kVectors];
  uint32_t deeper_count = 0;
  for (uint32_t i = 0; i < count; i += kLanes) {
    const Vector symbol = load_symbols2(in + i / 4);
    deeper[i / kLanes] = lanes_where(symbol == 3) & first_lanes(count - i);
    deeper_count += sum_of(deeper[i / kLanes] & 1);
    store(symbols.byte + i, center - ((symbol + 3) & lanes_where(symbol != 0)));
  }
  Row deeper_symbols;
  const uint8_t* last =
      decode_nibbles(kLq2Nibbles, second, end, deeper_count, center, deeper_symbols);
  if (last == nullptr) {
    return nullptr;
  }
  const uint8_t* next = deeper_symbols.byte;
  for (uint32_t i = 0; i < count; i += kLanes) {
    store(symbols.byte + i, expand(load(symbols.byte + i), deeper[i / kLanes], next));
  }
  return last;
}

// --- Sizes -------------------------------------------------------------------------------------

// Counts are sums of lanes that are 255, so they are subtracted.
inline uint32_t size_of_lq2(const Bytes& symbols, uint8_t center) {
  Vector escapes{}, deeper{}, raw{};
  for (const Vector& symbol : symbols.vector) {
    const Vector value = center - symbol;
    escapes -= lanes_where(value - 1 > 2);
    deeper -= lanes_where(value > 5);
    raw -= lanes_where(value + 2 > 19) & lanes_where(symbol != 0);
  }
  return bytes_of_bits(2 * sum_of(escapes)) + bytes_of_bits(4 * sum_of(deeper)) + sum_of(raw);
}

inline uint32_t size_of_lq3(const Bytes& symbols, uint8_t center) {
  Vector escapes{}, raw{};
  for (const Vector& symbol : symbols.vector) {
    const Vector value = center - symbol;
    escapes -= lanes_where(value - 1 > 6);
    raw -= lanes_where(value + 1 > 20) & lanes_where(symbol != 0);
  }
  return kPlane1Bytes + bytes_of_bits(4 * sum_of(escapes)) + sum_of(raw);
}

inline uint32_t size_of_fixed(uint32_t bits) { return kPlane1Bytes * (bits - 2); }

// --- Modes -------------------------------------------------------------------------------------

// Turns the symbols into codes, escapes into code 0, and lists the values v of the escapes.
template <uint32_t kLargestCode>
inline uint32_t take_escapes(Bytes& symbols, uint8_t center, Row& values) {
  uint8_t* end = values.byte;
  for (Vector& symbol : symbols.vector) {
    const Vector value = center - symbol;
    const Vector coded = lanes_where(value - 1 < static_cast<uint8_t>(kLargestCode));
    symbol = value & coded;
    end = append(end, ~coded, value);
  }
  return static_cast<uint32_t>(end - values.byte);
}

struct Choice {
  uint32_t mode;
  uint8_t center;
  uint8_t center2;
  uint32_t nonzero;
  uint32_t units;
};

inline Choice choose(const Bytes& symbols, const EncodeParams& params, uint32_t symbol_bits) {
  Statistics statistics = statistics_of(symbols, kVectors);
  const uint32_t spread = statistics.maximum - statistics.minimum;
  const uint32_t bits = params.fast  ? symbol_bits
                        : spread < 4 ? 2
                                     : 32 - static_cast<uint32_t>(__builtin_clz(spread));
  const auto maximum = static_cast<uint8_t>(statistics.maximum);
  Choice choice{frame::kFw2 + bits - 2, params.fast ? params.center : maximum, params.center,
                statistics.count, units_of_bytes(size_of_fixed(bits))};
  if (!params.fast) {
    bool crowded = true;
    if (symbol_bits == canonical::kOutlierBits && may_have_outliers(statistics)) {
      const uint32_t low = crowded_window(symbols, kVectors);
      crowded = low != 0;
      if (crowded) {
        count_crowd(symbols, kVectors, low, statistics);
      }
    }
    choice.center2 = center_of(statistics, 7);
    if (!crowded) {
      return choice;
    }
  }
  const uint32_t lq2 = units_of_bytes(size_of_lq2(symbols, choice.center2));
  if (lq2 < choice.units) {
    choice.mode = frame::kLq2;
    choice.center = choice.center2;
    choice.units = lq2;
  }
  // LQ3 has a plane of bits for a start, so it cannot win against anything as short.
  if (params.fast || choice.units <= units_of_bytes(kPlane1Bytes)) {
    return choice;
  }
  const uint8_t center3 = center_of(statistics, 19);
  const uint32_t lq3 = units_of_bytes(size_of_lq3(symbols, center3));
  if (lq3 < choice.units) {
    choice.mode = frame::kLq3;
    choice.center = center3;
    choice.units = lq3;
  }
  return choice;
}

// Writes the plane L0 to `low` and the payload; spoils `symbols`.
template <bool kStreaming>
inline void encode_symbols(Bytes& symbols, const Choice& choice, uint8_t* low, uint8_t* payload) {
  Row values;
  uint8_t* end = nullptr;
  if (choice.mode == frame::kLq2) {
    const uint32_t count = take_escapes<3>(symbols, choice.center, values);
    end = encode_escapes2(values, count, choice.center, payload);
  } else if (choice.mode == frame::kLq3) {
    const uint32_t count = take_escapes<7>(symbols, choice.center, values);
    store_plane<2, 1, false>(payload, symbols);
    end = encode_nibbles(kLq3Nibbles, values, count, choice.center, payload + kPlane1Bytes);
  } else {
    for (Vector& symbol : symbols.vector) {
      symbol = choice.center - symbol;
    }
    store_field<2>(payload, symbols, choice.mode - frame::kFw2);
  }
  store_plane<0, 2, kStreaming>(low, symbols);
  if (end != nullptr) {
    store_as<uint64_t>(end, 0);  // the rest of the last unit
  }
}

// The symbols of a block in one of the modes 1 to 9; false where the payload has another length.
inline bool decode_symbols(Bytes& symbols, const uint8_t* low, const uint8_t* payload,
                           uint32_t mode, uint32_t units, uint8_t center) {
  symbols = Bytes{};
  add_plane<0, 2>(symbols, low);
  if (mode >= frame::kFw2) {
    const uint32_t bits = mode - frame::kFw2;
    if (units != units_of_bytes(kPlane1Bytes * bits)) {
      return false;
    }
    add_field<2>(symbols, payload, bits);
    for (Vector& symbol : symbols.vector) {
      symbol = center - symbol;
    }
    return true;
  }
  if (mode == frame::kLq3) {
    if (units < units_of_bytes(kPlane1Bytes)) {
      return false;
    }
    add_plane<2, 1>(symbols, payload);
  }
  Vector zero{};
  for (const Vector& code : symbols.vector) {
    zero -= lanes_where(code == 0);
  }
  const uint32_t count = sum_of(zero);
  const uint8_t* end = payload + units * frame::kUnitBytes;
  Row escapes;
  const uint8_t* last = mode == frame::kLq2 ? decode_escapes2(payload, end, count, center, escapes)
                                            : decode_nibbles(kLq3Nibbles, payload + kPlane1Bytes,
                                                             end, count, center, escapes);
  // `last` is no later than `end`; is it in the last unit, or is the payload too long?
  if (last == nullptr || units_of_bytes(static_cast<uint32_t>(last - payload)) != units) {
    return false;
  }
  const uint8_t* next = escapes.byte;
  for (Vector& symbol : symbols.vector) {
    symbol = expand(center - symbol, lanes_where(symbol == 0), next);
  }
  return true;
}

}  // namespace
}  // namespace memswap::cpu::vector

MEMSWAP_VECTOR_END
