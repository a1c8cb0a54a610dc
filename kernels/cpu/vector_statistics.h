// What a block's symbols E are like: statistics, centers, and the mode that docs/format.md
// section 5 wants.
#pragma once

#include "choice.h"
#include "vector_bytes.h"

MEMSWAP_VECTOR_BEGIN

namespace memswap::cpu::MEMSWAP_ISA {
namespace {

// Found while symbols are made.
template <bool kShort>
class RangeFinder {
 public:
  RangeFinder() : minimum_(broadcast(255)), maximum_{}, sums_{} {}

  void add(Vector symbols) {
    minimum_ = minimum(minimum_, symbols);
    maximum_ = maximum(maximum_, symbols);
    if constexpr (kShort) {
      sums_ = add_bytes(sums_, symbols);
    }
  }
  Range range() const { return {lowest_of(minimum_), highest_of(maximum_), total(sums_)}; }

 private:
  Vector minimum_, maximum_;
  Sums sums_;
};

// Of the first `vectors` vectors, in which there are zeros only if kWithZeros.
template <bool kWithZeros>
inline Distances distances_of(const Bytes& symbols, uint32_t highest, uint32_t vectors = kVectors) {
  constexpr uint32_t kGroup = 8;  // as many clipped distances fit into a byte
  static_assert(kGroup * canonical::kClip <= 255 && kVectors <= 255);
  const Vector top = broadcast(highest);
  const Vector limit = broadcast(canonical::kClip);
  Sums sums{};
  Vector present{};
  Vector lowest = broadcast(255);  // less 1, so that 0 is the highest
  for (uint32_t i = 0; i < vectors; i += kGroup) {
    Vector group{};
    const uint32_t behind = vectors - i < kGroup ? vectors : i + kGroup;
    for (uint32_t j = i; j < behind; ++j) {
      const Vector symbol = symbols.vector[j];
      group += minimum(top - symbol, limit);
      if constexpr (kWithZeros) {
        present += minimum(symbol, broadcast(1));
        lowest = minimum(lowest, symbol - 1);
      }
    }
    sums = add_bytes(sums, group);
  }
  const uint32_t lanes = vectors * kLanes;
  if constexpr (!kWithZeros) {
    return {total(sums), lanes, 1};
  }
  const uint32_t count = sum_of(present);
  return {total(sums) - (lanes - count) * distance_of_zero(highest), count, lowest_of(lowest) + 1};
}

inline uint32_t count_nonzero(const Bytes& symbols) {
  Vector present{};
  for (const Vector& symbol : symbols.vector) {
    present += minimum(symbol, broadcast(1));
  }
  return sum_of(present);
}

inline Distances distances_of_short(const Bytes& symbols, const Range& range) {
  const uint32_t count = range.minimum > 0 ? frame::kBlockElements : count_nonzero(symbols);
  return {count * range.maximum - range.sum, count, 1};
}

// --- Centers -----------------------------------------------------------------------------------

// See [Note: outliers] in memswap/canonical.h. The lowest symbol of the window that most of the
// sample is in; 0 if there is none.
inline uint32_t crowded_window(const Bytes& symbols, uint32_t vectors) {
  const auto* row = reinterpret_cast<const uint8_t*>(symbols.vector);
  // Whole vectors; missing samples are 0.
  alignas(kLanes) uint8_t samples[canonical::kSamples < kLanes ? kLanes : canonical::kSamples]{};
  for (uint32_t i = 0; i < canonical::kSamples; ++i) {
    if (canonical::kSampleStep * i < vectors * kLanes) {
      samples[i] = row[canonical::kSampleStep * i];
    }
  }
  const auto count_samples = [&](uint32_t low, uint32_t span) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < canonical::kSamples; i += kLanes) {
      count += count_of(mask_of(~less(broadcast(span), load(samples + i) - broadcast(low))));
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

// Over the symbols in the window alone.
inline Crowd crowd_of(const Bytes& symbols, uint32_t vectors, uint32_t low) {
  const Vector lowest = broadcast(low);
  Vector highest{};
  Sums sums{}, present{};
  for (uint32_t i = 0; i < vectors; ++i) {
    const Vector above = symbols.vector[i] - lowest;
    const Lanes inside = less(above, broadcast(canonical::kWindow));
    const Vector counted = only(inside, above);
    highest = maximum(highest, counted);
    sums = add_bytes(sums, counted);
    present = add_bytes(present, only(inside, broadcast(1)));
  }
  const uint32_t span = highest_of(highest);
  const uint32_t count = total(present);
  return {low + span, {count * span - total(sums), count, low}};
}

// --- Sizes -------------------------------------------------------------------------------------

// What follows knows which v need a byte E: 18 to 253 in LQ2, 20 to 254 in LQ3.
static_assert(frame::kLq2Nibbles.is(6, 255, 254) && frame::kLq3Nibbles.is(8, 0, 255));

// By v, kept below 16: 1 for an escape, and 16 for one of LQ2 that needs S2.
struct Costs {
  alignas(16) uint8_t lq2[16];
  alignas(16) uint8_t lq3[16];
};
constexpr Costs costs() {
  Costs costs{};
  for (uint32_t v = 0; v < 16; ++v) {
    costs.lq2[v] = static_cast<uint8_t>((v < 1 || v > 3 ? 1 : 0) + (v > 5 ? 16 : 0));
    costs.lq3[v] = v < 1 || v > 7 ? 1 : 0;
  }
  return costs;
}
inline constexpr Costs kCosts = costs();

struct Counts {
  uint32_t escapes, deeper;
  uint32_t raw;  // those that need a byte E
};

// `least_raw`, `most_raw`: of the v that need a byte E.
template <bool kWithRaw>
inline Counts count_costs(const Bytes& symbols, uint8_t center, const uint8_t* costs,
                          uint8_t least_raw, uint8_t most_raw) {
  constexpr uint32_t kGroup = 8;  // as many of each count fit into half a byte
  const Vector centers = broadcast(center);
  const Vector table = repeat16(costs);
  const Vector raw_span = broadcast(most_raw - least_raw);
  Vector escapes{}, deeper{}, raw{};
  for (uint32_t i = 0; i < kVectors; i += kGroup) {
    Vector both{};
    for (uint32_t j = i; j < i + kGroup; ++j) {
      const Vector value = centers - symbols.vector[j];
      both += look_up(table, minimum(value, broadcast(15)));
      if constexpr (kWithRaw) {
        const Lanes coded = less(raw_span, value - least_raw) | equal(symbols.vector[j], Vector{});
        raw += only(~coded, broadcast(1));
      }
    }
    escapes += both & 15;
    deeper += move_bits<4, 0, 4>(both);
  }
  return {sum_of(escapes), sum_of(deeper), kWithRaw ? sum_of(raw) : 0};
}

// The lowest symbol that is not 0, and the highest: what is needed to know that no byte E is.
struct Extent {
  uint32_t lowest, highest;
};

// Payload bytes, before they are rounded to units.
inline uint32_t size_of_lq2(const Bytes& symbols, uint8_t center, const Extent& extent) {
  const bool no_raw = extent.highest <= center + 2u && center <= extent.lowest + 17;
  const Counts counts = no_raw ? count_costs<false>(symbols, center, kCosts.lq2, 18, 253)
                               : count_costs<true>(symbols, center, kCosts.lq2, 18, 253);
  return bytes_of_bits(2 * counts.escapes) + bytes_of_bits(4 * counts.deeper) + counts.raw;
}

inline uint32_t size_of_lq3(const Bytes& symbols, uint8_t center, const Extent& extent) {
  const bool no_raw = extent.highest <= center + 1u && center <= extent.lowest + 19;
  const Counts counts = no_raw ? count_costs<false>(symbols, center, kCosts.lq3, 20, 254)
                               : count_costs<true>(symbols, center, kCosts.lq3, 20, 254);
  return kPlane1Bytes + bytes_of_bits(4 * counts.escapes) + counts.raw;
}

// --- Choice ------------------------------------------------------------------------------------

template <uint32_t kSymbolBits>
inline Choice choose_fast(const Bytes& symbols, const Range& range, uint8_t center) {
  Choice choice{};
  choice.center = choice.center2 = center;
  choice.nonzero = range.minimum > 0 ? frame::kBlockElements : count_nonzero(symbols);
  const uint32_t fixed = units_of_bytes(size_of_fixed(kSymbolBits));
  const uint32_t lowest = range.minimum > 0 ? range.minimum : 1;
  const uint32_t lq2 = units_of_bytes(size_of_lq2(symbols, center, {lowest, range.maximum}));
  choice.mode = lq2 < fixed ? uint32_t{frame::kLq2} : frame::kFw2 + kSymbolBits - 2;
  choice.units = lq2 < fixed ? lq2 : fixed;
  return choice;
}

// `guess`: the mode of the block before, or kNoGuess.
template <uint32_t kSymbolBits>
inline Choice choose_canonical(const Bytes& symbols, const Range& range, const Distances& distances,
                               uint32_t guess) {
  const uint32_t spread = range.maximum - range.minimum;
  const uint32_t bits = spread < 4 ? 2 : 32 - static_cast<uint32_t>(__builtin_clz(spread));
  const uint32_t fixed = units_of_bytes(size_of_fixed(bits));
  Choice choice{};
  choice.nonzero = distances.count;
  choice.mode = frame::kFw2 + bits - 2;
  choice.center = static_cast<uint8_t>(range.maximum);
  choice.units = fixed;
  Crowd crowd{range.maximum, distances};
  if (kSymbolBits == canonical::kOutlierBits && may_have_outliers(distances)) {
    const uint32_t low = crowded_window(symbols, kVectors);
    if (low == 0) {
      choice.center2 = center_of(crowd, canonical::kLq2Eighths);
      return choice;
    }
    crowd = crowd_of(symbols, kVectors, low);
  }
  choice.center2 = center_of(crowd, canonical::kLq2Eighths);
  if (fixed == 0) {
    return choice;
  }
  if (guess == frame::kLq2) {
    choice.mode = frame::kLq2;
    choice.center = choice.center2;
    choice.units = fixed <= kLq3LeastUnits ? fixed - 1 : kLq3LeastUnits;
    return choice;
  }
  const uint8_t center3 = center_of(crowd, canonical::kLq3Eighths);
  if (guess == frame::kLq3) {
    // At least: the bytes E are left out.
    const Counts counts = count_costs<false>(symbols, choice.center2, kCosts.lq2, 0, 0);
    const uint32_t lq2 =
        units_of_bytes(bytes_of_bits(2 * counts.escapes) + bytes_of_bits(4 * counts.deeper));
    const uint32_t others = lq2 < fixed ? lq2 : fixed;
    if (others > kLq3LeastUnits) {
      choice.mode = frame::kLq3;
      choice.center = center3;
      choice.units = others - 1;
      return choice;
    }
  }
  const Extent extent{range.minimum > distances.lowest ? range.minimum : distances.lowest,
                      range.maximum};
  const uint32_t lq2 = units_of_bytes(size_of_lq2(symbols, choice.center2, extent));
  if (lq2 < fixed) {
    choice.mode = frame::kLq2;
    choice.center = choice.center2;
    choice.units = lq2;
  }
  if (choice.units <= kLq3LeastUnits) {
    return choice;
  }
  const uint32_t lq3 = units_of_bytes(size_of_lq3(symbols, center3, extent));
  if (lq3 < choice.units) {
    choice.mode = frame::kLq3;
    choice.center = center3;
    choice.units = lq3;
  }
  return choice;
}

}  // namespace
}  // namespace memswap::cpu::MEMSWAP_ISA

MEMSWAP_VECTOR_END
