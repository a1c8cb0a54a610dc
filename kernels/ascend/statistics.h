// What the encoder must know of each block's exponents: extremes, and the distance from the maximum
// (docs/format.md section 5).
#pragma once

#include "lanes.h"
#include "memswap/canonical.h"

namespace memswap::ascend {

enum class Fold : uint8_t { kMax, kMin, kAdd };

template <Fold kFold>
__aicore__ inline void fold_once(const Lanes& dst, const Lanes& src, uint32_t half_lanes,
                                 uint32_t blocks) {
  // Per block, the first half of its lanes with the second.
  const uint32_t lanes = half_lanes < kRepeatLanes ? half_lanes : kRepeatLanes;
  const BinaryRepeatParams strides(1, 1, 1, stride_of(half_lanes), stride_of(2 * half_lanes),
                                   stride_of(2 * half_lanes));
  const uint8_t repeats = static_cast<uint8_t>(blocks);
  for (uint32_t i = 0; i < half_lanes; i += lanes) {
    if constexpr (kFold == Fold::kMax) {
      Max(dst[i], src[i], src[half_lanes + i], uint64_t{lanes}, repeats, strides);
    } else if constexpr (kFold == Fold::kMin) {
      Min(dst[i], src[i], src[half_lanes + i], uint64_t{lanes}, repeats, strides);
    } else {
      Add(dst[i], src[i], src[half_lanes + i], uint64_t{lanes}, repeats, strides);
    }
  }
  barrier();
}

// From 1024 lanes per block to 64, contiguous. Needs 7 K lanes of scratch per 8 blocks; the result
// is in it.
template <Fold kFold>
__aicore__ inline Lanes fold_to_64(const Lanes& src, const Lanes& scratch, uint32_t blocks) {
  Lanes from = src;
  uint32_t at = 0;
  for (uint32_t half_lanes = kBlockLanes / 2; half_lanes >= 64; half_lanes /= 2) {
    const Lanes to = scratch[at];
    fold_once<kFold>(to, from, half_lanes, blocks);
    from = to;
    at += half_lanes * blocks;
  }
  return from;
}

// The greatest lane of each block, where lanes are 0 to 2048, for the scalar unit.
class Greatest {
 public:
  static constexpr uint32_t kMaxBlocks = frame::kTileBlocks;
  static constexpr uint32_t kUnifiedBytes = unified(32) + unified(kMaxBlocks * 4);

  __aicore__ inline void init(TPipe* pipe) {
    pipe_ = pipe;
    pipe->InitBuffer(reduced_, 32);
    pipe->InitBuffer(words_, kMaxBlocks * 4);
  }

  // `scratch` holds 1024 lanes per block and is overwritten.
  __aicore__ inline void find(uint32_t* greatest, const Lanes& lanes, const Lanes& scratch,
                              uint32_t blocks) {
    const LocalTensor<half> reduced = reduced_.Get<half>();
    const LocalTensor<int32_t> words = words_.Get<int32_t>();
    const Lanes folded = fold_to_64<Fold::kMax>(lanes, scratch, blocks);
    lanes_to_half(folded, blocks * 64);
    // The scalar unit has read what it found before.
    hand_over<HardEvent::S_V>(pipe_);
    Duplicate(reduced, static_cast<half>(0.0f), 16);
    barrier();
    WholeReduceMax(reduced, as_half(folded), 64, static_cast<int32_t>(blocks), 1, 1, 4,
                   ReduceOrder::ORDER_ONLY_VALUE);
    barrier();
    Cast(words, reduced, RoundMode::CAST_RINT, kMaxBlocks);
    hand_over<HardEvent::V_S>(pipe_);
    for (uint32_t b = 0; b < blocks; ++b) {
      greatest[b] = static_cast<uint32_t>(words.GetValue(b));
    }
  }

 private:
  TPipe* pipe_;
  TBuf<TPosition::VECCALC> reduced_, words_;
};

struct BlockStatistics {
  int32_t max;
  int32_t min;
  int32_t sum;      // over the exponents that are not 0, of min(max - exponent, kClip)
  int32_t nonzero;  // how many
  // What centres are made of: the same, or of those in the block's window (outliers.h) alone.
  int32_t center_max;
  int32_t center_sum;
  int32_t center_count;
};

// Centre of a code whose symbols lie around `eighths` / 8 below the centre's upper end.
__aicore__ inline uint32_t center_of(const BlockStatistics& block, int32_t eighths) {
  const int32_t count = block.center_count > 0 ? block.center_count : 1;
  const int32_t above = 8 * block.center_sum - eighths * count;
  const int32_t below_max = above > 0 ? above / (8 * count) : 0;
  return static_cast<uint32_t>(block.center_max + 1 - below_max) & 255u;
}

class Statistics {
 public:
  static constexpr uint32_t kBlocks = 8;
  static constexpr uint32_t kUnifiedBytes = unified(32) + unified(256) + unified(kBlocks * 64 * 4) +
                                            unified(32) + unified(4 * kBlocks * 4);

  __aicore__ inline void init(TPipe* pipe) {
    pipe_ = pipe;
    pipe->InitBuffer(reduced_, 32);
    pipe->InitBuffer(spread_, 256);
    pipe->InitBuffer(floats_, kBlocks * 64 * 4);
    pipe->InitBuffer(sums_, 32);
    pipe->InitBuffer(results_, 4 * kBlocks * 4);
  }

  // Destroys both scratch tensors (8192 lanes each for 8 blocks).
  __aicore__ inline void compute(const Lanes& exponents, const Lanes& scratch, const Lanes& work,
                                 uint32_t blocks, BlockStatistics* out) {
    const LocalTensor<int32_t> results = results_.Get<int32_t>();
    const Lanes reduced = reduced_.Get<int16_t>();
    const Lanes spread = spread_.Get<int16_t>();
    const uint32_t lanes = blocks * kBlockLanes;
    // Results of the tile before have been read: its scalar reads ended before this was issued, and
    // the flag makes the vector unit know.
    hand_over<HardEvent::S_V>(pipe_);
    Duplicate(reduced, (int16_t)0, kBlocks * 2);
    barrier();

    Lanes folded = fold_to_64<Fold::kMin>(exponents, work, blocks);
    reduce_half<false>(folded, reduced, blocks);
    Cast(results[kBlocks], as_half(reduced), RoundMode::CAST_RINT, kBlocks);
    barrier();
    folded = fold_to_64<Fold::kMax>(exponents, work, blocks);
    reduce_half<true>(folded, reduced, blocks);
    Cast(results, as_half(reduced), RoundMode::CAST_RINT, kBlocks);
    Brcb(as_bits(spread), as_bits(reduced), 1, BrcbRepeatParams(1, 8));
    barrier();
    half_to_lanes(spread, 128);
    barrier();
    // max - exponent, one block of 32 bytes with the maximum serving all of a repeat.
    for (uint32_t b = 0; b < blocks; ++b) {
      Sub(scratch[b * kBlockLanes], spread[b * 16], exponents[b * kBlockLanes], kAllLanes,
          static_cast<uint8_t>(kBlockRepeats), BinaryRepeatParams(1, 0, 1, 8, 0, 8));
    }
    Mins(work, exponents, (int16_t)1, static_cast<int32_t>(lanes));
    barrier();
    Mins(scratch, scratch, static_cast<int16_t>(canonical::kClip), static_cast<int32_t>(lanes));
    barrier();
    Mul(scratch, scratch, work, static_cast<int32_t>(lanes));
    barrier();
    folded = fold_to_64<Fold::kAdd>(scratch, work, blocks);
    reduce_sum(folded, results[2 * kBlocks], blocks);
    Mins(scratch, exponents, (int16_t)1, static_cast<int32_t>(lanes));
    barrier();
    folded = fold_to_64<Fold::kAdd>(scratch, work, blocks);
    reduce_sum(folded, results[3 * kBlocks], blocks);

    hand_over<HardEvent::V_S>(pipe_);
    for (uint32_t b = 0; b < blocks; ++b) {
      out[b].max = results.GetValue(b);
      out[b].min = results.GetValue(kBlocks + b);
      out[b].sum = results.GetValue(2 * kBlocks + b);
      out[b].nonzero = results.GetValue(3 * kBlocks + b);
      out[b].center_max = out[b].max;
      out[b].center_sum = out[b].sum;
      out[b].center_count = out[b].nonzero;
    }
  }

  // Of each block the number of exponents that are not 0 alone. Destroys both scratch tensors.
  __aicore__ inline void count_nonzero(const Lanes& exponents, const Lanes& scratch,
                                       const Lanes& work, uint32_t blocks, BlockStatistics* out) {
    const LocalTensor<int32_t> results = results_.Get<int32_t>();
    hand_over<HardEvent::S_V>(pipe_);
    Mins(scratch, exponents, (int16_t)1, static_cast<int32_t>(blocks * kBlockLanes));
    barrier();
    reduce_sum(fold_to_64<Fold::kAdd>(scratch, work, blocks), results, blocks);
    hand_over<HardEvent::V_S>(pipe_);
    for (uint32_t b = 0; b < blocks; ++b) {
      out[b].nonzero = results.GetValue(b);
    }
  }

  // Centres of the exponents from windows[b] on, where that is not 0. `scratch` and `work` as
  // above.
  __aicore__ inline void narrow(const Lanes& exponents, const Lanes& scratch, const Lanes& work,
                                uint32_t blocks, const uint32_t* windows, BlockStatistics* out) {
    const LocalTensor<int32_t> results = results_.Get<int32_t>();
    const Lanes reduced = reduced_.Get<int16_t>();
    const int32_t n = static_cast<int32_t>(blocks * kBlockLanes);
    constexpr int16_t window = canonical::kWindow;
    hand_over<HardEvent::S_V>(pipe_);
    // 1 .. 32 in the window, else 0.
    for (uint32_t b = 0; b < blocks; ++b) {
      Adds(scratch[b * kBlockLanes], exponents[b * kBlockLanes],
           static_cast<int16_t>(1 - static_cast<int32_t>(windows[b])),
           static_cast<int32_t>(kBlockLanes));
    }
    barrier();
    Maxs(scratch, scratch, (int16_t)0, n);
    barrier();
    Mins(scratch, scratch, static_cast<int16_t>(window + 1), n);
    barrier();
    Adds(work, scratch, static_cast<int16_t>(-window), n);
    barrier();
    Maxs(work, work, (int16_t)0, n);
    barrier();
    Muls(work, work, static_cast<int16_t>(window + 1), n);
    barrier();
    Sub(scratch, scratch, work, n);
    Duplicate(reduced, (int16_t)0, kBlocks * 2);
    barrier();
    reduce_half<true>(fold_to_64<Fold::kMax>(scratch, work, blocks), reduced, blocks);
    Cast(results, as_half(reduced), RoundMode::CAST_RINT, kBlocks);
    barrier();
    reduce_sum(fold_to_64<Fold::kAdd>(scratch, work, blocks), results[kBlocks], blocks);
    Mins(scratch, scratch, (int16_t)1, n);
    barrier();
    reduce_sum(fold_to_64<Fold::kAdd>(scratch, work, blocks), results[2 * kBlocks], blocks);
    hand_over<HardEvent::V_S>(pipe_);
    for (uint32_t b = 0; b < blocks; ++b) {
      if (windows[b] != 0) {
        const int32_t above = results.GetValue(b);
        const int32_t count = results.GetValue(2 * kBlocks + b);
        out[b].center_max = static_cast<int32_t>(windows[b]) + above - 1;
        out[b].center_sum = count * above - results.GetValue(kBlocks + b);
        out[b].center_count = count;
      }
    }
  }

 private:
  template <bool kMax>
  __aicore__ inline void reduce_half(const Lanes& folded, const Lanes& reduced, uint32_t blocks) {
    lanes_to_half(folded, blocks * 64);
    barrier();
    if constexpr (kMax) {
      WholeReduceMax(as_half(reduced), as_half(folded), 64, static_cast<int32_t>(blocks), 1, 1, 4,
                     ReduceOrder::ORDER_ONLY_VALUE);
    } else {
      WholeReduceMin(as_half(reduced), as_half(folded), 64, static_cast<int32_t>(blocks), 1, 1, 4,
                     ReduceOrder::ORDER_ONLY_VALUE);
    }
    barrier();
  }

  // In float: half would round sums above 2048.
  __aicore__ inline void reduce_sum(const Lanes& folded, const LocalTensor<int32_t>& out,
                                    uint32_t blocks) {
    const LocalTensor<float> floats = floats_.Get<float>();
    const LocalTensor<float> sums = sums_.Get<float>();
    Duplicate(sums, 0.0f, kBlocks);
    Cast(floats, folded, RoundMode::CAST_NONE, blocks * 64);
    barrier();
    WholeReduceSum(sums, floats, 64, static_cast<int32_t>(blocks), 1, 1, 8);
    barrier();
    Cast(out, sums, RoundMode::CAST_RINT, kBlocks);
    barrier();
  }

  TPipe* pipe_;
  TBuf<TPosition::VECCALC> reduced_, spread_, floats_, sums_, results_;
};

}  // namespace memswap::ascend
