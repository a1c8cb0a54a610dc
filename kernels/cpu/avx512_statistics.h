// What a block's symbols E are like: statistics, centers, and the mode that docs/format.md
// section 5 wants.
#pragma once

#include "avx512_bytes.h"
#include "choice.h"

MEMSWAP_AVX512_BEGIN

namespace memswap::cpu::avx512 {
namespace {

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

inline uint32_t maximum_of(Vector bytes) {
  return 255 - minimum_of(_mm512_xor_si512(bytes, broadcast(255)));
}

inline Vector partial_sums(Vector bytes) { return _mm512_sad_epu8(bytes, _mm512_setzero_si512()); }
inline uint32_t total(Vector sums) { return static_cast<uint32_t>(_mm512_reduce_add_epi64(sums)); }

inline Range range_of(const Bytes& symbols) {
  Vector minimum = broadcast(255);
  Vector maximum = _mm512_setzero_si512();
  for (uint32_t i = 0; i < kVectors; ++i) {
    minimum = _mm512_min_epu8(minimum, symbols.vector[i]);
    maximum = _mm512_max_epu8(maximum, symbols.vector[i]);
  }
  return {minimum_of(minimum), maximum_of(maximum), 0};
}

// Eight times 31 fits into a byte.
inline Range range_of_short(const Bytes& symbols) {
  Vector minimum = broadcast(255);
  Vector maximum = _mm512_setzero_si512();
  Vector sum[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
  for (uint32_t i = 0; i < kVectors; ++i) {
    const Vector symbol = symbols.vector[i];
    minimum = _mm512_min_epu8(minimum, symbol);
    maximum = _mm512_max_epu8(maximum, symbol);
    sum[i / 8] = _mm512_add_epi8(sum[i / 8], symbol);
  }
  return {minimum_of(minimum), maximum_of(maximum),
          total(_mm512_add_epi64(partial_sums(sum[0]), partial_sums(sum[1])))};
}

// Eight times 31 fits into a byte.
template <bool kWithZeros>
inline Distances distances_of(const Bytes& symbols, uint32_t maximum) {
  const Vector top = broadcast(maximum);
  const Vector limit = broadcast(canonical::kClip);
  const Vector one = broadcast(1);
  Vector sums = _mm512_setzero_si512();
  Vector present = _mm512_setzero_si512();
  Vector lowest = broadcast(255);  // less 1, so that 0 is the highest
  for (uint32_t i = 0; i < kVectors; i += 8) {
    Vector sum = _mm512_setzero_si512();
    for (uint32_t j = i; j < i + 8; ++j) {
      const Vector value = symbols.vector[j];
      sum = _mm512_add_epi8(sum, _mm512_min_epu8(_mm512_sub_epi8(top, value), limit));
      if constexpr (kWithZeros) {
        present = _mm512_add_epi8(present, _mm512_min_epu8(value, one));
        lowest = _mm512_min_epu8(lowest, _mm512_sub_epi8(value, one));
      }
    }
    sums = _mm512_add_epi64(sums, partial_sums(sum));
  }
  if constexpr (!kWithZeros) {
    return {total(sums), frame::kBlockElements, 1};
  }
  const uint32_t count = total(partial_sums(present));
  const uint32_t of_zeros = (frame::kBlockElements - count) * distance_of_zero(maximum);
  return {total(sums) - of_zeros, count, minimum_of(lowest) + 1};
}

inline uint32_t count_nonzero(const Bytes& symbols) {
  const Vector one = broadcast(1);
  Vector present = _mm512_setzero_si512();
  for (const Vector& value : symbols.vector) {
    present = _mm512_add_epi8(present, _mm512_min_epu8(value, one));
  }
  return total(partial_sums(present));
}

inline Distances distances_of_short(const Bytes& symbols, const Range& range) {
  const uint32_t count = range.minimum > 0 ? frame::kBlockElements : count_nonzero(symbols);
  return {count * range.maximum - range.sum, count, 1};
}

// --- Centers -----------------------------------------------------------------------------------

// The samples of vector j are its lanes 2 j and 2 j + 33: `lane` from 30 - 2 j on has them.
struct SampleLanes {
  uint8_t lane[kLanes + 2 * (kVectors - 1)];
};
constexpr SampleLanes sample_lanes() {
  static_assert(canonical::kSampleStep == 33 && canonical::kSamples == 2 * kVectors);
  SampleLanes lanes{};
  lanes.lane[2 * (kVectors - 1)] = 255;
  lanes.lane[2 * (kVectors - 1) + 33] = 255;
  return lanes;
}
inline constexpr SampleLanes kSampleLanes = sample_lanes();

// See [Note: outliers] in memswap/canonical.h. The lowest symbol of the window that most of the
// sample is in; 0 if there is none.
inline uint32_t crowded_window(const Bytes& symbols, uint32_t vectors) {
  Vector samples = _mm512_setzero_si512();
  for (uint32_t j = 0; j < vectors; ++j) {
    const Vector chosen = load(kSampleLanes.lane + 2 * (kVectors - 1 - j));
    samples = _mm512_ternarylogic_epi64(samples, symbols.vector[j], chosen, 0xf8);  // a | (b & c)
  }
  const uint32_t count = count_bits(_mm512_test_epi8_mask(samples, samples));
  uint32_t median = 0;
  for (uint32_t bit = 128; bit >= canonical::kMedianStep; bit /= 2) {
    const __mmask64 above = _mm512_cmpge_epu8_mask(samples, broadcast(median + bit));
    median += 2 * count_bits(above) >= count ? bit : 0;
  }
  uint32_t low = median > canonical::kBelowMedian ? median - canonical::kBelowMedian : 1;
  low = low < canonical::kHighestWindow ? low : canonical::kHighestWindow;
  const __mmask64 inside = _mm512_cmplt_epu8_mask(_mm512_sub_epi8(samples, broadcast(low)),
                                                  broadcast(canonical::kWindow));
  return 2 * count_bits(inside) > count ? low : 0;
}

// Over the symbols in the window alone.
inline Crowd crowd_of(const Bytes& symbols, uint32_t vectors, uint32_t low) {
  const Vector lowest = broadcast(low);
  Vector highest = _mm512_setzero_si512();
  Vector sums = _mm512_setzero_si512();
  uint32_t count = 0;
  for (uint32_t j = 0; j < vectors; ++j) {
    const Vector above = _mm512_sub_epi8(symbols.vector[j], lowest);
    const __mmask64 inside = _mm512_cmplt_epu8_mask(above, broadcast(canonical::kWindow));
    const Vector counted = _mm512_maskz_mov_epi8(inside, above);
    highest = _mm512_max_epu8(highest, counted);
    sums = _mm512_add_epi64(sums, partial_sums(counted));
    count += count_bits(inside);
  }
  const uint32_t span = maximum_of(highest);
  return {low + span, {count * span - total(sums), count, low}};
}

// --- Sizes -------------------------------------------------------------------------------------

constexpr bool is_raw2(uint8_t v) { return v > 17 && v < 254; }
constexpr bool is_raw3(uint8_t v) { return v > 19 && v < 255; }

// How far the center of LQ3 may be above that of LQ2: 12 / 8 by section 5, rounded up or down.
inline constexpr uint32_t kCenterSteps = 3;

// What a symbol adds to two counts, to one of them 1 and to the other 16. By v + 4, v as LQ2 has
// it, kept below 64.
inline constexpr uint32_t kCostShift = 4;
struct Costs {
  Indices lq2;                // escapes, those that need S2
  Indices lq3[kCenterSteps];  // escapes, those that need a byte E unless it is 0
  Indices raw2;               // those that need a byte E unless it is 0
};
constexpr Costs costs() {
  Costs costs{};
  for (uint32_t i = 0; i < kLanes; ++i) {
    const auto v = static_cast<uint8_t>(i - kCostShift);
    costs.lq2.at[i] = static_cast<uint8_t>((v < 1 || v > 3 ? 1 : 0) + (v > 5 ? 16 : 0));
    costs.raw2.at[i] = is_raw2(v) ? 1 : 0;
    for (uint32_t step = 0; step < kCenterSteps; ++step) {
      const auto v3 = static_cast<uint8_t>(v + step);
      costs.lq3[step].at[i] =
          static_cast<uint8_t>((v3 < 1 || v3 > 7 ? 1 : 0) + (is_raw3(v3) ? 16 : 0));
    }
  }
  return costs;
}
inline constexpr Costs kCosts = costs();

constexpr Indices symbol_numbers() {
  Indices numbers{};
  for (uint32_t i = 0; i < kLanes; ++i) {
    numbers.at[i] = static_cast<uint8_t>(i);
  }
  return numbers;
}
inline constexpr Indices kSymbolNumbers = symbol_numbers();

struct Counts {
  uint32_t escapes2, deeper2, raw2;
  uint32_t escapes3, raw3;
};

// One table: escapes2 and deeper2. Two: those of LQ3, whose center is `step` above center2, as
// well. Three: raw2, too. The others are 0.
template <bool kShort, uint32_t kTables>
inline Counts count_costs(const Bytes& symbols, uint8_t center2, uint32_t step) {
  const Vector above = broadcast(static_cast<uint8_t>(center2 + kCostShift));
  const Vector last = broadcast(kLanes - 1);
  Vector table[3] = {load(kCosts.lq2.at), load(kCosts.lq3[step].at), load(kCosts.raw2.at)};
  if constexpr (kShort) {  // by the symbol itself
    const Vector index = _mm512_min_epu8(_mm512_sub_epi8(above, load(kSymbolNumbers.at)), last);
    for (uint32_t t = 0; t < kTables; ++t) {
      table[t] = _mm512_permutexvar_epi8(index, table[t]);
    }
  }
  // 8 of each count fit into a byte.
  Vector counts[2][kTables];
  for (uint32_t half = 0; half < 2; ++half) {
    for (uint32_t j = 0; j < 8; ++j) {
      Vector index = symbols.vector[8 * half + j];
      if constexpr (!kShort) {
        index = _mm512_min_epu8(_mm512_sub_epi8(above, index), last);
      }
      for (uint32_t t = 0; t < kTables; ++t) {
        const Vector cost = _mm512_permutexvar_epi8(index, table[t]);
        counts[half][t] = j == 0 ? cost : _mm512_add_epi8(counts[half][t], cost);
      }
    }
  }
  // Each 64 bits of the sums have 12 bits for a count of 1 and 12 for one of 16; the third table
  // has none of 16.
  const Vector low = broadcast(15);
  Vector sums = _mm512_setzero_si512();
  for (uint32_t t = 0; t < kTables; ++t) {
    const Vector ones =
        _mm512_add_epi8(_mm512_and_si512(counts[0][t], low), _mm512_and_si512(counts[1][t], low));
    sums = _mm512_add_epi64(sums, _mm512_slli_epi64(partial_sums(ones), 24 * t));
    if (t < 2) {
      const Vector eights = _mm512_avg_epu8(_mm512_andnot_si512(low, counts[0][t]),
                                            _mm512_andnot_si512(low, counts[1][t]));
      sums = _mm512_add_epi64(sums, _mm512_slli_epi64(partial_sums(eights), 24 * t + 9));
    }
  }
  const auto all = static_cast<uint64_t>(_mm512_reduce_add_epi64(sums));
  const auto field = [all](uint32_t at) { return static_cast<uint32_t>(all >> at) & 0xfff; };
  return {field(0), field(12), field(48), field(24), field(36)};
}

// Payload bytes, before they are rounded to units; without LQ3, the least that it may have.
struct Sizes {
  uint32_t lq2, lq3;
};

template <bool kShort, bool kWithLq3>
inline Sizes sizes_of(const Bytes& symbols, uint32_t maximum, uint32_t lowest, uint32_t zeros,
                      uint8_t center2, uint32_t step) {
  const auto center3 = static_cast<uint8_t>(center2 + step);
  const bool no_raw = maximum <= center2 + 2u && center2 <= lowest + 17 &&
                      (!kWithLq3 || (maximum <= center3 + 1u && center3 <= lowest + 19));
  Counts counts;
  if (no_raw) [[likely]] {
    counts = count_costs<kShort, kWithLq3 ? 2 : 1>(symbols, center2, step);
    counts.raw3 = 0;
  } else {
    counts = count_costs<kShort, 3>(symbols, center2, step);
    // The v of 0 is the center.
    counts.raw2 -= is_raw2(center2) ? zeros : 0;
    counts.raw3 -= is_raw3(center3) ? zeros : 0;
  }
  return {bytes_of_bits(2 * counts.escapes2) + bytes_of_bits(4 * counts.deeper2) + counts.raw2,
          kPlane1Bytes + (kWithLq3 ? bytes_of_bits(4 * counts.escapes3) + counts.raw3 : 0)};
}

// --- Choice ------------------------------------------------------------------------------------

template <uint32_t kSymbolBits>
inline Choice choose_fast(const Bytes& symbols, const Range& range, uint8_t center) {
  Choice choice{};
  choice.center = choice.center2 = center;
  choice.nonzero = range.minimum > 0 ? frame::kBlockElements : count_nonzero(symbols);
  const uint32_t fixed = units_of_bytes(size_of_fixed(kSymbolBits));
  const uint32_t lowest = range.minimum > 0 ? range.minimum : 1;
  const Sizes sizes = sizes_of<is_short(kSymbolBits), false>(
      symbols, range.maximum, lowest, frame::kBlockElements - choice.nonzero, center, 0);
  const uint32_t lq2 = units_of_bytes(sizes.lq2);
  choice.mode = lq2 < fixed ? uint32_t{frame::kLq2} : frame::kFw2 + kSymbolBits - 2;
  choice.units = lq2 < fixed ? lq2 : fixed;
  return choice;
}

// `guess`: the mode of the block before, or kNoGuess ([Note: guessed modes]).
template <uint32_t kSymbolBits>
inline Choice choose_canonical(const Bytes& symbols, const Range& range, const Distances& distances,
                               uint32_t guess) {
  constexpr bool kShort = is_short(kSymbolBits);
  const uint32_t spread_bits =
      32 - static_cast<uint32_t>(_lzcnt_u32(range.maximum - range.minimum));
  const uint32_t bits = spread_bits < 2 ? 2 : spread_bits;
  Choice choice{};
  choice.nonzero = distances.count;
  choice.mode = frame::kFw2 + bits - 2;
  choice.center = static_cast<uint8_t>(range.maximum);
  choice.units = units_of_bytes(size_of_fixed(bits));
  Crowd crowd{range.maximum, distances};
  if (kSymbolBits == canonical::kOutlierBits && may_have_outliers(distances)) {
    const uint32_t low = crowded_window(symbols, kVectors);
    if (low == 0) {
      choice.center2 = center_of(crowd, 7);
      return choice;
    }
    crowd = crowd_of(symbols, kVectors, low);
  }
  choice.center2 = center_of(crowd, 7);
  if (choice.units == 0) {
    return choice;
  }
  const uint32_t fixed = choice.units;
  if (guess == frame::kLq2) {
    choice.mode = frame::kLq2;
    choice.center = choice.center2;
    choice.units = fixed <= kLq3LeastUnits ? fixed - 1 : kLq3LeastUnits;
    return choice;
  }
  const uint8_t center3 = center_of(crowd, 19);
  if (guess == frame::kLq3) {
    const Counts counts = count_costs<kShort, 1>(symbols, choice.center2, 0);
    // At least: the bytes E are left out.
    const uint32_t lq2 =
        units_of_bytes(bytes_of_bits(2 * counts.escapes2) + bytes_of_bits(4 * counts.deeper2));
    const uint32_t others = lq2 < fixed ? lq2 : fixed;
    if (others > kLq3LeastUnits) {
      choice.mode = frame::kLq3;
      choice.center = center3;
      choice.units = others - 1;
      return choice;
    }
  }
  const uint32_t lowest = range.minimum > distances.lowest ? range.minimum : distances.lowest;
  const uint32_t zeros = frame::kBlockElements - distances.count;
  const uint32_t lq2 = units_of_bytes(
      sizes_of<kShort, false>(symbols, range.maximum, lowest, zeros, choice.center2, 0).lq2);
  if (lq2 < fixed) {
    choice.mode = frame::kLq2;
    choice.center = choice.center2;
    choice.units = lq2;
  }
  if (choice.units <= kLq3LeastUnits) {
    return choice;
  }
  const auto step = static_cast<uint8_t>(center3 - choice.center2);
  const uint32_t lq3 = units_of_bytes(
      sizes_of<kShort, true>(symbols, range.maximum, lowest, zeros, choice.center2, step).lq3);
  if (lq3 < choice.units) {
    choice.mode = frame::kLq3;
    choice.center = center3;
    choice.units = lq3;
  }
  return choice;
}

}  // namespace
}  // namespace memswap::cpu::avx512

MEMSWAP_AVX512_END
