// How many of the lanes before each lane of a block are 1. This vector unit cannot move lanes
// sideways, so sums run down the columns of transposed squares: lane 16 r + c of a square of 256
// goes to row c, column r; then one addition per row sums the c, and the same again the r.
#pragma once

#include "lanes.h"

namespace memswap::ascend {

class Ranks {
 public:
  __aicore__ inline void init(TPipe* pipe, uint32_t blocks) {
    pipe_ = pipe;
    squares_ = blocks * kSquaresPerBlock;
    pipe->InitBuffer(rows_, kGroup * kSquare * 2);
    pipe->InitBuffer(turned_, kGroup * kSquare * 2);
  }

  // ranks = the number of lanes with 1 among those before, per block; `bits` are 0 or 1, of all
  // blocks that init was told. All have 1024 lanes per block; `columns` is overwritten.
  __aicore__ inline void compute(const Lanes& ranks, const Lanes& bits, const Lanes& columns) {
    transpose(columns, bits, squares_);
    add_down(columns, squares_);
    // What each row of 16 lanes adds up to stands in row 15; these sums are summed in turn, 16
    // squares at a time: a square of sums holds four blocks, four of its rows each.
    const Lanes rows = rows_.Get<int16_t>();
    const Lanes turned = turned_.Get<int16_t>();
    for (uint32_t first = 0; first < squares_; first += 16) {
      const uint32_t count = squares_ - first < 16 ? squares_ - first : 16;
      if (count < 16) {
        Duplicate(rows, (int16_t)0, static_cast<int32_t>(kSquare));
        barrier();
      }
      Copy(rows, columns[first * kSquare + kLastRow], uint64_t{kRow}, static_cast<uint8_t>(count),
           CopyRepeatParams(1, 1, 1, stride_of(kSquare)));
      barrier();
      transpose(turned, rows, 1);
      add_down(turned, 1);
      // Row r: sums over the rows 0 to r of each square; row 15, of all of it.
      add_squares(turned);
      transpose(rows, turned[kSquare], 1);
      for (uint32_t i = 0; i < count; ++i) {
        const Lanes square = columns[(first + i) * kSquare];
        Add(square, square, rows[i * kRow], kAllLanes, 2, BinaryRepeatParams(1, 1, 0, 8, 8, 0));
      }
      barrier();
    }
    transpose(ranks, columns, squares_);
    // So far each lane has counted itself.
    Sub(ranks, ranks, bits, static_cast<int32_t>(squares_ * kSquare));
    barrier();
  }

 private:
  static constexpr uint32_t kRow = 16;
  static constexpr uint32_t kSquare = kRow * kRow;
  static constexpr uint32_t kLastRow = kSquare - kRow;
  static constexpr uint32_t kSquaresPerBlock = kBlockLanes / kSquare;
  static constexpr uint32_t kGroup = 2;  // squares of sums, and what is made of them

  __aicore__ inline static void transpose(const Lanes& to, const Lanes& from, uint32_t squares) {
    LocalTensor<uint16_t> target[kRow];
    LocalTensor<uint16_t> source[kRow];
    for (uint32_t i = 0; i < kRow; ++i) {
      target[i] = as_bits(to)[i * kRow];
      source[i] = as_bits(from)[i * kRow];
    }
    // The device adds the strides even to a single repeat.
    const uint16_t stride = squares == 1 ? 0 : stride_of(kSquare);
    TransDataTo5HD(
        target, source,
        TransDataTo5HDParams(false, false, static_cast<uint8_t>(squares), stride, stride));
    barrier();
  }

  // Row i of each square becomes the sum of the rows 0 to i.
  __aicore__ inline static void add_down(const Lanes& squares, uint32_t count) {
    for (uint32_t i = 1; i < kRow; ++i) {
      for (uint32_t first = 0; first < count; first += 8) {
        const uint32_t left = count - first < 8 ? count - first : 8;
        const Lanes row = squares[first * kSquare + i * kRow];
        const uint8_t stride = stride_of(kSquare);
        Add(row, row, squares[first * kSquare + (i - 1) * kRow], uint64_t{left * kRow}, 1,
            BinaryRepeatParams(stride, stride, stride, 8, 8, 8));
      }
      barrier();
    }
  }

  // turned[1][r] = turned[0][r - 1] plus, per lane, what the squares of the same block before have.
  // A lane is a square, and four of them are a block.
  __aicore__ inline void add_squares(const Lanes& turned) {
    const Lanes before = turned[kSquare];
    hand_over<HardEvent::V_S>(pipe_);
    int16_t totals[kRow];
    for (uint32_t i = 0; i < kRow; ++i) {
      totals[i] = turned[kLastRow].GetValue(i);
    }
    for (uint32_t i = 0; i < kRow; i += kSquaresPerBlock) {
      int16_t sum = 0;
      for (uint32_t j = 0; j < kSquaresPerBlock; ++j) {
        before.SetValue(i + j, sum);
        sum = static_cast<int16_t>(sum + totals[i + j]);
      }
    }
    hand_over<HardEvent::S_V>(pipe_);
    // Row 0 is what the scalar unit wrote; it is added to all others.
    Add(before[kRow], turned, before, uint64_t{kRow}, kRow - 1,
        BinaryRepeatParams(1, 1, 1, 1, 1, 0));
    barrier();
  }

  TPipe* pipe_;
  uint32_t squares_;
  TBuf<TPosition::VECCALC> rows_, turned_;
};

}  // namespace memswap::ascend
