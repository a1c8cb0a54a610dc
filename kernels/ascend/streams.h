// Streams of symbols, packed in the order of their elements (docs/format.md section 2).
#pragma once

#include "planes.h"

namespace memswap::ascend {

// Bytes of a stream of `symbols` symbols.
__aicore__ inline uint32_t stream_bytes(uint32_t symbols, uint32_t width) {
  return (symbols * width + 7) / 8;
}

// A block's 1024 symbols of 2 or 4 bits, 0 behind the last one, as a stream whose bytes are lanes:
// 1024 x width / 8 of them, as many as `scratch` has.
__aicore__ inline void pack_lanes(const Lanes& stream, const Lanes& symbols, uint32_t width,
                                  const Lanes& scratch) {
  // Neighbours come together by GatherMask's fixed patterns: 1 and 2 are the lanes of every pair, 3
  // to 6 those of every four.
  const uint32_t per_byte = 8 / width;
  const int32_t bytes = static_cast<int32_t>(kBlockLanes / per_byte);
  const uint32_t first = per_byte == 2 ? 1 : 3;
  uint64_t kept = 0;
  GatherMask(as_bits(stream), as_bits(symbols), static_cast<uint8_t>(first), true, kBlockLanes,
             GatherMaskParams(1, 1, 0, 0), kept);
  for (uint32_t i = 1; i < per_byte; ++i) {
    GatherMask(as_bits(scratch), as_bits(symbols), static_cast<uint8_t>(first + i), true,
               kBlockLanes, GatherMaskParams(1, 1, 0, 0), kept);
    barrier();
    ShiftLeft(as_bits(scratch), as_bits(scratch), static_cast<uint16_t>(i * width), bytes);
    barrier();
    Or(as_bits(stream), as_bits(stream), as_bits(scratch), bytes);
    barrier();
  }
}

// A block's 1024 symbols, 0 behind the last one, as a stream of 1, 2, 4 or 8 bits each. The symbols
// are lost; t holds 1024 lanes and is overwritten.
__aicore__ inline void pack_stream(const Bytes& stream, const Lanes& symbols, uint32_t width,
                                   const Lanes& t) {
  if (width == 1 || width == 8) {
    store_field(stream, 0, symbols, t, width, 1);  // no symbol shares a byte with a distant one
    return;
  }
  const uint32_t bytes = kBlockLanes / 8 * width;
  pack_lanes(t, symbols, width, t[bytes]);
  lanes_to_half(t, bytes);
  barrier();
  half_to_bytes(stream, t, bytes);
  barrier();
}

// The reverse: lanes that know their symbols' numbers fetch them.
class SymbolFetcher {
  // Bytes of a stream of at most 1024 symbols from the multiple of 32 before it on, and their
  // symbols, which are most for a stream of bits.
  static constexpr uint32_t kMaxRegion = 32 + kBlockLanes;
  static constexpr uint32_t kMaxTable = 8 * (32 + kBlockLanes / 8);
  static_assert(kMaxTable >= kMaxRegion && kMaxTable >= 2 * (32 + kBlockLanes / 2));

 public:
  static constexpr uint32_t kUnifiedBytes =
      unified(kMaxRegion * 2) + unified(kMaxTable * 2) + unified(kMaxTable * 4);

  __aicore__ inline void init(TPipe* pipe) {
    pipe->InitBuffer(bytes_, kMaxRegion * 2);
    pipe->InitBuffer(table_, kMaxTable * 2);
    pipe->InitBuffer(offsets_, kMaxTable * 4);
    // What stands behind the last byte or symbol is looked at and never used.
    Duplicate(bytes_.Get<int16_t>(), (int16_t)0, static_cast<int32_t>(kMaxRegion));
    Duplicate(table(), (int16_t)0, static_cast<int32_t>(kMaxTable));
    barrier();
  }

  // The numbers on a block's lanes become symbols of `width` bits of the stream of `bytes` bytes
  // that begins `at` bytes behind `area`, a multiple of 32. The number behind the last symbol is
  // allowed, and becomes anything.
  __aicore__ inline void fetch(const Lanes& lanes, const Bytes& area, uint32_t at, uint32_t bytes,
                               uint32_t width) {
    const Region region = load(area, at, bytes);
    make_rows(region, width);
    fetch_from_rows(lanes, region, width);
  }

  // The same for what the symbols stand for; `meanings` has a lane for each.
  __aicore__ inline void fetch(const Lanes& lanes, const Bytes& area, uint32_t at, uint32_t bytes,
                               uint32_t width, const Lanes& meanings) {
    const Region region = load(area, at, bytes);
    make_rows(region, width);
    const LocalTensor<uint32_t> offsets = offsets_.Get<uint32_t>();
    const uint32_t symbols = 8 / width * region.row;
    lane_offsets(offsets, table(), symbols);
    Gather(as_bits(table()), as_bits(meanings), offsets, 0, symbols);
    barrier();
    fetch_from_rows(lanes, region, width);
  }

 private:
  struct Region {
    uint32_t before;  // bytes before the stream
    uint32_t row;     // lanes of a row of the table
  };

  __aicore__ inline Lanes table() { return table_.Get<int16_t>(); }

  __aicore__ inline Region load(const Bytes& area, uint32_t at, uint32_t bytes) {
    const Lanes lanes = bytes_.Get<int16_t>();
    const uint32_t before = at % kUnifiedBlockBytes;
    const uint32_t length = before + bytes;
    bytes_to_half(lanes, area[at - before], length);
    barrier();
    half_to_lanes(lanes, length);
    barrier();
    return {before, (length + 15) / 16 * 16};
  }

  // Row j of the table has symbol j of each byte.
  __aicore__ inline void make_rows(const Region& region, uint32_t width) {
    const Lanes lanes = bytes_.Get<int16_t>();
    const uint32_t rows = 8 / width;
    for (uint32_t j = 0; j < rows; ++j) {
      ShiftLeft(as_bits(table())[j * region.row], as_bits(lanes),
                static_cast<uint16_t>(16 - (j + 1) * width), static_cast<int32_t>(region.row));
    }
    barrier();
    ShiftRight(as_bits(table()), as_bits(table()), static_cast<uint16_t>(16 - width),
               static_cast<int32_t>(rows * region.row));
    barrier();
  }

  __aicore__ inline void fetch_from_rows(const Lanes& lanes, const Region& region, uint32_t width) {
    constexpr int32_t n = kBlockLanes;
    const LocalTensor<uint32_t> offsets = offsets_.Get<uint32_t>();
    const Lanes row = offsets.ReinterpretCast<int16_t>();
    if (width == 8) {
      Adds(lanes, lanes, static_cast<int16_t>(region.before), n);
    } else {
      // Symbol i is in row i % per_byte.
      const uint16_t bits = width == 4 ? 1 : width == 2 ? 2 : 3;
      ShiftLeft(as_bits(row), as_bits(lanes), static_cast<uint16_t>(16 - bits), n);
      barrier();
      ShiftRight(as_bits(row), as_bits(row), static_cast<uint16_t>(16 - bits), n);
      ShiftRight(as_bits(lanes), as_bits(lanes), bits, n);
      barrier();
      Muls(row, row, static_cast<int16_t>(region.row), n);
      Adds(lanes, lanes, static_cast<int16_t>(region.before), n);
      barrier();
      Add(lanes, lanes, row, n);
    }
    barrier();
    lane_offsets(offsets, lanes, kBlockLanes);
    Gather(as_bits(lanes), as_bits(table()), offsets, 0, kBlockLanes);
    barrier();
  }

  TBuf<TPosition::VECCALC> bytes_, table_, offsets_;
};

}  // namespace memswap::ascend
