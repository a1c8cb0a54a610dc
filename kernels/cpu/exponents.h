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

constexpr uint32_t lq2_code(uint8_t v) { return v >= 1 && v <= 3 ? v : kEscape; }
constexpr uint32_t lq3_code(uint8_t v) { return v >= 1 && v <= 7 ? v : kEscape; }

// S1 of LQ2, 2 bits.
inline constexpr uint32_t kDeeper = 3;  // S2 has more
constexpr uint32_t lq2_first(uint8_t v) { return v == 0 ? 0 : v == 4 ? 1 : v == 5 ? 2 : kDeeper; }
constexpr uint8_t distance_of_first(uint32_t symbol) {
  return static_cast<uint8_t>(symbol == 0 ? 0 : symbol + 3);
}

// S2 of LQ2 and S1 of LQ3, 4 bits.
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

// The exponents whose distances are chosen, in a row. Returns how many.
template <typename Chosen>
uint32_t choose(uint8_t* row, const uint8_t* exponents, uint32_t count, uint8_t center,
                Chosen chosen) {
  uint32_t chosen_count = 0;
  for (uint32_t i = 0; i < count; ++i) {
    if (chosen(distance(center, exponents[i]))) {
      row[chosen_count++] = exponents[i];
    }
  }
  return chosen_count;
}

// A nibble for each exponent, then a byte E for each kByteNibble. Returns the end.
inline uint8_t* put_nibbles(uint8_t* out, const frame::NibbleCode& code, const uint8_t* exponents,
                            uint32_t count, uint8_t center) {
  StreamWriter nibbles(out);
  uint8_t* bytes = out + bytes_of_bits(4 * count);
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t nibble = nibble_of(code, distance(center, exponents[i]), exponents[i]);
    nibbles.put(nibble, 4);
    if (nibble == kByteNibble) {
      *bytes++ = exponents[i];
    }
  }
  nibbles.finish();
  return bytes;
}

// The reverse. False if the payload ends before they do.
inline bool get_nibbles(PayloadReader& payload, const frame::NibbleCode& code, uint32_t count,
                        uint8_t center, uint8_t* exponents) {
  const uint8_t* nibbles = payload.take_stream(count, 4);
  if (nibbles == nullptr) {
    return false;
  }
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t nibble = stream_symbol(nibbles, i, 4);
    if (nibble == kByteNibble) {
      const uint8_t* byte = payload.take(1);
      if (byte == nullptr) {
        return false;
      }
      exponents[i] = *byte;
    } else {
      exponents[i] =
          nibble == kZeroNibble ? uint8_t{0} : distance(center, distance_of_nibble(code, nibble));
    }
  }
  return true;
}

// What these write at most: all symbols escape, and escape again.
inline constexpr uint32_t kMaxEscapeBytes = kElements / 8 * (2 + 4 + 8);

// S1, S2 and the E bytes of LQ2. Returns the end.
inline uint8_t* put_lq2_escapes(uint8_t* out, const uint8_t* exponents, uint32_t count,
                                uint8_t center) {
  uint8_t escapes[kElements], deeper[kElements];
  const uint32_t escape_count =
      choose(escapes, exponents, count, center, [](uint8_t v) { return lq2_code(v) == kEscape; });
  const uint32_t deeper_count = choose(deeper, escapes, escape_count, center,
                                       [](uint8_t v) { return lq2_first(v) == kDeeper; });
  StreamWriter first(out);
  for (uint32_t i = 0; i < escape_count; ++i) {
    first.put(lq2_first(distance(center, escapes[i])), 2);
  }
  return put_nibbles(first.finish(), frame::kLq2Nibbles, deeper, deeper_count, center);
}

inline uint32_t lq2_escape_bytes(const uint8_t* exponents, uint32_t count, uint8_t center) {
  uint8_t escapes[kMaxEscapeBytes];
  return static_cast<uint32_t>(put_lq2_escapes(escapes, exponents, count, center) - escapes);
}

// Reads them and writes all exponents. False if the payload ends before they do.
inline bool get_lq2_exponents(PayloadReader& payload, const uint8_t* codes, uint32_t count,
                              uint8_t center, uint8_t* exponents) {
  const auto escapes = static_cast<uint32_t>(std::count(codes, codes + count, kEscape));
  const uint8_t* first = payload.take_stream(escapes, 2);
  if (first == nullptr) {
    return false;
  }
  uint32_t deeper_count = 0;
  for (uint32_t i = 0; i < escapes; ++i) {
    deeper_count += stream_symbol(first, i, 2) == kDeeper;
  }
  uint8_t deeper[kElements];
  if (!get_nibbles(payload, frame::kLq2Nibbles, deeper_count, center, deeper)) {
    return false;
  }
  uint32_t next_first = 0, next_deeper = 0;
  for (uint32_t i = 0; i < count; ++i) {
    if (codes[i] != kEscape) {
      exponents[i] = distance(center, codes[i]);
      continue;
    }
    const uint32_t one = stream_symbol(first, next_first++, 2);
    exponents[i] =
        one == kDeeper ? deeper[next_deeper++] : distance(center, distance_of_first(one));
  }
  return true;
}

// The same of LQ3.
inline uint8_t* put_lq3_escapes(uint8_t* out, const uint8_t* exponents, uint32_t count,
                                uint8_t center) {
  uint8_t escapes[kElements];
  const uint32_t escape_count =
      choose(escapes, exponents, count, center, [](uint8_t v) { return lq3_code(v) == kEscape; });
  return put_nibbles(out, frame::kLq3Nibbles, escapes, escape_count, center);
}

inline uint32_t lq3_escape_bytes(const uint8_t* exponents, uint32_t count, uint8_t center) {
  uint8_t escapes[kMaxEscapeBytes];
  return static_cast<uint32_t>(put_lq3_escapes(escapes, exponents, count, center) - escapes);
}

inline bool get_lq3_exponents(PayloadReader& payload, const uint8_t* codes, uint32_t count,
                              uint8_t center, uint8_t* exponents) {
  const auto escape_count = static_cast<uint32_t>(std::count(codes, codes + count, kEscape));
  uint8_t escapes[kElements];
  if (!get_nibbles(payload, frame::kLq3Nibbles, escape_count, center, escapes)) {
    return false;
  }
  uint32_t next_escape = 0;
  for (uint32_t i = 0; i < count; ++i) {
    exponents[i] = codes[i] != kEscape ? distance(center, codes[i]) : escapes[next_escape++];
  }
  return true;
}

}  // namespace memswap::cpu::scalar
