// How each dtype falls into exponent lanes and planes of R (docs/format.md section 2), and back.
//
// split() takes a step's elements `x` apart: exponents into `e`, R planes into the slabs; t, u and
// w (a lane per element each) are overwritten. join() is the reverse for the first `blocks` blocks;
// e and `work` (four lanes per element) are overwritten.
#pragma once

#include "planes.h"

namespace memswap::ascend {

// A byte plane of each block, from lanes of 0..255, which are lost; `offset` in the slab.
template <class Split>
__aicore__ inline void store_byte_plane(const Bytes& slab, uint32_t offset, const Lanes& lanes) {
  lanes_to_half(lanes, Split::kBlocks * kBlockLanes);
  barrier();
  for (uint32_t b = 0; b < Split::kBlocks; ++b) {
    half_to_bytes(slab[b * Split::kSlabBytes + offset], lanes[b * kBlockLanes], kBlockLanes);
  }
  barrier();
}

template <class Split>
__aicore__ inline void load_byte_plane(const Lanes& lanes, const Bytes& slab, uint32_t offset,
                                       uint32_t blocks) {
  for (uint32_t b = 0; b < blocks; ++b) {
    bytes_to_half(lanes[b * kBlockLanes], slab[b * Split::kSlabBytes + offset], kBlockLanes);
  }
  barrier();
  half_to_lanes(lanes, blocks * kBlockLanes);
  barrier();
}

// x = a << left | b >> right, in 16 bits; `scratch` is overwritten, and may be x's own source b.
__aicore__ inline void funnel(const Lanes& x, const Lanes& a, uint32_t left, const Lanes& b,
                              uint32_t right, const Lanes& scratch, int32_t n) {
  ShiftLeft(as_bits(x), as_bits(a), static_cast<uint16_t>(left), n);
  ShiftRight(as_bits(scratch), as_bits(b), static_cast<uint16_t>(right), n);
  barrier();
  Or(as_bits(x), as_bits(x), as_bits(scratch), n);
  barrier();
}

struct SplitBf16 {
  static constexpr uint32_t kWidth = 2;
  static constexpr uint32_t kBlocks = 8;  // of a step: 16 KiB
  static constexpr uint32_t kExponentBits = 8;
  static constexpr uint32_t kRestBytes = 1024;  // R planes of a block
  static constexpr uint32_t kSlabBytes = kRestBytes + frame::kLowPlaneBytes;

  __aicore__ static inline void split(const Lanes& x, const Lanes& e, const Lanes& t, const Lanes&,
                                      const Lanes&, const Bytes& slab, Masks& masks) {
    constexpr int32_t n = kBlocks * kBlockLanes;
    funnel(e, x, 1, x, 15, t, n);
    and_all(t, e, masks.low_bits(8), n);
    barrier();
    ShiftRight(as_bits(e), as_bits(e), (uint16_t)8, n);
    store_byte_plane<SplitBf16>(slab, 0, t);
  }

  __aicore__ static inline void join(const Lanes& x, const Lanes& e, const Lanes& work,
                                     const Bytes& slab, uint32_t blocks, const LocalTensor<half>&) {
    const int32_t n = static_cast<int32_t>(blocks * kBlockLanes);
    load_byte_plane<SplitBf16>(work, slab, 0, blocks);
    ShiftLeft(as_bits(e), as_bits(e), (uint16_t)8, n);
    barrier();
    Or(as_bits(work), as_bits(work), as_bits(e), n);
    barrier();
    funnel(x, work, 15, work, 1, e, n);
  }
};

struct SplitFp16 {
  static constexpr uint32_t kWidth = 2;
  static constexpr uint32_t kBlocks = 8;
  static constexpr uint32_t kExponentBits = 5;
  static constexpr uint32_t kPairsAt = 1024;  // the plane of 2 bits in a slab
  static constexpr uint32_t kBitsAt = kPairsAt + 256;
  static constexpr uint32_t kRestBytes = kBitsAt + 128;
  static constexpr uint32_t kSlabBytes = kRestBytes + frame::kLowPlaneBytes;

  __aicore__ static inline void split(const Lanes& x, const Lanes& e, const Lanes& t,
                                      const Lanes& u, const Lanes&, const Bytes& slab,
                                      Masks& masks) {
    constexpr int32_t n = kBlocks * kBlockLanes;
    constexpr uint32_t packed = kBlocks * 256;
    funnel(e, x, 1, x, 15, t, n);
    and_all(t, e, masks.low_bits(8), n);
    barrier();
    store_byte_plane<SplitFp16>(slab, 0, t);
    ShiftRight(as_bits(t), as_bits(e), (uint16_t)8, n);
    barrier();
    and_all(t, t, masks.low_bits(2), n);
    barrier();
    pack_rows(u, t, u[packed], 2, kBlocks);
    lanes_to_half(u, packed);
    ShiftRight(as_bits(t), as_bits(e), (uint16_t)10, n);
    barrier();
    and_all(t, t, masks.low_bits(1), n);
    ShiftRight(as_bits(e), as_bits(e), (uint16_t)11, n);
    barrier();
    lanes_to_half(t, n);
    barrier();
    for (uint32_t b = 0; b < kBlocks; ++b) {
      half_to_bytes(slab[b * kSlabBytes + kPairsAt], u[b * 256], 256);
      CompareScalar(slab[b * kSlabBytes + kBitsAt], as_half(t)[b * kBlockLanes],
                    static_cast<half>(1.0f), CMPMODE::EQ, kBlockLanes);
    }
    barrier();
  }

  __aicore__ static inline void join(const Lanes& x, const Lanes& e, const Lanes& work,
                                     const Bytes& slab, uint32_t blocks,
                                     const LocalTensor<half>& ones) {
    constexpr uint32_t lanes = kBlocks * kBlockLanes;
    const int32_t n = static_cast<int32_t>(blocks * kBlockLanes);
    const Lanes field = work[lanes];
    const Lanes packed = work[2 * lanes];
    load_byte_plane<SplitFp16>(work, slab, 0, blocks);
    for (uint32_t b = 0; b < blocks; ++b) {
      bytes_to_half(packed[b * 256], slab[b * kSlabBytes + kPairsAt], 256);
    }
    barrier();
    half_to_lanes(packed, blocks * 256);
    barrier();
    // The two bits leave through the top and come back at 8 and 9.
    unpack_rows(field, packed, 2, blocks);
    ShiftLeft(as_bits(field), as_bits(field), (uint16_t)14, n);
    barrier();
    ShiftRight(as_bits(field), as_bits(field), (uint16_t)6, n);
    ShiftLeft(as_bits(e), as_bits(e), (uint16_t)11, n);
    barrier();
    Or(as_bits(work), as_bits(work), as_bits(field), n);
    barrier();
    for (uint32_t b = 0; b < blocks; ++b) {
      Select(as_half(field)[b * kBlockLanes], slab[b * kSlabBytes + kBitsAt], ones,
             static_cast<half>(0.0f), SELMODE::VSEL_TENSOR_SCALAR_MODE, kBlockLanes);
    }
    Or(as_bits(work), as_bits(work), as_bits(e), n);
    barrier();
    half_to_lanes(field, blocks * kBlockLanes);
    barrier();
    ShiftLeft(as_bits(field), as_bits(field), (uint16_t)10, n);
    barrier();
    Or(as_bits(work), as_bits(work), as_bits(field), n);
    barrier();
    funnel(x, work, 15, work, 1, e, n);
  }
};

// 32-bit elements as pairs of 16-bit lanes; `low` and `high` take one half each.
__aicore__ inline void separate_halves(const Lanes& low, const Lanes& high, const Lanes& x,
                                       uint32_t elements) {
  uint64_t kept = 0;
  GatherMask(as_bits(low), as_bits(x), (uint8_t)1, true, 2 * elements, GatherMaskParams(1, 1, 0, 0),
             kept);
  GatherMask(as_bits(high), as_bits(x), (uint8_t)2, true, 2 * elements,
             GatherMaskParams(1, 1, 0, 0), kept);
  barrier();
}

// The reverse. There is no interleaving and no conversion from 16 to 32 bits but through float,
// which holds 16 bits exactly. `wide`: two lanes per element, overwritten.
__aicore__ inline void combine_halves(const Lanes& x, const Lanes& low, const Lanes& high,
                                      const Lanes& wide, uint32_t elements) {
  const LocalTensor<uint32_t> upper = x.ReinterpretCast<uint32_t>();
  const LocalTensor<uint32_t> lower = wide.ReinterpretCast<uint32_t>();
  const int32_t n = static_cast<int32_t>(elements);
  Cast(x.ReinterpretCast<float>(), high, RoundMode::CAST_NONE, elements);
  Cast(wide.ReinterpretCast<float>(), low, RoundMode::CAST_NONE, elements);
  barrier();
  Cast(x.ReinterpretCast<int32_t>(), x.ReinterpretCast<float>(), RoundMode::CAST_RINT, elements);
  Cast(wide.ReinterpretCast<int32_t>(), wide.ReinterpretCast<float>(), RoundMode::CAST_RINT,
       elements);
  barrier();
  ShiftLeft(upper, upper, uint32_t{16}, n);
  ShiftLeft(lower, lower, uint32_t{16}, n);
  barrier();
  ShiftRight(lower, lower, uint32_t{16}, n);
  barrier();
  Or(as_bits(x), as_bits(x), as_bits(wide), 2 * n);
  barrier();
}

struct SplitFp32 {
  static constexpr uint32_t kWidth = 4;
  static constexpr uint32_t kBlocks = 4;
  static constexpr uint32_t kExponentBits = 8;
  static constexpr uint32_t kRestBytes = 3 * 1024;
  static constexpr uint32_t kSlabBytes = kRestBytes + frame::kLowPlaneBytes;

  __aicore__ static inline void split(const Lanes& x, const Lanes& e, const Lanes& t,
                                      const Lanes& u, const Lanes& w, const Bytes& slab,
                                      Masks& masks) {
    constexpr int32_t n = kBlocks * kBlockLanes;
    const Lanes& low = t;
    const Lanes& high = u;
    separate_halves(low, high, x, n);
    // Of the element rotated left by one: byte 0 ends with the sign.
    funnel(w, low, 1, high, 15, e, n);
    and_all(w, w, masks.low_bits(8), n);
    barrier();
    store_byte_plane<SplitFp32>(slab, 0, w);
    ShiftRight(as_bits(w), as_bits(low), (uint16_t)7, n);
    barrier();
    and_all(w, w, masks.low_bits(8), n);
    barrier();
    store_byte_plane<SplitFp32>(slab, 1024, w);
    funnel(w, high, 1, low, 15, e, n);
    and_all(w, w, masks.low_bits(8), n);
    barrier();
    store_byte_plane<SplitFp32>(slab, 2048, w);
    ShiftRight(as_bits(e), as_bits(high), (uint16_t)7, n);
    barrier();
    and_all(e, e, masks.low_bits(8), n);
    barrier();
  }

  __aicore__ static inline void join(const Lanes& x, const Lanes& e, const Lanes& work,
                                     const Bytes& slab, uint32_t blocks, const LocalTensor<half>&) {
    constexpr uint32_t lanes = kBlocks * kBlockLanes;
    const int32_t n = static_cast<int32_t>(blocks * kBlockLanes);
    const Lanes low = work;
    const Lanes t = work[lanes];
    const Lanes wide = work[2 * lanes];
    // high = sign << 15 | E << 7 | byte 2 >> 1; low = byte 2 << 15 | byte 1 << 7 | byte 0 >> 1.
    // `x` has room for lanes of its own until the halves are combined; `high` is e.
    ShiftLeft(as_bits(e), as_bits(e), (uint16_t)7, n);
    load_byte_plane<SplitFp32>(t, slab, 0, blocks);
    funnel(low, t, 15, t, 1, wide, n);  // sign and the lowest bits; the sign moves up below
    ShiftLeft(as_bits(t), as_bits(t), (uint16_t)15, n);
    barrier();
    Or(as_bits(e), as_bits(e), as_bits(t), n);
    ShiftLeft(as_bits(low), as_bits(low), (uint16_t)1, n);
    barrier();
    ShiftRight(as_bits(low), as_bits(low), (uint16_t)1, n);
    barrier();
    load_byte_plane<SplitFp32>(t, slab, 1024, blocks);
    ShiftLeft(as_bits(t), as_bits(t), (uint16_t)7, n);
    barrier();
    Or(as_bits(low), as_bits(low), as_bits(t), n);
    barrier();
    load_byte_plane<SplitFp32>(t, slab, 2048, blocks);
    ShiftLeft(as_bits(wide), as_bits(t), (uint16_t)15, n);
    barrier();
    ShiftRight(as_bits(t), as_bits(t), (uint16_t)1, n);
    barrier();
    Or(as_bits(low), as_bits(low), as_bits(wide), n);
    Or(as_bits(e), as_bits(e), as_bits(t), n);
    barrier();
    combine_halves(x, low, e, wide, blocks * kBlockLanes);
  }
};

}  // namespace memswap::ascend
