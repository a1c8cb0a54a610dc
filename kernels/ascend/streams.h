// Streams of symbols, packed in the order of their elements (docs/format.md section 2).
#pragma once

#include "lanes.h"

namespace memswap::ascend {

// Bytes of a stream of `symbols` symbols.
__aicore__ inline uint32_t stream_bytes(uint32_t symbols, uint32_t width) {
  return (symbols * width + 7) / 8;
}

// A block's 1024 symbols, 0 behind the last one, as a stream of 1, 2, 4 or 8 bits each. The symbols
// are lost; t holds 1024 lanes and is overwritten.
__aicore__ inline void pack_stream(const Bytes& stream, const Lanes& symbols, uint32_t width,
                                   const Lanes& t) {
  if (width == 1 || width == 8) {
    lanes_to_half(symbols, kBlockLanes);
    barrier();
    if (width == 8) {
      half_to_bytes(stream, symbols, kBlockLanes);
    } else {
      CompareScalar(stream, as_half(symbols), static_cast<half>(1.0f), CMPMODE::EQ, kBlockLanes);
    }
    barrier();
    return;
  }
  // Neighbours come together by GatherMask's fixed patterns: 1 and 2 are the lanes of every pair, 3
  // to 6 those of every four.
  const uint32_t per_byte = 8 / width;
  const uint32_t bytes = kBlockLanes / per_byte;
  const uint32_t first = per_byte == 2 ? 1 : 3;
  const Lanes next = t[bytes];
  uint64_t kept = 0;
  GatherMask(as_bits(t), as_bits(symbols), static_cast<uint8_t>(first), true, kBlockLanes,
             GatherMaskParams(1, 1, 0, 0), kept);
  for (uint32_t i = 1; i < per_byte; ++i) {
    GatherMask(as_bits(next), as_bits(symbols), static_cast<uint8_t>(first + i), true, kBlockLanes,
               GatherMaskParams(1, 1, 0, 0), kept);
    barrier();
    ShiftLeft(as_bits(next), as_bits(next), static_cast<uint16_t>(i * width),
              static_cast<int32_t>(bytes));
    barrier();
    Or(as_bits(t), as_bits(t), as_bits(next), static_cast<int32_t>(bytes));
    barrier();
  }
  lanes_to_half(t, bytes);
  barrier();
  half_to_bytes(stream, t, bytes);
  barrier();
}

// The reverse. Symbols behind the last one are left over from something else. kPairs: there are
// streams of 4 bits, too.
template <bool kPairs>
class StreamUnpacker {
 public:
  __aicore__ inline void init(TPipe* pipe) {
    pipe->InitBuffer(offsets_, kKinds * kBlockLanes * 4);
    pipe->InitBuffer(factors_, kKinds * kBlockLanes * 2);
    pipe->InitBuffer(bytes_, kBlockLanes * 2);
    pipe->InitBuffer(ones_, kBlockLanes * 2);
    constexpr int32_t n = kBlockLanes;
    Duplicate(ones_.template Get<half>(), static_cast<half>(1.0f), n);
    Duplicate(bytes_.template Get<int16_t>(), (int16_t)0, n);
    for (uint32_t kind = 0; kind < kKinds; ++kind) {
      // Symbol i of width 2 or 4 is in byte i / 4 or i / 2, which is lifted until the symbol is the
      // upper part of it.
      const uint32_t per_byte = kind == 0 ? 4 : 2;
      const uint32_t width = 8 / per_byte;
      const LocalTensor<uint32_t> offsets = offsets_.template Get<uint32_t>()[kind * kBlockLanes];
      CreateVecIndex(offsets.ReinterpretCast<int32_t>(), 0, kBlockLanes);
      for (uint32_t i = 0; i < per_byte; ++i) {
        const uint64_t every = (per_byte == 4 ? 0x1111111111111111u : 0x5555555555555555u) << i;
        uint64_t mask[2] = {every, every};
        Duplicate(factors_.template Get<int16_t>()[kind * kBlockLanes],
                  static_cast<int16_t>(1 << (8 - width - i * width)), mask,
                  static_cast<uint8_t>(kBlockRepeats), 1, 8);
      }
      barrier();
      ShiftRight(offsets, offsets, uint32_t{kind == 0 ? 2u : 1u}, n);
      barrier();
      ShiftLeft(offsets, offsets, uint32_t{1}, n);
      barrier();
    }
  }

  __aicore__ inline LocalTensor<half> ones() { return ones_.template Get<half>(); }

  __aicore__ inline void unpack(const Lanes& symbols, const Bytes& stream, uint32_t width,
                                uint32_t count, Masks& masks) {
    constexpr int32_t n = kBlockLanes;
    if (width == 1) {
      Select(as_half(symbols), stream, ones_.template Get<half>(), static_cast<half>(0.0f),
             SELMODE::VSEL_TENSOR_SCALAR_MODE, count);
    } else if (width == 8) {
      bytes_to_half(symbols, stream, count);
    }
    if (width == 1 || width == 8) {
      barrier();
      half_to_lanes(symbols, count);
      barrier();
      return;
    }
    const uint32_t kind = width == 2 ? 0 : 1;
    const Lanes bytes = bytes_.template Get<int16_t>();
    bytes_to_half(bytes, stream, stream_bytes(count, width));
    barrier();
    half_to_lanes(bytes, stream_bytes(count, width));
    barrier();
    Gather(as_bits(symbols), as_bits(bytes), offsets_.template Get<uint32_t>()[kind * kBlockLanes],
           0, kBlockLanes);
    barrier();
    Mul(symbols, symbols, factors_.template Get<int16_t>()[kind * kBlockLanes], n);
    barrier();
    ShiftRight(as_bits(symbols), as_bits(symbols), static_cast<uint16_t>(8 - width), n);
    barrier();
    and_all(symbols, symbols, masks.low_bits(width), kBlockLanes);
    barrier();
  }

 private:
  static constexpr uint32_t kKinds = kPairs ? 2 : 1;
  TBuf<TPosition::VECCALC> offsets_, factors_, bytes_, ones_;
};

}  // namespace memswap::ascend
