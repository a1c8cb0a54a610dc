// Elements of 32 and 64 bits as 16-bit lanes, and back.
#pragma once

#include "lanes.h"

namespace memswap::ascend {

// Half i of each element; kHalves is 2 or 4. The caller puts a barrier behind it.
template <uint32_t kHalves>
__aicore__ inline void take_half(const Lanes& half, uint32_t i, const Lanes& x, uint32_t elements) {
  // GatherMask's fixed patterns: 1 and 2 are the lanes of every pair, 3 to 6 those of every four.
  constexpr uint32_t first_pattern = kHalves == 2 ? 1 : 3;
  uint64_t kept = 0;
  GatherMask(as_bits(half), as_bits(x), static_cast<uint8_t>(first_pattern + i), true,
             kHalves * elements, GatherMaskParams(1, 1, 0, 0), kept);
}

// Half i of each element to halves[i x stride], all of them.
template <uint32_t kHalves>
__aicore__ inline void separate_halves(const Lanes& halves, uint32_t stride, const Lanes& x,
                                       uint32_t elements) {
  for (uint32_t i = 0; i < kHalves; ++i) {
    take_half<kHalves>(halves[i * stride], i, x, elements);
  }
  barrier();
}

// The reverse for 32 bits. There is no interleaving and no conversion from 16 to 32 bits but
// through float, which holds 16 bits exactly. `wide`: two lanes per element, overwritten.
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

// Pairs of 32-bit words into elements of 64 bits.
class WordPairs {
 public:
  static constexpr uint32_t kUnifiedBytes = 2 * unified(2 * kBlockLanes * 4);

  // The upper words will stand `distance` words behind the lower ones.
  __aicore__ inline void init(TPipe* pipe, uint32_t distance) {
    pipe->InitBuffer(offsets_, 2 * kBlockLanes * 4);
    pipe->InitBuffer(odd_, 2 * kBlockLanes * 4);
    constexpr int32_t n = 2 * kBlockLanes;
    const LocalTensor<int32_t> word = offsets_.Get<int32_t>();
    const LocalTensor<int32_t> odd = odd_.Get<int32_t>();
    // Word i comes from i / 2 + (i % 2) distance; offsets are bytes.
    CreateVecIndex(word, 0, static_cast<uint32_t>(n));
    barrier();
    ShiftLeft(odd_.Get<uint32_t>(), offsets_.Get<uint32_t>(), uint32_t{31}, n);
    barrier();
    ShiftRight(offsets_.Get<uint32_t>(), offsets_.Get<uint32_t>(), uint32_t{1}, n);
    barrier();
    ShiftRight(odd_.Get<uint32_t>(), odd_.Get<uint32_t>(), uint32_t{31}, n);
    Muls(word, word, 4, n);
    barrier();
    Muls(odd, odd, static_cast<int32_t>(4 * distance), n);
    barrier();
    Add(word, word, odd, n);
    barrier();
  }

  // One block of x, from words[0..1023] and the upper words.
  __aicore__ inline void combine(const LocalTensor<uint32_t>& x,
                                 const LocalTensor<uint32_t>& words) {
    Gather(x, words, offsets_.Get<uint32_t>(), 0, 2 * kBlockLanes);
    barrier();
  }

 private:
  TBuf<TPosition::VECCALC> offsets_, odd_;
};

}  // namespace memswap::ascend
