// Planes of 2 and 4 bits (docs/format.md section 2). Element e of a block stands at byte e % row,
// so a plane is made of whole rows of the block, shifted and combined: no lane moves sideways.
#pragma once

#include "lanes.h"

namespace memswap::ascend {

// packed[b x row + i] = the symbols i, row + i, ... of block b, `width` bits each (2 or 4), for
// `blocks` blocks that are 1024 lanes apart. `scratch` holds blocks x row lanes and is overwritten.
__aicore__ inline void pack_rows(const Lanes& packed, const Lanes& symbols, const Lanes& scratch,
                                 uint32_t width, uint32_t blocks) {
  const uint32_t rows = 8 / width;
  const uint32_t row = kBlockLanes / rows;
  const uint8_t row_stride = stride_of(row);
  const uint8_t block_stride = stride_of(kBlockLanes);
  const uint8_t repeats = static_cast<uint8_t>(blocks);
  for (uint32_t j = 1; j < rows; ++j) {
    barrier();
    for (uint32_t i = 0; i < row; i += kRepeatLanes) {
      ShiftLeft(as_bits(scratch)[i], as_bits(symbols)[j * row + i],
                static_cast<uint16_t>(j * width), kAllLanes, repeats,
                UnaryRepeatParams(1, 1, row_stride, block_stride));
    }
    barrier();
    for (uint32_t i = 0; i < row; i += kRepeatLanes) {
      if (j == 1) {
        Or(as_bits(packed)[i], as_bits(symbols)[i], as_bits(scratch)[i], kAllLanes, repeats,
           BinaryRepeatParams(1, 1, 1, row_stride, block_stride, row_stride));
      } else {
        Or(as_bits(packed)[i], as_bits(packed)[i], as_bits(scratch)[i], kAllLanes, repeats,
           BinaryRepeatParams(1, 1, 1, row_stride, row_stride, row_stride));
      }
    }
  }
  barrier();
}

// The reverse, with the upper symbols still in each lane: the caller masks them off.
__aicore__ inline void unpack_rows(const Lanes& symbols, const Lanes& packed, uint32_t width,
                                   uint32_t blocks) {
  const uint32_t rows = 8 / width;
  const uint32_t row = kBlockLanes / rows;
  for (uint32_t j = 0; j < rows; ++j) {
    for (uint32_t i = 0; i < row; i += kRepeatLanes) {
      ShiftRight(as_bits(symbols)[j * row + i], as_bits(packed)[i],
                 static_cast<uint16_t>(j * width), kAllLanes, static_cast<uint8_t>(blocks),
                 UnaryRepeatParams(1, 1, stride_of(kBlockLanes), stride_of(row)));
    }
  }
  barrier();
}

// A field of `width` bits (1, 2, 4 or 8) of `blocks` blocks as planes, `stride` bytes apart from
// `planes` on. The symbols are lost; `scratch` has as many lanes and is overwritten.
__aicore__ inline void store_field(const Bytes& planes, uint32_t stride, const Lanes& symbols,
                                   const Lanes& scratch, uint32_t width, uint32_t blocks) {
  const uint32_t bytes = kBlockLanes / 8 * width;
  if (width == 2 || width == 4) {
    pack_rows(scratch, symbols, scratch[blocks * bytes], width, blocks);
    lanes_to_half(scratch, blocks * bytes);
  } else {
    lanes_to_half(symbols, blocks * kBlockLanes);
  }
  barrier();
  for (uint32_t b = 0; b < blocks; ++b) {
    if (width == 1) {
      CompareScalar(planes[b * stride], as_half(symbols)[b * kBlockLanes], static_cast<half>(1.0f),
                    CMPMODE::EQ, kBlockLanes);
    } else if (width == 8) {
      half_to_bytes(planes[b * stride], symbols[b * kBlockLanes], bytes);
    } else {
      half_to_bytes(planes[b * stride], scratch[b * bytes], bytes);
    }
  }
  barrier();
}

// The reverse.
__aicore__ inline void load_field(const Lanes& symbols, const Bytes& planes, uint32_t stride,
                                  const Lanes& scratch, uint32_t width, uint32_t blocks,
                                  Masks& masks, Ones& ones) {
  const uint32_t bytes = kBlockLanes / 8 * width;
  const bool packed = width == 2 || width == 4;
  const Lanes& to = packed ? scratch : symbols;
  for (uint32_t b = 0; b < blocks; ++b) {
    if (width == 1) {
      ones.expand(as_half(to)[b * kBlockLanes], planes[b * stride], kBlockLanes);
    } else {
      bytes_to_half(to[b * bytes], planes[b * stride], bytes);
    }
  }
  barrier();
  half_to_lanes(to, blocks * (width == 1 ? kBlockLanes : bytes));
  barrier();
  if (packed) {
    unpack_rows(symbols, scratch, width, blocks);
    and_all(symbols, symbols, masks.low_bits(width), blocks * kBlockLanes);
    barrier();
  }
}

// Bits shift..shift + width - 1 of a block's 1024 symbols as a plane. t and u hold 1024 lanes each
// and are overwritten.
__aicore__ inline void put_plane(const Bytes& plane, const Lanes& symbols, uint32_t shift,
                                 uint32_t width, const Lanes& t, const Lanes& u) {
  constexpr int32_t n = kBlockLanes;
  // Upper bits leave through the top; a mask would have to be kept for each width.
  ShiftLeft(as_bits(t), as_bits(symbols), static_cast<uint16_t>(16 - shift - width), n);
  barrier();
  ShiftRight(as_bits(t), as_bits(t), static_cast<uint16_t>(16 - width), n);
  barrier();
  store_field(plane, 0, t, u, width, 1);
}

// The reverse: ORs the plane into the symbols.
__aicore__ inline void add_plane(const Lanes& symbols, const Bytes& plane, uint32_t shift,
                                 uint32_t width, const Lanes& t, const Lanes& u, Masks& masks,
                                 Ones& ones) {
  constexpr int32_t n = kBlockLanes;
  load_field(t, plane, 0, u, width, 1, masks, ones);
  ShiftLeft(as_bits(t), as_bits(t), static_cast<uint16_t>(shift), n);
  barrier();
  Or(as_bits(symbols), as_bits(symbols), as_bits(t), n);
  barrier();
}

}  // namespace memswap::ascend
