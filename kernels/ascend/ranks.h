// Sums over the lanes before each lane of a block. This vector unit cannot move lanes sideways, so
// sums run down the columns of transposed squares: lane 16 r + c of a square of 256 goes to row c,
// column r; then one addition per row sums the c, and the same again the r.
#pragma once

#include "lanes.h"

namespace memswap::ascend {

class Ranks {
  static constexpr uint32_t kRow = 16;
  static constexpr uint32_t kSquare = kRow * kRow;

 public:
  static constexpr uint32_t kUnifiedBytes =
      unified(kSquare * 2) + unified(2 * kSquare * 2) + unified(kSquare * 2);

  __aicore__ inline void init(TPipe* pipe) {
    pipe->InitBuffer(rows_, kSquare * 2);
    pipe->InitBuffer(turned_, 2 * kSquare * 2);  // sums, and what stands before each
    pipe->InitBuffer(totals_, kSquare * 2);
  }

  // ranks = the sum of the lanes before, per block: of lanes that are 0 or 1, how many are 1. All
  // have 1024 lanes per block; `columns` is overwritten.
  __aicore__ inline void compute(const Lanes& ranks, const Lanes& lanes, const Lanes& columns,
                                 uint32_t blocks) {
    const uint32_t squares = blocks * kSquaresPerBlock;
    transpose(columns, lanes, squares);
    add_down(columns, squares);
    // What each row of 16 lanes adds up to stands in row 15; these sums are summed in turn, 16
    // squares at a time: a square of sums holds four blocks, four of its rows each.
    const Lanes rows = rows_.Get<int16_t>();
    const Lanes turned = turned_.Get<int16_t>();
    for (uint32_t first = 0; first < squares; first += 16) {
      const uint32_t count = squares - first < 16 ? squares - first : 16;
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
      find_before(rows, turned);
      for (uint32_t i = 0; i < count; ++i) {
        const Lanes square = columns[(first + i) * kSquare];
        Add(square, square, rows[i * kRow], kAllLanes, 2, BinaryRepeatParams(1, 1, 0, 8, 8, 0));
      }
      barrier();
    }
    transpose(ranks, columns, squares);
    // So far each lane has counted itself.
    Sub(ranks, ranks, lanes, static_cast<int32_t>(squares * kSquare));
    barrier();
  }

 private:
  static constexpr uint32_t kLastRow = kSquare - kRow;
  static constexpr uint32_t kSquaresPerBlock = kBlockLanes / kSquare;

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

  // rows[i][r] = what stands before row r of square i in its block. Four squares are a block.
  __aicore__ inline void find_before(const Lanes& rows, const Lanes& turned) {
    const Lanes before = turned[kSquare];
    const Lanes totals = totals_.Get<int16_t>();
    Duplicate(before, (int16_t)0, static_cast<int32_t>(kRow));
    Copy(before[kRow], turned, uint64_t{kRow}, kRow - 1, CopyRepeatParams(1, 1, 1, 1));
    // A square's total on all lanes of a row of its own.
    Brcb(as_bits(totals), as_bits(turned)[kLastRow], 2, BrcbRepeatParams(1, 8));
    barrier();
    transpose(rows, before, 1);
    for (uint32_t i = 1; i < kSquaresPerBlock; ++i) {
      if (i > 1) {
        add_to_square(totals, i - 1, totals, i - 2);
      }
      add_to_square(rows, i, totals, i - 1);
    }
  }

  // to[i] += from[j], rows of 16 lanes, for the squares of each block at once.
  __aicore__ inline static void add_to_square(const Lanes& to, uint32_t i, const Lanes& from,
                                              uint32_t j) {
    constexpr uint8_t stride = kSquaresPerBlock;
    constexpr uint64_t lanes = kRow * kRow / kSquaresPerBlock;
    Add(to[i * kRow], to[i * kRow], from[j * kRow], lanes, 1,
        BinaryRepeatParams(stride, stride, stride, 8, 8, 8));
    barrier();
  }

  TBuf<TPosition::VECCALC> rows_, turned_, totals_;
};

}  // namespace memswap::ascend
