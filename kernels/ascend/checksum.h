// The checksum of docs/format.md section 4: the sum of word j times 2 j + 1, exactly, then modulo a
// prime. There are no products of 64 bits: words are taken as 16-bit halves h in rows of 64, and
// with j = 64 r + l the sum is that over l of (2 l + 1) sum_r h + 128 sum_r r h, none of which
// leaves 32 bits before the scalar unit adds up what is left.
#pragma once

#include "lanes.h"

namespace memswap::ascend {

class Checksum {
 public:
  static constexpr uint32_t kMaxWords = 4096;  // of one step

 private:
  static constexpr uint32_t kRow = 64;
  static constexpr uint32_t kSums = 8;  // that the scalar unit adds
  static constexpr uint32_t kKinds = 3;

 public:
  static constexpr uint32_t kUnifiedBytes =
      unified(kMaxWords * 4) + unified(kRow * 4) + unified(2 * kKinds * kSums * 4);

  __aicore__ inline void init(TPipe* pipe) {
    pipe_ = pipe;
    pipe->InitBuffer(rows_, kMaxWords * 4);
    pipe->InitBuffer(odd_, kRow * 4);
    pipe->InitBuffer(sums_, 2 * kKinds * kSums * 4);
    const LocalTensor<int32_t> rows = rows_.Get<int32_t>();
    const LocalTensor<int32_t> odd = odd_.Get<int32_t>();
    CreateVecIndex(odd, 0, kRow);
    for (uint32_t i = 0; i < kMaxWords / kRow; ++i) {
      Duplicate(rows[i * kRow], static_cast<int32_t>(i), static_cast<int32_t>(kRow));
    }
    barrier();
    Muls(odd, odd, 2, static_cast<int32_t>(kRow));
    barrier();
    Adds(odd, odd, 1, static_cast<int32_t>(kRow));
    barrier();
  }

  // Of `words` words, a power of two from 64 on; `scratch` has room for twice as many and is
  // overwritten. `result` may be asked for once the scalar unit has waited for the vector unit.
  __aicore__ inline void compute(const LocalTensor<int32_t>& data,
                                 const LocalTensor<int32_t>& scratch, uint32_t words) {
    const int32_t n = static_cast<int32_t>(words);
    const LocalTensor<int32_t> half_words = scratch;
    const LocalTensor<int32_t> products = scratch[words];
    const LocalTensor<uint32_t> bits = scratch.ReinterpretCast<uint32_t>();
    const LocalTensor<uint32_t> source = data.ReinterpretCast<uint32_t>();
    hand_over<HardEvent::S_V>(pipe_);
    for (uint32_t half = 0; half < 2; ++half) {
      if (half == 0) {
        ShiftLeft(bits, source, uint32_t{16}, n);
        barrier();
        ShiftRight(bits, bits, uint32_t{16}, n);
      } else {
        ShiftRight(bits, source, uint32_t{16}, n);
      }
      barrier();
      Mul(products, half_words, rows_.Get<int32_t>(), n);
      barrier();
      fold(products, words, kSums);
      keep(half, kByRow, products);
      fold(half_words, words, kRow);
      Mul(products, half_words, odd_.Get<int32_t>(), static_cast<int32_t>(kRow));
      barrier();
      fold(products, kRow, kSums);
      keep(half, kByLane, products);
      fold(half_words, kRow, kSums);
      keep(half, kPlain, half_words);
      barrier();
    }
  }

  // What the words add to the tile's sum if the first of them is its word `first`.
  __aicore__ inline uint64_t result(uint32_t first) {
    uint64_t sum = 0;
    for (uint32_t half = 0; half < 2; ++half) {
      sum += (total(half, kByLane) + 2 * kRow * total(half, kByRow) +
              uint64_t{2 * first} * total(half, kPlain))
             << 16 * half;
    }
    return sum;
  }

 private:
  static constexpr uint32_t kByLane = 0;
  static constexpr uint32_t kByRow = 1;
  static constexpr uint32_t kPlain = 2;

  __aicore__ inline void fold(const LocalTensor<int32_t>& values, uint32_t from, uint32_t to) {
    for (uint32_t left = from / 2; left >= to; left /= 2) {
      Add(values, values, values[left], static_cast<int32_t>(left));
      barrier();
    }
  }
  __aicore__ inline void keep(uint32_t half, uint32_t kind, const LocalTensor<int32_t>& values) {
    Adds(sums_.Get<int32_t>()[(half * kKinds + kind) * kSums], values, 0,
         static_cast<int32_t>(kSums));
  }
  // The sums are below 2^32, but not all below 2^31.
  __aicore__ inline uint64_t total(uint32_t half, uint32_t kind) {
    uint64_t sum = 0;
    for (uint32_t i = 0; i < kSums; ++i) {
      sum +=
          static_cast<uint32_t>(sums_.Get<int32_t>().GetValue((half * kKinds + kind) * kSums + i));
    }
    return sum;
  }

  TPipe* pipe_;
  TBuf<TPosition::VECCALC> rows_, odd_, sums_;
};

}  // namespace memswap::ascend
