// Bitmaps in payloads, plain and packed (docs/format.md section 3), for all blocks of a step at
// once: a bitmap's 128 bytes are as many lanes as one repeat has. A byte is mixed if it is neither
// 0x00 nor 0xFF; these alone stand in a packed bitmap, behind Z and F.
#pragma once

#include "decode_frame.h"
#include "ranks.h"

namespace memswap::ascend {

static_assert(frame::kMapsBytes == kUnifiedBlockBytes, "Z and F are one operand");

// The repeats of vectors whose blocks are `dst`, `a` and `b` bitmaps of lanes apart.
__aicore__ inline BinaryRepeatParams per_block(uint32_t dst, uint32_t a, uint32_t b) {
  return BinaryRepeatParams(1, 1, 1, static_cast<uint8_t>(8 * dst), static_cast<uint8_t>(8 * a),
                            static_cast<uint8_t>(8 * b));
}

template <uint32_t kBlocks>
class BitmapWriter {
 public:
  static constexpr uint32_t kScratchLanes = 4 * kBlocks * frame::kBitmapBytes;
  static constexpr uint32_t kUnifiedBytes =
      2 * unified(kBlocks * frame::kMapsBytes) + unified(frame::kBitmapBytes * 2);

  __aicore__ inline void init(TPipe* pipe) {
    pipe->InitBuffer(byte_maps_, kBlocks * frame::kMapsBytes);
    pipe->InitBuffer(are_mixed_, kBlocks * frame::kMapsBytes);
    pipe->InitBuffer(mixed_, frame::kBitmapBytes * 2);
  }

  // Takes a step's bitmaps, 128 bytes each. They and the scratch may change after the last `write`.
  __aicore__ inline void prepare(const Bytes& bitmaps, const Lanes& scratch) {
    bitmaps_ = bitmaps;
    values_ = as_half(scratch);
    const LocalTensor<half> products = values_[2 * kBytes];
    const uint8_t repeats = kBlocks;
    bytes_to_half(scratch[2 * kBytes], bitmaps, kBytes);
    barrier();
    // Per block, v and 255 - v: what is not 0 is a bit of Z and of F.
    Adds(values_, products, static_cast<half>(0.0f), kAllLanes, repeats,
         UnaryRepeatParams(1, 1, 16, 8));
    Muls(values_[frame::kBitmapBytes], products, static_cast<half>(-1.0f), kAllLanes, repeats,
         UnaryRepeatParams(1, 1, 16, 8));
    barrier();
    Adds(values_[frame::kBitmapBytes], values_[frame::kBitmapBytes], static_cast<half>(255.0f),
         kAllLanes, repeats, UnaryRepeatParams(1, 1, 16, 16));
    barrier();
    CompareScalar(byte_maps_.Get<uint8_t>(), values_, static_cast<half>(0.0f), CMPMODE::NE,
                  2 * kBytes);
    // A pattern of GatherMask begins at a multiple of 32 bytes: 16 of zeros are between these.
    Mul(products, values_, values_[frame::kBitmapBytes], kAllLanes, repeats, per_block(2, 2, 2));
    Duplicate(products[frame::kBitmapBytes], static_cast<half>(0.0f), kAllLanes, repeats, 1, 16);
    barrier();
    CompareScalar(are_mixed_.Get<uint8_t>(), products, static_cast<half>(0.0f), CMPMODE::NE,
                  2 * kBytes);
    barrier();
  }

  // Bytes of block b's bitmap, which are fewer than 128 if and only if it is packed.
  __aicore__ inline uint32_t length(uint32_t b) {
    uint64_t count = 0;
    GatherMask(as_bits(mixed_.Get<int16_t>()),
               values_[2 * b * frame::kBitmapBytes].template ReinterpretCast<uint16_t>(),
               are_mixed_.Get<uint16_t>()[b * frame::kMapsBytes / 2], true, frame::kBitmapBytes,
               GatherMaskParams(1, 1, 0, 0), count);
    barrier();
    const uint32_t bytes = frame::kMapsBytes + static_cast<uint32_t>(count);
    return bytes < frame::kBitmapBytes ? bytes : frame::kBitmapBytes;
  }

  // Block b's bitmap to where its payload is put together: 128 bytes, with zeros behind a packed
  // one. Returns its length.
  __aicore__ inline uint32_t write(const Bytes& to, uint32_t b) {
    const Lanes mixed = mixed_.Get<int16_t>();
    const uint32_t bytes = length(b);
    if (bytes == frame::kBitmapBytes) {
      copy_bytes(to, bitmaps_[b * frame::kBitmapBytes], frame::kBitmapBytes);
      barrier();
      return bytes;
    }
    fill(mixed, bytes - frame::kMapsBytes, frame::kBitmapBytes, (int16_t)0);
    copy_bytes(to, byte_maps_.Get<uint8_t>()[b * frame::kMapsBytes], frame::kMapsBytes);
    barrier();
    half_to_bytes(to[frame::kMapsBytes], mixed, frame::kBitmapBytes - frame::kMapsBytes);
    barrier();
    return bytes;
  }

 private:
  static constexpr uint32_t kBytes = kBlocks * frame::kBitmapBytes;

  Bytes bitmaps_;
  LocalTensor<half> values_;
  TBuf<TPosition::VECCALC> byte_maps_, are_mixed_, mixed_;
};

// What a payload may have before its streams: a packed bitmap of mixed bytes alone, which no
// encoder of ours writes.
constexpr uint32_t kLongestBitmap = frame::kMapsBytes + frame::kBitmapBytes;

// The reverse. `kHeadBytes` are from one block's payload to the next one's; of each, so much has
// been loaded as it may have of a bitmap.
template <uint32_t kBlocks, uint32_t kHeadBytes>
class BitmapReader {
 public:
  static constexpr uint32_t kScratchLanes = 7 * kBlockLanes;

 private:
  static constexpr uint32_t kBytes = kBlocks * frame::kBitmapBytes;
  static constexpr uint32_t kSums = 16;  // one for each block, and some nobody looks at
  static_assert(kBytes <= kBlockLanes, "bytes are ranked like one block's elements");

 public:
  static constexpr uint32_t kUnifiedBytes =
      unified(kBytes) + unified(2 * kSums * 2) + unified(2 * kSums * 4) + Ones::kUnifiedBytes;

  __aicore__ inline void init(TPipe* pipe) {
    pipe_ = pipe;
    pipe->InitBuffer(bitmaps_, kBytes);
    pipe->InitBuffer(sums_, 2 * kSums * 2);
    pipe->InitBuffer(counts_, 2 * kSums * 4);
    ones_.init(pipe);
    Duplicate(sums_.Get<half>(), static_cast<half>(0.0f), static_cast<int32_t>(2 * kSums));
    barrier();
  }

  // lengths[b] = bytes of block b's bitmap in its payload; 0 where it has none, or a wrong one.
  __aicore__ inline void read(const Plan& plan, const Bytes& heads, const Lanes& scratch,
                              Ranks& ranks, uint32_t* lengths) {
    bool any_packed = false;
    for (uint32_t b = 0; b < plan.blocks; ++b) {
      lengths[b] = 0;
      any_packed = any_packed || has_byte_maps(plan, b);
    }
    if (any_packed) {
      unpack(plan, heads, scratch, ranks, lengths);
    } else {
      Duplicate(bitmaps_.Get<int16_t>(), (int16_t)0, static_cast<int32_t>(kBytes / 2));
      barrier();
    }
    for (uint32_t b = 0; b < plan.blocks; ++b) {
      if (plan.mode[b] != frame::kLiteral && !plan.packed[b] &&
          plan.units[b] * frame::kUnitBytes >= frame::kBitmapBytes) {
        lengths[b] = frame::kBitmapBytes;
        copy_bytes(bitmap(b), heads[b * kHeadBytes], frame::kBitmapBytes);
      }
    }
    barrier();
  }

  // Lanes of 1.0 and 0.0 for block b's elements.
  __aicore__ inline void expand(const Lanes& to, uint32_t b) {
    ones_.expand(as_half(to), bitmap(b), kBlockLanes);
  }

 private:
  __aicore__ inline Bytes bitmap(uint32_t b) {
    return bitmaps_.Get<uint8_t>()[b * frame::kBitmapBytes];
  }

  __aicore__ static inline bool has_byte_maps(const Plan& plan, uint32_t b) {
    return plan.packed[b] && plan.units[b] * frame::kUnitBytes >= frame::kMapsBytes;
  }

  // A byte is 0x00 without its bit in Z, 0xFF without its bit in F, and else the mixed byte whose
  // number is that of the mixed ones before it.
  __aicore__ inline void unpack(const Plan& plan, const Bytes& heads, const Lanes& scratch,
                                Ranks& ranks, uint32_t* lengths) {
    const Lanes rank = scratch;
    const Lanes flags = scratch[kBlockLanes];
    const Lanes columns = scratch[2 * kBlockLanes];
    const LocalTensor<half> mixed = as_half(scratch)[3 * kBlockLanes];
    const LocalTensor<half> neither = as_half(scratch)[4 * kBlockLanes];
    const LocalTensor<half> maps = as_half(scratch)[5 * kBlockLanes];  // per block, Z and F
    const uint8_t repeats = kBlocks;
    Duplicate(mixed, static_cast<half>(0.0f), static_cast<int32_t>(4 * kBlockLanes));
    barrier();
    for (uint32_t b = 0; b < plan.blocks; ++b) {
      if (has_byte_maps(plan, b)) {
        ones_.expand(maps[2 * b * frame::kBitmapBytes], heads[b * kHeadBytes],
                     2 * frame::kBitmapBytes);
      }
    }
    barrier();
    Mul(mixed, maps, maps[frame::kBitmapBytes], kAllLanes, repeats, per_block(1, 2, 2));
    barrier();
    // (1 - z) (1 - f)
    Cast(flags, mixed, RoundMode::CAST_RINT, kBlockLanes);
    Sub(neither, mixed, maps, kAllLanes, repeats, per_block(1, 1, 2));
    barrier();
    Sub(neither, neither, maps[frame::kBitmapBytes], kAllLanes, repeats, per_block(1, 1, 2));
    barrier();
    Adds(neither, neither, static_cast<half>(1.0f), static_cast<int32_t>(kBytes));
    barrier();
    count(mixed, neither);
    // 0xFF for z (1 - f).
    const LocalTensor<half> full = neither;
    Sub(full, maps, mixed, kAllLanes, repeats, per_block(1, 2, 1));
    barrier();
    Muls(full, full, static_cast<half>(255.0f), static_cast<int32_t>(kBytes));
    ranks.compute(rank, flags, columns, 1);
    // In the maps' place, which is the last one: a table ends where its buffer does.
    const Lanes table = scratch[5 * kBlockLanes];
    Duplicate(table, (int16_t)0, static_cast<int32_t>(kBlockLanes + kRepeatLanes));
    barrier();
    take_mixed(plan, heads, table, rank, lengths);
    const LocalTensor<uint32_t> offsets = flags.ReinterpretCast<uint32_t>();
    lane_offsets(offsets, rank, kBytes);
    Gather(as_bits(rank), as_bits(table), offsets, 0, kBytes);
    barrier();
    Mul(as_half(rank), as_half(rank), mixed, static_cast<int32_t>(kBytes));
    barrier();
    Add(as_half(rank), as_half(rank), full, static_cast<int32_t>(kBytes));
    barrier();
    half_to_bytes(bitmaps_.Get<uint8_t>(), rank, kBytes);
    barrier();
  }

  // Of each block, how many bytes are mixed and how many have a bit in neither map.
  __aicore__ inline void count(const LocalTensor<half>& mixed, const LocalTensor<half>& neither) {
    const LocalTensor<half> sums = sums_.Get<half>();
    WholeReduceSum(sums, mixed, static_cast<int32_t>(kRepeatLanes), static_cast<int32_t>(kBlocks),
                   1, 1, 8);
    WholeReduceSum(sums[kSums], neither, static_cast<int32_t>(kRepeatLanes),
                   static_cast<int32_t>(kBlocks), 1, 1, 8);
    hand_over<HardEvent::S_V>(pipe_);
    barrier();
    Cast(counts_.Get<int32_t>(), sums, RoundMode::CAST_RINT, 2 * kSums);
    barrier();
  }

  // The blocks' mixed bytes into the table, 128 lanes apart; ranks that counted from the step's
  // first byte become their places. Also of what is damaged: nothing is fetched from elsewhere.
  __aicore__ inline void take_mixed(const Plan& plan, const Bytes& heads, const Lanes& table,
                                    const Lanes& rank, uint32_t* lengths) {
    const LocalTensor<int32_t> counts = counts_.Get<int32_t>();
    hand_over<HardEvent::V_S>(pipe_);
    uint32_t before = 0;
    for (uint32_t b = 0; b < plan.blocks; ++b) {
      const uint32_t at = b * frame::kBitmapBytes;
      const uint32_t mixed = static_cast<uint32_t>(counts.GetValue(b));
      Adds(rank[at], rank[at], static_cast<int16_t>(at - before),
           static_cast<int32_t>(frame::kBitmapBytes));
      before += mixed;
      const uint32_t bytes = frame::kMapsBytes + mixed;
      if (!has_byte_maps(plan, b) || counts.GetValue(kSums + b) != 0 ||
          bytes > plan.units[b] * frame::kUnitBytes) {
        continue;
      }
      lengths[b] = bytes;
      bytes_to_half(table[at], heads[b * kHeadBytes + frame::kMapsBytes], mixed);
    }
    barrier();
  }

  TPipe* pipe_;
  TBuf<TPosition::VECCALC> bitmaps_, sums_, counts_;
  Ones ones_;
};

}  // namespace memswap::ascend
