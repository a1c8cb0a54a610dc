// The codes of exponents: LQ2, LQ3 and FW, and how the canonical encoder finds their centres
// (docs/format.md sections 3 and 5). Works on any number of exponents: dense blocks have 1024,
// sparse ones their survivors.
#pragma once

#include <stdint.h>

#include <algorithm>

#include "memswap/canonical.h"
#include "planes.h"

namespace memswap::cpu::scalar {

inline constexpr uint32_t kEscape = 0;  // code in L0 of what the centre's neighbourhood has not

// How far an exponent is below the centre.
constexpr uint8_t distance(uint8_t center, uint8_t exponent) {
  return static_cast<uint8_t>(center - exponent);
}

// Escapes of 4 bits.
inline constexpr uint32_t kZeroNibble = 14;
inline constexpr uint32_t kByteNibble = 15;
constexpr uint32_t nibble_of(const frame::NibbleCode& code, uint8_t v, uint8_t exponent) {
  return v >= code.first && v < code.first + 12 ? v - code.first
         : v == code.twelve                     ? 12
         : v == code.thirteen                   ? 13
         : exponent == 0                        ? kZeroNibble
                                                : kByteNibble;
}
constexpr uint8_t distance_of_nibble(const frame::NibbleCode& code, uint32_t nibble) {
  return static_cast<uint8_t>(nibble < 12    ? nibble + code.first
                              : nibble == 12 ? code.twelve
                                             : code.thirteen);
}

struct Lq2 {
  static constexpr uint32_t code(uint8_t v) { return v >= 1 && v <= 3 ? v : kEscape; }

  // S1, 2 bits.
  static constexpr uint32_t kFirstEscape = 3;
  static constexpr uint32_t first(uint8_t v) {
    return v == 0 ? 0 : v == 4 ? 1 : v == 5 ? 2 : kFirstEscape;
  }
  static constexpr uint8_t distance_of_first(uint32_t symbol) {
    return static_cast<uint8_t>(symbol == 0 ? 0 : symbol + 3);
  }

  // S2, 4 bits.
  static constexpr uint32_t kSecondZero = kZeroNibble;
  static constexpr uint32_t kSecondEscape = kByteNibble;
  static constexpr uint32_t second(uint8_t v, uint8_t exponent) {
    return nibble_of(frame::kLq2Nibbles, v, exponent);
  }
  static constexpr uint8_t distance_of_second(uint32_t symbol) {
    return distance_of_nibble(frame::kLq2Nibbles, symbol);
  }
};

struct Lq3 {
  static constexpr uint32_t code(uint8_t v) { return v >= 1 && v <= 7 ? v : kEscape; }

  // S1, 4 bits.
  static constexpr uint32_t kFirstZero = kZeroNibble;
  static constexpr uint32_t kFirstEscape = kByteNibble;
  static constexpr uint32_t first(uint8_t v, uint8_t exponent) {
    return nibble_of(frame::kLq3Nibbles, v, exponent);
  }
  static constexpr uint8_t distance_of_first(uint32_t symbol) {
    return distance_of_nibble(frame::kLq3Nibbles, symbol);
  }
};

// What the canonical centres are computed from: exponents that are not 0.
struct Distances {
  uint32_t max;
  uint32_t sum;    // of min(max - E, kClip)
  uint32_t count;  // 1 if there are none
};

inline Distances distances_of(const uint8_t* exponents, uint32_t count, uint32_t low,
                              uint32_t high) {
  Distances distances{};
  const auto for_each = [&](auto visit) {
    for (uint32_t i = 0; i < count; ++i) {
      if (exponents[i] >= low && exponents[i] <= high) {
        visit(exponents[i]);
      }
    }
  };
  for_each([&](uint32_t e) { distances.max = std::max(distances.max, e); });
  for_each([&](uint32_t e) {
    distances.sum += std::min(distances.max - e, canonical::kClip);
    ++distances.count;
  });
  distances.count = std::max(distances.count, 1u);
  return distances;
}

// See [Note: outliers] in memswap/canonical.h. The lowest exponent of the window that most of the
// sample is in; 0 if there is none.
inline uint8_t crowded_window(const uint8_t* exponents, uint32_t count) {
  const auto count_samples = [&](uint32_t low, uint32_t high) {
    uint32_t samples = 0;
    for (uint32_t i = 0; i < canonical::kSamples && canonical::kSampleStep * i < count; ++i) {
      const uint32_t e = exponents[canonical::kSampleStep * i];
      samples += e >= low && e <= high;
    }
    return samples;
  };
  const uint32_t samples = count_samples(1, 255);
  uint32_t median = 256 - canonical::kMedianStep;
  while (median != 0 && 2 * count_samples(median, 255) < samples) {
    median -= canonical::kMedianStep;
  }
  const uint32_t low = std::clamp(median, canonical::kBelowMedian + 1,
                                  canonical::kHighestWindow + canonical::kBelowMedian) -
                       canonical::kBelowMedian;
  const uint32_t inside = count_samples(low, low + canonical::kWindow - 1);
  return 2 * inside > samples ? static_cast<uint8_t>(low) : 0;
}

// The centres that the canonical encoder takes.
struct Centers {
  uint8_t lq2;
  uint8_t lq3;
  bool crowded;  // false: not worth trying
};

inline Centers canonical_centers(const uint8_t* exponents, uint32_t count, uint32_t exponent_bits) {
  Distances distances = distances_of(exponents, count, 1, 255);
  bool crowded = true;
  if (exponent_bits == canonical::kOutlierBits &&
      distances.sum >= canonical::kFar * distances.count) {
    const uint32_t low = crowded_window(exponents, count);
    crowded = low != 0;
    if (crowded) {
      distances = distances_of(exponents, count, low, low + canonical::kWindow - 1);
    }
  }
  const auto center = [&](uint32_t eighths) {
    const uint32_t sum = 8 * distances.sum;
    const uint32_t less = eighths * distances.count;
    const uint32_t below_max = sum > less ? (sum - less) / (8 * distances.count) : 0;
    return static_cast<uint8_t>(distances.max + 1 - below_max);
  };
  return {center(canonical::kLq2Eighths), center(canonical::kLq3Eighths), crowded};
}

// Bytes of S1, S2 and the E bytes.
inline uint32_t lq2_escape_bytes(const uint8_t* exponents, uint32_t count, uint8_t center) {
  uint32_t first = 0;
  uint32_t second = 0;
  uint32_t bytes = 0;
  for (uint32_t i = 0; i < count; ++i) {
    const uint8_t v = distance(center, exponents[i]);
    if (Lq2::code(v) == kEscape) {
      ++first;
      if (Lq2::first(v) == Lq2::kFirstEscape) {
        ++second;
        bytes += Lq2::second(v, exponents[i]) == Lq2::kSecondEscape;
      }
    }
  }
  return bytes_of_bits(2 * first) + bytes_of_bits(4 * second) + bytes;
}

inline uint8_t* put_lq2_escapes(uint8_t* out, const uint8_t* exponents, uint32_t count,
                                uint8_t center) {
  const auto for_each_escape = [&](auto visit) {
    for (uint32_t i = 0; i < count; ++i) {
      const uint8_t v = distance(center, exponents[i]);
      if (Lq2::code(v) == kEscape) {
        visit(v, exponents[i]);
      }
    }
  };
  StreamWriter first(out);
  for_each_escape([&](uint8_t v, uint8_t) { first.put(Lq2::first(v), 2); });
  StreamWriter second(first.finish());
  for_each_escape([&](uint8_t v, uint8_t exponent) {
    if (Lq2::first(v) == Lq2::kFirstEscape) {
      second.put(Lq2::second(v, exponent), 4);
    }
  });
  out = second.finish();
  for_each_escape([&](uint8_t v, uint8_t exponent) {
    if (Lq2::first(v) == Lq2::kFirstEscape && Lq2::second(v, exponent) == Lq2::kSecondEscape) {
      *out++ = exponent;
    }
  });
  return out;
}

// Reads S1, S2 and the E bytes and writes all exponents. False if the payload ends before they do.
inline bool get_lq2_exponents(PayloadReader& payload, const uint8_t* codes, uint32_t count,
                              uint8_t center, uint8_t* exponents) {
  const auto escapes = static_cast<uint32_t>(std::count(codes, codes + count, kEscape));
  const uint8_t* first = payload.take_stream(escapes, 2);
  if (first == nullptr) {
    return false;
  }
  uint32_t seconds = 0;
  for (uint32_t i = 0; i < escapes; ++i) {
    seconds += stream_symbol(first, i, 2) == Lq2::kFirstEscape;
  }
  const uint8_t* second = payload.take_stream(seconds, 4);
  if (second == nullptr) {
    return false;
  }
  uint32_t explicit_bytes = 0;
  for (uint32_t i = 0; i < seconds; ++i) {
    explicit_bytes += stream_symbol(second, i, 4) == Lq2::kSecondEscape;
  }
  const uint8_t* bytes = payload.take(explicit_bytes);
  if (bytes == nullptr) {
    return false;
  }
  uint32_t next_first = 0;
  uint32_t next_second = 0;
  for (uint32_t i = 0; i < count; ++i) {
    if (codes[i] != kEscape) {
      exponents[i] = static_cast<uint8_t>(center - codes[i]);
      continue;
    }
    const uint32_t one = stream_symbol(first, next_first++, 2);
    if (one != Lq2::kFirstEscape) {
      exponents[i] = static_cast<uint8_t>(center - Lq2::distance_of_first(one));
      continue;
    }
    const uint32_t two = stream_symbol(second, next_second++, 4);
    exponents[i] = two == Lq2::kSecondEscape ? *bytes++
                   : two == Lq2::kSecondZero
                       ? uint8_t{0}
                       : static_cast<uint8_t>(center - Lq2::distance_of_second(two));
  }
  return true;
}

inline uint32_t lq3_escape_bytes(const uint8_t* exponents, uint32_t count, uint8_t center) {
  uint32_t first = 0;
  uint32_t bytes = 0;
  for (uint32_t i = 0; i < count; ++i) {
    const uint8_t v = distance(center, exponents[i]);
    if (Lq3::code(v) == kEscape) {
      ++first;
      bytes += Lq3::first(v, exponents[i]) == Lq3::kFirstEscape;
    }
  }
  return bytes_of_bits(4 * first) + bytes;
}

inline uint8_t* put_lq3_escapes(uint8_t* out, const uint8_t* exponents, uint32_t count,
                                uint8_t center) {
  const auto for_each_escape = [&](auto visit) {
    for (uint32_t i = 0; i < count; ++i) {
      const uint8_t v = distance(center, exponents[i]);
      if (Lq3::code(v) == kEscape) {
        visit(Lq3::first(v, exponents[i]), exponents[i]);
      }
    }
  };
  StreamWriter first(out);
  for_each_escape([&](uint32_t symbol, uint8_t) { first.put(symbol, 4); });
  out = first.finish();
  for_each_escape([&](uint32_t symbol, uint8_t exponent) {
    if (symbol == Lq3::kFirstEscape) {
      *out++ = exponent;
    }
  });
  return out;
}

inline bool get_lq3_exponents(PayloadReader& payload, const uint8_t* codes, uint32_t count,
                              uint8_t center, uint8_t* exponents) {
  const auto escapes = static_cast<uint32_t>(std::count(codes, codes + count, kEscape));
  const uint8_t* first = payload.take_stream(escapes, 4);
  if (first == nullptr) {
    return false;
  }
  uint32_t explicit_bytes = 0;
  for (uint32_t i = 0; i < escapes; ++i) {
    explicit_bytes += stream_symbol(first, i, 4) == Lq3::kFirstEscape;
  }
  const uint8_t* bytes = payload.take(explicit_bytes);
  if (bytes == nullptr) {
    return false;
  }
  uint32_t next_first = 0;
  for (uint32_t i = 0; i < count; ++i) {
    if (codes[i] != kEscape) {
      exponents[i] = static_cast<uint8_t>(center - codes[i]);
      continue;
    }
    const uint32_t one = stream_symbol(first, next_first++, 4);
    exponents[i] = one == Lq3::kFirstEscape ? *bytes++
                   : one == Lq3::kFirstZero
                       ? uint8_t{0}
                       : static_cast<uint8_t>(center - Lq3::distance_of_first(one));
  }
  return true;
}

}  // namespace memswap::cpu::scalar
