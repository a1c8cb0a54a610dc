// What a block's symbols E are like: statistics, centers, and the mode that docs/format.md
// section 5 wants.
#pragma once

#include "avx512_bytes.h"
#include "memswap/canonical.h"

MEMSWAP_AVX512_BEGIN

namespace memswap::cpu::avx512 {
namespace {

struct Range {
  uint32_t minimum, maximum;
};

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

inline Range range_of(const Bytes& symbols, uint32_t vectors) {
  Vector minimum = broadcast(255);
  Vector maximum = _mm512_setzero_si512();
  for (uint32_t i = 0; i < vectors; ++i) {
    minimum = _mm512_min_epu8(minimum, symbols.vector[i]);
    maximum = _mm512_max_epu8(maximum, symbols.vector[i]);
  }
  return {minimum_of(minimum), maximum_of(maximum)};
}

inline Vector partial_sums(Vector bytes) { return _mm512_sad_epu8(bytes, _mm512_setzero_si512()); }
inline uint32_t total(Vector sums) { return static_cast<uint32_t>(_mm512_reduce_add_epi64(sums)); }

// Of the symbols that are not 0.
struct Distances {
  uint32_t sum;  // of min(maximum - E, 31)
  uint32_t count;
};

// Eight times 31 fits into a byte.
template <bool kWithZeros>
inline Distances distances_of(const Bytes& symbols, uint32_t vectors, uint32_t maximum) {
  const Vector top = broadcast(maximum);
  const Vector limit = broadcast(canonical::kClip);
  const Vector one = broadcast(1);
  Vector sums = _mm512_setzero_si512();
  Vector present = _mm512_setzero_si512();
  for (uint32_t i = 0; i < vectors; i += 8) {
    const uint32_t end = i + 8 < vectors ? i + 8 : vectors;
    Vector sum = _mm512_setzero_si512();
    for (uint32_t j = i; j < end; ++j) {
      const Vector value = symbols.vector[j];
      const Vector distance = _mm512_sub_epi8(top, value);
      if constexpr (kWithZeros) {
        const __mmask64 nonzero = _mm512_test_epi8_mask(value, value);
        sum = _mm512_add_epi8(sum, _mm512_maskz_min_epu8(nonzero, distance, limit));
        present = _mm512_add_epi8(present, _mm512_min_epu8(value, one));
      } else {
        sum = _mm512_add_epi8(sum, _mm512_min_epu8(distance, limit));
      }
    }
    sums = _mm512_add_epi64(sums, partial_sums(sum));
  }
  return {total(sums), kWithZeros ? total(partial_sums(present)) : vectors * kLanes};
}

inline uint32_t count_nonzero(const Bytes& symbols) {
  const Vector one = broadcast(1);
  Vector present = _mm512_setzero_si512();
  for (const Vector& value : symbols.vector) {
    present = _mm512_add_epi8(present, _mm512_min_epu8(value, one));
  }
  return total(partial_sums(present));
}

// --- Centers -----------------------------------------------------------------------------------

// What a center is computed from.
struct Crowd {
  uint32_t maximum;
  Distances distances;
};

// Section 5: the center of a code whose middle is `eighths` below the maximum.
inline uint8_t center_of(const Crowd& crowd, uint32_t eighths) {
  const uint32_t count = crowd.distances.count == 0 ? 1 : crowd.distances.count;
  const uint32_t sum = 8 * crowd.distances.sum;
  const uint32_t quotient = sum > eighths * count ? (sum - eighths * count) / (8 * count) : 0;
  return static_cast<uint8_t>(crowd.maximum + 1 - quotient);
}

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
  return {low + span, {count * span - total(sums), count}};
}

inline bool may_have_outliers(const Distances& distances) {
  return distances.sum >= canonical::kFar * distances.count && distances.count != 0;
}

// --- Sizes -------------------------------------------------------------------------------------

// How many symbols are not 0 and have their v = center - E outside of -below..last.
inline uint32_t count_raw(const Bytes& symbols, const Range& range, uint8_t center, uint32_t below,
                          uint32_t last) {
  if (range.maximum <= center + below && center <= range.minimum + last) {
    return 0;  // as in most blocks
  }
  const Vector above = broadcast(static_cast<uint8_t>(center + below));
  const Vector coded = broadcast(below + last);
  uint32_t raw = 0;
  for (const Vector& symbol : symbols.vector) {
    raw += count_bits(_mm512_mask_cmpgt_epu8_mask(_mm512_test_epi8_mask(symbol, symbol),
                                                  _mm512_sub_epi8(above, symbol), coded));
  }
  return raw;
}

// By v + 2, kept below 64: 1 if v is an escape of LQ2, and 16 if S1 has no symbol of its own for
// it.
constexpr Indices lq2_costs() {
  Indices costs{};
  for (uint32_t i = 0; i < kLanes; ++i) {
    const auto v = static_cast<uint8_t>(i - 2);
    costs.at[i] = static_cast<uint8_t>((v < 1 || v > 3 ? 1 : 0) + (v > 5 ? 16 : 0));
  }
  return costs;
}

inline constexpr Indices kLq2Costs = lq2_costs();

// Payload bytes of LQ2 over `symbols`, before they are rounded to units.
inline uint32_t size_of_lq2(const Bytes& symbols, const Range& range, uint8_t center) {
  const Vector above = broadcast(static_cast<uint8_t>(center + 2u));
  const Vector costs = load(kLq2Costs.at);
  const Vector low = broadcast(15);
  Vector sums = _mm512_setzero_si512();
  for (uint32_t i = 0; i < kVectors; i += 8) {
    Vector counts = _mm512_setzero_si512();
    for (uint32_t j = i; j < i + 8; ++j) {
      const Vector index =
          _mm512_min_epu8(_mm512_sub_epi8(above, symbols.vector[j]), broadcast(63));
      counts = _mm512_add_epi8(counts, _mm512_permutexvar_epi8(index, costs));
    }
    const Vector escapes = partial_sums(_mm512_and_si512(counts, low));
    const Vector deeper = partial_sums(_mm512_andnot_si512(low, counts));
    sums = _mm512_add_epi64(sums, _mm512_add_epi64(escapes, _mm512_slli_epi64(deeper, 28)));
  }
  const auto both = static_cast<uint64_t>(_mm512_reduce_add_epi64(sums));
  const auto escapes = static_cast<uint32_t>(both);
  const auto deeper = static_cast<uint32_t>(both >> 32);
  return bytes_of_bits(2 * escapes) + bytes_of_bits(4 * deeper) +
         count_raw(symbols, range, center, 2, 17);
}

inline uint32_t size_of_lq3(const Bytes& symbols, const Range& range, uint8_t center) {
  const Vector below = broadcast(static_cast<uint8_t>(center - 1u));
  uint32_t escapes = 0;
  for (const Vector& symbol : symbols.vector) {
    escapes += count_bits(_mm512_cmpgt_epu8_mask(_mm512_sub_epi8(below, symbol), broadcast(6)));
  }
  return kPlane1Bytes + bytes_of_bits(4 * escapes) + count_raw(symbols, range, center, 1, 19);
}

inline uint32_t size_of_fixed(uint32_t bits) { return kPlane1Bytes * (bits - 2); }

// --- Choice ------------------------------------------------------------------------------------

// Which mode section 5 wants, with what it costs.
struct Choice {
  uint32_t mode;
  uint8_t center;
  uint8_t center2;
  uint32_t nonzero;
  uint32_t units;
};

inline Choice choose_fast(const Bytes& symbols, const Range& range, uint32_t symbol_bits,
                          uint8_t center) {
  Choice choice{};
  choice.center = choice.center2 = center;
  choice.nonzero = range.minimum > 0 ? frame::kBlockElements : count_nonzero(symbols);
  const uint32_t fixed = units_of_bytes(size_of_fixed(symbol_bits));
  const uint32_t lq2 = units_of_bytes(size_of_lq2(symbols, range, center));
  choice.mode = lq2 < fixed ? uint32_t{frame::kLq2} : frame::kFw2 + symbol_bits - 2;
  choice.units = lq2 < fixed ? lq2 : fixed;
  return choice;
}

inline Choice choose_canonical(const Bytes& symbols, const Range& range, const Distances& distances,
                               uint32_t symbol_bits) {
  const uint32_t spread_bits =
      32 - static_cast<uint32_t>(_lzcnt_u32(range.maximum - range.minimum));
  const uint32_t bits = spread_bits < 2 ? 2 : spread_bits;
  Choice choice{};
  choice.nonzero = distances.count;
  choice.mode = frame::kFw2 + bits - 2;
  choice.center = static_cast<uint8_t>(range.maximum);
  choice.units = units_of_bytes(size_of_fixed(bits));
  Crowd crowd{range.maximum, distances};
  if (symbol_bits == canonical::kOutlierBits && may_have_outliers(distances)) {
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
  const uint32_t lq2 = units_of_bytes(size_of_lq2(symbols, range, choice.center2));
  if (lq2 < choice.units) {
    choice.mode = frame::kLq2;
    choice.center = choice.center2;
    choice.units = lq2;
  }
  // LQ3 has a plane of bits for a start, so it cannot win against anything as short.
  if (choice.units <= units_of_bytes(kPlane1Bytes)) {
    return choice;
  }
  const uint8_t center3 = center_of(crowd, 19);
  const uint32_t lq3 = units_of_bytes(size_of_lq3(symbols, range, center3));
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
