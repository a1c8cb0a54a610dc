// What a block's symbols E are like: statistics, centers, and the mode that docs/format.md
// section 5 wants.
#pragma once

#include "choice.h"
#include "vector_bytes.h"

MEMSWAP_VECTOR_BEGIN

namespace memswap::cpu::MEMSWAP_ISA {
namespace {

// [Note: small results]
// GCC returns a structure of two or three numbers of 4 bytes by writing them to the stack and
// loading 8 bytes of it at once, which has to wait until both stores have reached the cache: some
// 20 cycles for each block, and nothing behind it retires. So what returns such a structure is
// inlined always, or returns a single number.

// Found while symbols are made. Of short symbols also the sum: a byte holds that of kGroup
// of them, and end_group is called after as many or fewer.
template <uint32_t kSymbolBits>
class RangeFinder {
 public:
  static constexpr bool kShort = is_short(kSymbolBits);
  static constexpr uint32_t kGroup = 255 / ((1u << kSymbolBits) - 1);

  RangeFinder() : minimum_(broadcast(255)), maximum_{}, group_{}, sums_{} {}

  void add(Vector symbols) {
    minimum_ = minimum(minimum_, symbols);
    maximum_ = maximum(maximum_, symbols);
    if constexpr (kShort) {
      group_ += symbols;
    }
  }
  void end_group() {
    sums_ = add_bytes(sums_, group_);
    group_ = Vector{};
  }
  // See [Note: small results].
  [[gnu::always_inline]] Range range() const {
    return {lowest_of(minimum_), highest_of(maximum_), kShort ? total(sums_) : 0};
  }

 private:
  Vector minimum_, maximum_, group_;
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

// Of a sparse block's symbols, and zeros behind them.
template <uint32_t kSymbolBits>
[[gnu::always_inline]] inline Crowd crowd_of_survivors(const Bytes& symbols, uint32_t vectors,
                                                       uint32_t maximum) {
  const Crowd all{maximum, distances_of<true>(symbols, maximum, vectors)};
  if (kSymbolBits == canonical::kOutlierBits && may_have_outliers(all.distances)) {
    const uint32_t low = crowded_window(symbols, vectors);
    if (low != 0) {
      return crowd_of(symbols, vectors, low);
    }
  }
  return all;
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

// Payload bytes of the streams behind L0 and LQ3's plane, before they are rounded to units. Of
// bytes E only if kWithRaw: else there are none, or a bound is asked for.
template <uint32_t kSymbolBits, Code kCode, bool kWithRaw>
inline uint32_t count_bytes(const Bytes& symbols, uint8_t center) {
  constexpr uint32_t kGroup = 8;  // as many of each count fit into half a byte
  constexpr bool kLq2 = kCode == Code::kLq2;
  constexpr uint8_t kLeastRaw = kLq2 ? 18 : 20, kMostRaw = kLq2 ? 253 : 254;  // v of bytes E
  const Vector centers = broadcast(center);
  const Vector table = repeat16(kLq2 ? kCosts.lq2 : kCosts.lq3);
  const Vector raw_span = broadcast(kMostRaw - kLeastRaw);
  const auto costs_of = of_symbols<kSymbolBits>(
      [=](Vector symbols) { return look_up(table, minimum(centers - symbols, broadcast(15))); });
  Vector escapes{}, deeper{}, raw{};
  for (uint32_t i = 0; i < kVectors; i += kGroup) {
    Vector both{};
    for (uint32_t j = i; j < i + kGroup; ++j) {
      both += costs_of(symbols.vector[j]);
      if constexpr (kWithRaw) {
        const Vector value = centers - symbols.vector[j];
        const Lanes coded = less(raw_span, value - kLeastRaw) | equal(symbols.vector[j], Vector{});
        raw += only(~coded, broadcast(1));
      }
    }
    escapes += kLq2 ? both & 15 : both;
    if constexpr (kLq2) {
      deeper += move_bits<4, 0, 4>(both);
    }
  }
  const uint32_t raw_bytes = kWithRaw ? sum_of(raw) : 0;
  return kLq2 ? bytes_of_bits(2 * sum_of(escapes)) + bytes_of_bits(4 * sum_of(deeper)) + raw_bytes
              : bytes_of_bits(4 * sum_of(escapes)) + raw_bytes;
}

// The lowest symbol that is not 0, and the highest: what is needed to know that no byte E is.
struct Extent {
  uint32_t lowest, highest;
};

// Payload bytes, before they are rounded to units.
template <uint32_t kSymbolBits>
inline uint32_t size_of_lq2(const Bytes& symbols, uint8_t center, const Extent& extent) {
  const bool no_raw = extent.highest <= center + 2u && center <= extent.lowest + 17;
  return no_raw ? count_bytes<kSymbolBits, Code::kLq2, false>(symbols, center)
                : count_bytes<kSymbolBits, Code::kLq2, true>(symbols, center);
}

template <uint32_t kSymbolBits>
inline uint32_t size_of_lq3(const Bytes& symbols, uint8_t center, const Extent& extent) {
  const bool no_raw = extent.highest <= center + 1u && center <= extent.lowest + 19;
  return kPlane1Bytes + (no_raw ? count_bytes<kSymbolBits, Code::kLq3, false>(symbols, center)
                                : count_bytes<kSymbolBits, Code::kLq3, true>(symbols, center));
}

// --- Choice ------------------------------------------------------------------------------------

template <uint32_t kSymbolBits>
inline Choice choose_fast(const Bytes& symbols, const Range& range, uint8_t center) {
  Choice choice{};
  choice.center = choice.center2 = center;
  choice.nonzero = range.minimum > 0 ? frame::kBlockElements : count_nonzero(symbols);
  const uint32_t fixed = units_of_bytes(size_of_fixed(kSymbolBits));
  const uint32_t lowest = range.minimum > 0 ? range.minimum : 1;
  const uint32_t lq2 =
      units_of_bytes(size_of_lq2<kSymbolBits>(symbols, center, {lowest, range.maximum}));
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
    const uint32_t lq2 =
        units_of_bytes(count_bytes<kSymbolBits, Code::kLq2, false>(symbols, choice.center2));
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
  const uint32_t lq2 = units_of_bytes(size_of_lq2<kSymbolBits>(symbols, choice.center2, extent));
  if (lq2 < fixed) {
    choice.mode = frame::kLq2;
    choice.center = choice.center2;
    choice.units = lq2;
  }
  if (choice.units <= kLq3LeastUnits) {
    return choice;
  }
  const uint32_t lq3 = units_of_bytes(size_of_lq3<kSymbolBits>(symbols, center3, extent));
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
