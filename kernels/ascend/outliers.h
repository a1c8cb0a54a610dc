// Blocks with outliers (memswap/canonical.h, Note [outliers]): where most of a block's exponents
// are, from the median of a sample. All of it in lanes of half, which holds what occurs exactly.
#pragma once

#include "memswap/canonical.h"
#include "statistics.h"

namespace memswap::ascend {

class Windows {
  static constexpr uint32_t kMaxBlocks = frame::kTileBlocks;
  static constexpr uint32_t kLanes = kMaxBlocks * canonical::kSamples;
  static constexpr uint32_t kRow = 16;  // a lane for each block, and some nobody looks at

 public:
  static constexpr uint32_t kUnifiedBytes = unified(canonical::kSamples * 4) +
                                            3 * unified(kLanes * 2) + unified(5 * kRow * 2) +
                                            unified(2 * kMaxBlocks * 4);

  __aicore__ inline static bool is_far(const BlockStatistics& block) {
    return block.sum >= static_cast<int32_t>(canonical::kFar) * block.nonzero && block.sum != 0;
  }
  __aicore__ inline static bool any_far(const BlockStatistics* blocks, uint32_t count) {
    bool any = false;
    for (uint32_t b = 0; b < count; ++b) {
      any = any || is_far(blocks[b]);
    }
    return any;
  }

  __aicore__ inline void init(TPipe* pipe) {
    pipe_ = pipe;
    pipe->InitBuffer(offsets_, canonical::kSamples * 4);
    pipe->InitBuffer(samples_, kLanes * 2);
    pipe->InitBuffer(are_, kLanes * 2);
    pipe->InitBuffer(spread_, kLanes * 2);
    pipe->InitBuffer(counts_, 5 * kRow * 2);
    pipe->InitBuffer(words_, 2 * kMaxBlocks * 4);
    const LocalTensor<int32_t> offsets = offsets_.Get<int32_t>();
    CreateVecIndex(offsets, 0, canonical::kSamples);
    barrier();
    Muls(offsets, offsets, static_cast<int32_t>(2 * canonical::kSampleStep),
         static_cast<int32_t>(canonical::kSamples));
    barrier();
  }

  // Before the samples of a step: a block without one is in no window.
  __aicore__ inline void begin() {
    Duplicate(samples_.Get<int16_t>(), (int16_t)0, static_cast<int32_t>(kLanes));
    barrier();
  }

  // A block's exponents, 0 behind the last one.
  __aicore__ inline void sample(uint32_t b, const Lanes& exponents) {
    Gather(samples_.Get<uint16_t>()[b * canonical::kSamples], as_bits(exponents),
           offsets_.Get<uint32_t>(), 0, canonical::kSamples);
    barrier();
  }

  // The first exponent of the window of each block, 0 where most of the sample is in none.
  __aicore__ inline void find(uint32_t* windows, uint32_t blocks) {
    const LocalTensor<half> n = row(0);
    const LocalTensor<half> p = row(1);
    const LocalTensor<half> t = row(2);
    const LocalTensor<half> c = row(3);
    const LocalTensor<half> d = row(4);
    const LocalTensor<half> are = are_.Get<half>();
    const LocalTensor<int32_t> words = words_.Get<int32_t>();
    lanes_to_half(samples_.Get<int16_t>(), kLanes);
    Duplicate(counts_.Get<half>(), static_cast<half>(0.0f), static_cast<int32_t>(5 * kRow));
    barrier();
    Mins(are, samples_.Get<half>(), static_cast<half>(1.0f), static_cast<int32_t>(kLanes));
    barrier();
    count(n);
    // The median of those that are not 0, bit by bit.
    for (uint32_t bit = 128; bit >= canonical::kMedianStep; bit /= 2) {
      Adds(t, p, as_number(bit), kRow);
      barrier();
      at_least(t);
      count(c);
      // bit, if 2 c >= n
      twice_minus(c, n);
      Adds(c, c, as_number(1), kRow);
      barrier();
      clamp(c, kRow);
      Muls(c, c, as_number(bit), kRow);
      barrier();
      Add(p, p, c, kRow);
      barrier();
    }
    Adds(p, p, static_cast<half>(-static_cast<float>(canonical::kBelowMedian)), kRow);
    barrier();
    Maxs(p, p, as_number(1), kRow);
    barrier();
    Mins(p, p, as_number(canonical::kHighestWindow), kRow);
    barrier();
    at_least(p);
    count(c);
    Adds(t, p, as_number(canonical::kWindow), kRow);
    barrier();
    at_least(t);
    count(d);
    Sub(c, c, d, kRow);
    barrier();
    twice_minus(c, n);
    clamp(c, kRow);
    Mul(p, p, c, kRow);
    hand_over<HardEvent::S_V>(pipe_);
    barrier();
    Cast(words, p, RoundMode::CAST_RINT, kMaxBlocks);
    hand_over<HardEvent::V_S>(pipe_);
    for (uint32_t b = 0; b < blocks; ++b) {
      windows[b] = static_cast<uint32_t>(words.GetValue(b));
    }
  }

 private:
  __aicore__ inline LocalTensor<half> row(uint32_t i) { return counts_.Get<half>()[i * kRow]; }
  __aicore__ inline static half as_number(uint32_t value) {
    return static_cast<half>(static_cast<float>(value));
  }

  // 1 for 1 and more, 0 for 0 and less.
  __aicore__ inline static void clamp(const LocalTensor<half>& lanes, uint32_t n) {
    Maxs(lanes, lanes, as_number(0), static_cast<int32_t>(n));
    barrier();
    Mins(lanes, lanes, as_number(1), static_cast<int32_t>(n));
    barrier();
  }

  // are = 1 for the samples that are at least their block's lane of t, else 0.
  __aicore__ inline void at_least(const LocalTensor<half>& t) {
    const LocalTensor<half> are = are_.Get<half>();
    const LocalTensor<half> spread = spread_.Get<half>();
    Brcb(spread.ReinterpretCast<uint16_t>(), t.ReinterpretCast<uint16_t>(), 1,
         BrcbRepeatParams(1, 8));
    barrier();
    // A sample is two blocks of 32 bytes, and one serves both.
    Sub(are, samples_.Get<half>(), spread, uint64_t{canonical::kSamples},
        static_cast<uint8_t>(kMaxBlocks), BinaryRepeatParams(1, 1, 0, 2, 2, 1));
    barrier();
    Adds(are, are, as_number(1), static_cast<int32_t>(kLanes));
    barrier();
    clamp(are, kLanes);
  }

  __aicore__ inline void count(const LocalTensor<half>& counts) {
    WholeReduceSum(counts, are_.Get<half>(), static_cast<int32_t>(canonical::kSamples),
                   static_cast<int32_t>(kMaxBlocks), 1, 1, 2);
    barrier();
  }

  // c = 2 c - n.
  __aicore__ inline static void twice_minus(const LocalTensor<half>& c,
                                            const LocalTensor<half>& n) {
    Muls(c, c, as_number(2), kRow);
    barrier();
    Sub(c, c, n, kRow);
    barrier();
  }

  TPipe* pipe_;
  TBuf<TPosition::VECCALC> offsets_, samples_, are_, spread_, counts_, words_;
};

}  // namespace memswap::ascend
