// LQ2 for one block's exponents (docs/format.md section 3), which in layout sparse are fewer than
// its elements: codes, and escapes level by level.
#pragma once

#include "escape_counts.h"

namespace memswap::ascend {

// The steps below compute these in place of comparisons.
static_assert(frame::kLq2Nibbles.is(6, 255, 254));

class Lq2Writer {
 public:
  static constexpr uint32_t kVectors = 5;  // of 1024 lanes: the exponents, and encode()'s work
  static constexpr uint32_t kUnifiedBytes = unified(kBlockLanes / 8);

  __aicore__ inline void init(TPipe* pipe) { pipe->InitBuffer(where_, kBlockLanes / 8); }

  // `exponents`, of which `count` are there, are lost; work: 4 vectors of 1024 lanes. Symbols come
  // as lanes, 1024 with 0 behind the last one, and may be lost; scratch has as many lanes:
  //
  //   codes(symbols, scratch)           of all
  //   stream(level, symbols, scratch)   0: S1, 1: S2, 2: the E bytes. None behind an empty one
  template <class Codes, class Stream>
  __aicore__ inline EscapeCounts encode(const Lanes& exponents, uint32_t count, uint32_t center,
                                        const Lanes& work, Masks& masks, Codes codes,
                                        Stream stream) {
    constexpr int32_t n = kBlockLanes;
    const Lanes v = work;
    const Lanes a = work[kBlockLanes];
    const Lanes b = work[2 * kBlockLanes];
    const Lanes t = work[3 * kBlockLanes];
    const LocalTensor<uint16_t> where = where_.Get<uint16_t>();
    EscapeCounts counts;
    subtract_from_centers(v, exponents, &center, 1, kBlockLanes, masks.low_bits(8));
    // 1..3 stay, all others become 0: min(v, 4) mod 4.
    Mins(a, v, (int16_t)4, n);
    barrier();
    and_all(a, a, masks.low_bits(2), kBlockLanes);
    barrier();
    Adds(b, a, (int16_t)0, n);
    barrier();
    fill(a, count, kBlockLanes, (int16_t)0);
    fill(b, count, kBlockLanes, (int16_t)1);
    barrier();
    find(b, 0.0f);
    codes(a, t);
    counts.escapes = compact(a, v, where);
    if (counts.escapes == 0) {
      return counts;
    }
    compact(b, exponents, where);
    // v of an escape is 0, or 4 and more.
    Adds(v, a, (int16_t)-3, n);
    barrier();
    Maxs(v, v, (int16_t)0, n);
    barrier();
    Mins(v, v, (int16_t)3, n);
    barrier();
    fill(v, counts.escapes, kBlockLanes, (int16_t)0);
    barrier();
    Adds(exponents, v, (int16_t)0, n);
    barrier();
    find(exponents, 3.0f);
    stream(0u, v, t);
    counts.rare = compact(v, a, where);
    if (counts.rare == 0) {
      return counts;
    }
    compact(exponents, b, where);
    symbols(v, exponents, a, b);
    fill(a, counts.rare, kBlockLanes, (int16_t)0);
    barrier();
    Adds(b, a, (int16_t)0, n);
    barrier();
    find(b, 15.0f);
    stream(1u, a, t);
    counts.explicit_exponents = compact(a, exponents, where);
    if (counts.explicit_exponents != 0) {
      stream(2u, a, t);
    }
    return counts;
  }

 private:
  // Which lanes are `value`; they are lost.
  __aicore__ inline void find(const Lanes& lanes, float value) {
    lanes_to_half(lanes, kBlockLanes);
    barrier();
    CompareScalar(where_.Get<uint8_t>(), as_half(lanes), static_cast<half>(value), CMPMODE::EQ,
                  kBlockLanes);
    barrier();
  }

  // The symbol is min(near, far), where near is v - 6 for v = 6..17 and 20 or more for others; far
  // is 12 for v = 255, 13 for 254, else 14 for E = 0, else 15. Result in near.
  __aicore__ inline static void symbols(const Lanes& v, const Lanes& exponents, const Lanes& near,
                                        const Lanes& far) {
    constexpr int32_t n = kBlockLanes;
    // far: 15 - max(0, 2 and 3 for the two distances; 1 for E = 0).
    Maxs(far, v, (int16_t)253, n);
    Mins(near, exponents, (int16_t)1, n);
    barrier();
    Adds(far, far, (int16_t)-253, n);
    Muls(near, near, (int16_t)-1, n);
    barrier();
    Adds(near, near, (int16_t)1, n);
    barrier();
    // 0, 1, 2 for nothing, 254, 255: with its own minimum with 1 it is 0, 2, 3.
    Max(near, near, far, n);
    barrier();
    Mins(far, far, (int16_t)1, n);
    barrier();
    Add(far, far, near, n);
    barrier();
    Muls(far, far, (int16_t)-1, n);
    Maxs(near, v, (int16_t)17, n);
    barrier();
    Adds(far, far, (int16_t)15, n);
    Adds(near, near, (int16_t)-17, n);
    barrier();
    Mins(near, near, (int16_t)1, n);
    barrier();
    Muls(near, near, (int16_t)8, n);
    barrier();
    Add(near, near, v, n);
    barrier();
    Adds(near, near, (int16_t)-6, n);
    barrier();
    Min(near, near, far, n);
    barrier();
  }

  TBuf<TPosition::VECCALC> where_;
};

}  // namespace memswap::ascend
