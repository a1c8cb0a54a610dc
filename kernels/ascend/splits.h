// How each float dtype falls into exponent lanes and fields of R (docs/format.md section 2), and
// back. Field i stands in f[i x kLanes], one lane per element.
//
//   take(x, e, f, masks)                 a step's elements; overwrites kTakeVectors vectors of f
//   take_exponents(x, e, f, masks)       e alone, which is all that is measured; overwrites as many
//   join(x, e, f, masks, pairs, blocks)  destroys e and kJoinVectors vectors of f
//
// Bit 0 of field 0 is the sign.
#pragma once

#include "halves.h"
#include "planes.h"

namespace memswap::ascend {

// x = a << left | b >> right, in 16 bits; `scratch`, which is neither a nor b, is overwritten.
__aicore__ inline void funnel(const Lanes& x, const Lanes& a, uint32_t left, const Lanes& b,
                              uint32_t right, const Lanes& scratch, int32_t n) {
  ShiftLeft(as_bits(x), as_bits(a), static_cast<uint16_t>(left), n);
  ShiftRight(as_bits(scratch), as_bits(b), static_cast<uint16_t>(right), n);
  barrier();
  Or(as_bits(x), as_bits(x), as_bits(scratch), n);
  barrier();
}

// x = (y >> shift) & low bits.
__aicore__ inline void extract(const Lanes& x, const Lanes& y, uint32_t shift, uint32_t width,
                               Masks& masks, int32_t n) {
  ShiftRight(as_bits(x), as_bits(y), static_cast<uint16_t>(shift), n);
  barrier();
  and_all(x, x, masks.low_bits(width), static_cast<uint32_t>(n));
  barrier();
}

// x |= y << shift; y is lost.
__aicore__ inline void insert(const Lanes& x, const Lanes& y, uint32_t shift, int32_t n) {
  ShiftLeft(as_bits(y), as_bits(y), static_cast<uint16_t>(shift), n);
  barrier();
  Or(as_bits(x), as_bits(x), as_bits(y), n);
  barrier();
}

template <uint32_t kBytes>
struct SplitBase {
  static constexpr uint32_t kWidth = kBytes;
  static constexpr uint32_t kBlocks = step_blocks(kBytes);
  static constexpr uint32_t kLanes = kBlocks * kBlockLanes;
  static constexpr bool kHasPairs = false;
};

// bfloat16, float32 and float64: halves h[0], h[1], ..., whose rotated bytes are the fields and, on
// top, E. Byte 2 i is h[i] << 1 with the top bit of the half below; byte 2 i + 1 is h[i] >> 7.
template <uint32_t kHalves>
struct SplitHalves : SplitBase<2 * kHalves> {
  using Base = SplitBase<2 * kHalves>;
  using Base::kLanes;
  static constexpr uint32_t kExponentBits = 8;
  static constexpr uint32_t kFields = 2 * kHalves - 1;
  static constexpr uint32_t kTakeVectors = kFields + 1 + (kHalves == 1 ? 0 : kHalves);
  static constexpr uint32_t kJoinVectors = kHalves == 4 ? 12 : kFields + 1;
  static constexpr bool kHasPairs = kHalves == 4;
  __aicore__ static constexpr uint32_t field_width(uint32_t) { return 8; }

  __aicore__ static inline void take(const Bytes& x, const Lanes& e, const Lanes& f, Masks& masks) {
    const Lanes elements = x.ReinterpretCast<int16_t>();
    if constexpr (kHalves == 1) {
      take_halves(elements, e, f, masks);
    } else {
      const Lanes halves = f[(kFields + 1) * kLanes];
      separate_halves<kHalves>(halves, kLanes, elements, kLanes);
      take_halves(halves, e, f, masks);
    }
  }

  __aicore__ static inline void take_exponents(const Bytes& x, const Lanes& e, const Lanes& f,
                                               Masks& masks) {
    const Lanes elements = x.ReinterpretCast<int16_t>();
    if constexpr (kHalves == 1) {
      extract(e, elements, 7, 8, masks, kLanes);
    } else {
      take_half<kHalves>(f, kHalves - 1, elements, kLanes);
      barrier();
      extract(e, f, 7, 8, masks, kLanes);
    }
  }

  __aicore__ static inline void take_halves(const Lanes& h, const Lanes& e, const Lanes& f,
                                            Masks& masks) {
    constexpr int32_t n = kLanes;
    const Lanes scratch = f[kFields * kLanes];
    for (uint32_t i = 0; i < kHalves; ++i) {
      const Lanes half = h[i * kLanes];
      const Lanes below = h[(i + kHalves - 1) % kHalves * kLanes];
      const Lanes even = f[2 * i * kLanes];
      const Lanes odd = i + 1 == kHalves ? e : f[(2 * i + 1) * kLanes];
      funnel(even, half, 1, below, 15, scratch, n);
      and_all(even, even, masks.low_bits(8), kLanes);
      extract(odd, half, 7, 8, masks, n);
    }
  }

  __aicore__ static inline void join(const Bytes& x, const Lanes& e, const Lanes& f, Masks&,
                                     WordPairs* pairs, uint32_t blocks) {
    const Lanes elements = x.ReinterpretCast<int16_t>();
    const uint32_t lanes = blocks * kBlockLanes;
    const int32_t n = static_cast<int32_t>(lanes);
    const Lanes scratch = f[kFields * kLanes];
    // Each half takes the place of its upper byte.
    for (uint32_t i = 0; i < kHalves; ++i) {
      const Lanes half = i + 1 == kHalves ? e : f[(2 * i + 1) * kLanes];
      const Lanes above = f[(i + 1 == kHalves ? 0 : 2 * i + 2) * kLanes];
      ShiftLeft(as_bits(half), as_bits(half), (uint16_t)7, n);
      ShiftRight(as_bits(scratch), as_bits(f)[2 * i * kLanes], (uint16_t)1, n);
      barrier();
      Or(as_bits(half), as_bits(half), as_bits(scratch), n);
      barrier();
      ShiftLeft(as_bits(scratch), as_bits(above), (uint16_t)15, n);
      barrier();
      if constexpr (kHalves == 1) {
        Or(as_bits(elements), as_bits(half), as_bits(scratch), n);
      } else {
        Or(as_bits(half), as_bits(half), as_bits(scratch), n);
      }
      barrier();
    }
    if constexpr (kHalves == 2) {
      combine_halves(elements, f[kLanes], e, f[2 * kLanes], lanes);
    } else if constexpr (kHalves == 4) {
      const Lanes wide = f[6 * kLanes];
      const Lanes low = f[8 * kLanes];
      const Lanes high = f[10 * kLanes];
      combine_halves(low, f[kLanes], f[3 * kLanes], wide, lanes);
      combine_halves(high, f[5 * kLanes], e, wide, lanes);
      for (uint32_t b = 0; b < blocks; ++b) {
        pairs->combine(x.ReinterpretCast<uint32_t>()[b * 2 * kBlockLanes],
                       low.ReinterpretCast<uint32_t>()[b * kBlockLanes]);
      }
    }
  }
};
using SplitBf16 = SplitHalves<1>;
using SplitFp32 = SplitHalves<2>;
using SplitFp64 = SplitHalves<4>;

// float32 as the bfloat16 of its high half; the low half is left where the caller finds it.
struct SplitUpcast : SplitBase<4> {
  static constexpr uint32_t kExponentBits = 8;
  static constexpr uint32_t kFields = 1;
  static constexpr uint32_t kTakeVectors = 4;
  static constexpr uint32_t kJoinVectors = 4;
  static constexpr uint32_t kLowHalves = 2;  // vector of f, after either take
  __aicore__ static constexpr uint32_t field_width(uint32_t) { return 8; }

  __aicore__ static inline void take(const Bytes& x, const Lanes& e, const Lanes& f, Masks& masks) {
    const Lanes high = f[3 * kLanes];
    take_exponents(x, e, f, masks);
    funnel(f, high, 1, high, 15, f[kLanes], kLanes);
    and_all(f, f, masks.low_bits(8), kLanes);
    barrier();
  }
  // And the low halves.
  __aicore__ static inline void take_exponents(const Bytes& x, const Lanes& e, const Lanes& f,
                                               Masks& masks) {
    separate_halves<2>(f[kLowHalves * kLanes], kLanes, x.ReinterpretCast<int16_t>(), kLanes);
    extract(e, f[3 * kLanes], 7, 8, masks, kLanes);
  }

  __aicore__ static inline void join(const Bytes& x, const Lanes& e, const Lanes& f, Masks&,
                                     WordPairs*, uint32_t blocks) {
    const uint32_t lanes = blocks * kBlockLanes;
    const int32_t n = static_cast<int32_t>(lanes);
    const Lanes zeros = f[kLanes];
    insert(f, e, 8, n);
    funnel(e, f, 15, f, 1, zeros, n);
    Duplicate(zeros, (int16_t)0, n);
    barrier();
    combine_halves(x.ReinterpretCast<int16_t>(), zeros, e, f[2 * kLanes], lanes);
  }
};

struct SplitFp16 : SplitBase<2> {
  static constexpr uint32_t kExponentBits = 5;
  static constexpr uint32_t kFields = 3;
  static constexpr uint32_t kTakeVectors = 4;
  static constexpr uint32_t kJoinVectors = 4;
  __aicore__ static constexpr uint32_t field_width(uint32_t i) {
    return i == 0 ? 8 : i == 1 ? 2 : 1;
  }

  __aicore__ static inline void take(const Bytes& x, const Lanes& e, const Lanes& f, Masks& masks) {
    constexpr int32_t n = kLanes;
    const Lanes elements = x.ReinterpretCast<int16_t>();
    funnel(e, elements, 1, elements, 15, f[3 * kLanes], n);
    and_all(f, e, masks.low_bits(8), kLanes);
    extract(f[kLanes], e, 8, 2, masks, n);
    extract(f[2 * kLanes], e, 10, 1, masks, n);
    ShiftRight(as_bits(e), as_bits(e), (uint16_t)11, n);
    barrier();
  }
  __aicore__ static inline void take_exponents(const Bytes& x, const Lanes& e, const Lanes&,
                                               Masks& masks) {
    extract(e, x.ReinterpretCast<int16_t>(), 10, 5, masks, kLanes);
  }

  __aicore__ static inline void join(const Bytes& x, const Lanes& e, const Lanes& f, Masks&,
                                     WordPairs*, uint32_t blocks) {
    const int32_t n = static_cast<int32_t>(blocks * kBlockLanes);
    insert(f, f[kLanes], 8, n);
    insert(f, f[2 * kLanes], 10, n);
    insert(f, e, 11, n);
    funnel(x.ReinterpretCast<int16_t>(), f, 15, f, 1, e, n);
  }
};

// float8: bytes, in lanes of their own from the beginning.
template <uint32_t kBits>
struct SplitFp8 : SplitBase<1> {
  static constexpr uint32_t kExponentBits = kBits;
  static constexpr uint32_t kFields = kBits == 4 ? 1 : 2;
  static constexpr uint32_t kTakeVectors = kFields + 1;
  static constexpr uint32_t kJoinVectors = kFields + 1;
  __aicore__ static constexpr uint32_t field_width(uint32_t i) {
    return kBits == 4 ? 4 : i == 0 ? 2 : 1;
  }

  __aicore__ static inline void take(const Bytes& x, const Lanes& e, const Lanes& f, Masks& masks) {
    constexpr int32_t n = kLanes;
    widen(x, f);
    funnel(e, f, 1, f, 7, f[kFields * kLanes], n);
    and_all(e, e, masks.low_bits(8), kLanes);
    barrier();
    if constexpr (kBits == 4) {
      and_all(f, e, masks.low_bits(4), kLanes);
    } else {
      and_all(f, e, masks.low_bits(2), kLanes);
      extract(f[kLanes], e, 2, 1, masks, n);
    }
    barrier();
    ShiftRight(as_bits(e), as_bits(e), static_cast<uint16_t>(8 - kBits), n);
    barrier();
  }
  __aicore__ static inline void take_exponents(const Bytes& x, const Lanes& e, const Lanes& f,
                                               Masks& masks) {
    widen(x, f);
    extract(e, f, 7 - kBits, kBits, masks, kLanes);
  }

  __aicore__ static inline void widen(const Bytes& x, const Lanes& lanes) {
    bytes_to_half(lanes, x, kLanes);
    barrier();
    half_to_lanes(lanes, kLanes);
    barrier();
  }

  __aicore__ static inline void join(const Bytes& x, const Lanes& e, const Lanes& f, Masks& masks,
                                     WordPairs*, uint32_t blocks) {
    const uint32_t lanes = blocks * kBlockLanes;
    const int32_t n = static_cast<int32_t>(lanes);
    if constexpr (kBits == 5) {
      insert(f, f[kLanes], 2, n);
    }
    insert(f, e, 8 - kBits, n);
    funnel(e, f, 7, f, 1, f[kFields * kLanes], n);
    and_all(e, e, masks.low_bits(8), lanes);
    barrier();
    lanes_to_half(e, lanes);
    barrier();
    half_to_bytes(x, e, lanes);
    barrier();
  }
};
using SplitE4m3 = SplitFp8<4>;
using SplitE5m2 = SplitFp8<5>;

// Bytes of a block's R planes.
template <class Split>
__aicore__ constexpr uint32_t rest_bytes() {
  uint32_t bits = 0;
  for (uint32_t i = 0; i < Split::kFields; ++i) {
    bits += Split::field_width(i);
  }
  return kBlockLanes / 8 * bits;
}

}  // namespace memswap::ascend
