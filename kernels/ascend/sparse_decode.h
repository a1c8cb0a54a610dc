// The reader of layout sparse. The beginnings of all payloads are loaded ahead, for the bitmaps;
// what is behind a bitmap follows block by block, once its length has told where. The survivors
// then go back to their elements by their ranks.
#pragma once

#include "bitmaps.h"
#include "exponent_escapes.h"
#include "ranks.h"
#include "splits.h"
#include "streams.h"

namespace memswap::ascend {

template <class Split>
class SparseReader {
  static constexpr uint32_t kBlocks = Split::kBlocks;
  static constexpr uint32_t kLanes = Split::kLanes;
  static constexpr uint32_t kBlockBytes = kBlockLanes * Split::kWidth;
  // Fields and two for the ranks; or the checksum's.
  static constexpr uint32_t kVectors =
      max_of(Split::kFields + 2, Split::kJoinVectors, uint32_t{Split::kWidth});

 public:
  static constexpr uint32_t kWidth = Split::kWidth;
  static constexpr uint32_t kSlabBytes = 0;
  static constexpr uint32_t kSlotBytes = kLongestBitmap;
  static constexpr uint32_t kMaxUnits = kBlockLanes * kWidth / frame::kUnitBytes;

 private:
  using Bitmaps = BitmapReader<kBlocks, kSlotBytes>;
  static_assert(Bitmaps::kScratchLanes <= kVectors * kLanes);

 public:
  static constexpr uint32_t kUnifiedBytes =
      unified(kLanes * 2) + unified(kVectors * kLanes * 2) + unified(3 * kBlockLanes * 2) +
      unified(kBlockLanes * 2) + unified(2 * kBlockBytes) + Masks::kUnifiedBytes +
      SymbolFetcher::kUnifiedBytes + Ranks::kUnifiedBytes + Bitmaps::kUnifiedBytes +
      EscapeReader::kUnifiedBytes + (Split::kHasPairs ? WordPairs::kUnifiedBytes : 0);

  __aicore__ static constexpr bool takes(uint32_t mode) {
    return mode == frame::kZeros || mode == frame::kSignedZeros || mode == frame::kLiteral;
  }

  __aicore__ inline void init(TPipe* pipe) {
    pipe_ = pipe;
    pipe->InitBuffer(exponents_, kLanes * 2);
    pipe->InitBuffer(work_, kVectors * kLanes * 2);
    pipe->InitBuffer(block_, 3 * kBlockLanes * 2);
    pipe->InitBuffer(lane_numbers_, kBlockLanes * 2);
    pipe->InitBuffer(areas_, 2 * kBlockBytes);
    masks_.init(pipe);
    symbols_.init(pipe);
    ranks_.init(pipe);
    bitmaps_.init(pipe);
    escapes_.init(pipe, &ranks_, &symbols_, &masks_);
    CreateVecIndex(lane_numbers_.Get<int16_t>(), (int16_t)0, kBlockLanes);
    barrier();
    if constexpr (Split::kHasPairs) {
      pairs_.init(pipe, kLanes);
    }
  }

  __aicore__ inline LocalTensor<int32_t> scratch() { return work_.Get<int32_t>(); }

  __aicore__ inline void load(const Bytes& slot, GM_ADDR from, uint32_t mode, uint32_t units) {
    if (mode != frame::kLiteral) {
      const uint32_t bytes = units * frame::kUnitBytes;
      load_bytes(slot, from, bytes < kSlotBytes ? bytes : kSlotBytes);
    }
  }

  __aicore__ inline uint32_t decode(const Plan& plan, const Bytes& x, const Bytes&,
                                    const Bytes& heads) {
    uint32_t errors = 0;
    uint32_t bitmap_bytes[kBlocks];
    uint32_t survivors[kBlocks];
    Streams streams[2];
    bitmaps_.read(plan, heads, work(0), ranks_, bitmap_bytes);
    find_ranks(plan.blocks, survivors);
    hand_over<HardEvent::V_MTE2>(pipe_);
    streams[0] = load_block(plan, 0, bitmap_bytes[0], survivors[0]);
    for (uint32_t b = 0; b < plan.blocks; ++b) {
      hand_over<HardEvent::MTE2_V>(pipe_);
      if (b + 1 < plan.blocks) {
        // Into the area of the block before this one.
        hand_over<HardEvent::V_MTE2>(pipe_);
        streams[(b + 1) % 2] = load_block(plan, b + 1, bitmap_bytes[b + 1], survivors[b + 1]);
      }
      if (plan.mode[b] == frame::kLiteral) {
        clear_lanes(b);
      } else {
        errors |= bad_payload_unless(spread(plan, b, streams[b % 2]));
      }
    }
    Split::join(x, exponents_.Get<int16_t>(), work(0), masks_, &pairs_, plan.blocks);
    for (uint32_t b = 0; b < plan.blocks; ++b) {
      if (plan.mode[b] == frame::kLiteral) {
        errors |= bad_payload_unless(read_literal_block(plan, b, x[b * kBlockBytes]));
      }
    }
    return errors;
  }

 private:
  // Where a block's streams begin in its area: the fields', the codes, the signs, and S1.
  struct Streams {
    bool good = false;
    uint32_t survivors = 0;
    uint32_t bitmap_bytes = 0;
    uint32_t length = 0;
    uint32_t at[Split::kFields + 3] = {};

    // Whether nothing but the padding of the last unit is behind the area's first `end` bytes.
    __aicore__ inline bool ends_at(uint32_t end) const {
      return round_up(bitmap_bytes + end, frame::kUnitBytes) == bitmap_bytes + length;
    }
  };
  static constexpr uint32_t kCodes = Split::kFields;
  static constexpr uint32_t kSigns = Split::kFields + 1;
  static constexpr uint32_t kEscapes = Split::kFields + 2;

  __aicore__ inline Lanes work(uint32_t i) { return work_.Get<int16_t>()[i * kLanes]; }
  __aicore__ inline Lanes block(uint32_t i) { return block_.Get<int16_t>()[i * kBlockLanes]; }
  __aicore__ inline Lanes ranks() { return work(Split::kFields); }
  __aicore__ inline Lanes bits() { return work(Split::kFields + 1); }
  __aicore__ inline Bytes area(uint32_t b) { return areas_.Get<uint8_t>()[b % 2 * kBlockBytes]; }

  // Starts the move of what is behind a block's bitmap.
  __aicore__ inline Streams load_block(const Plan& plan, uint32_t b, uint32_t bitmap_bytes,
                                       uint32_t survivors) {
    Streams streams;
    if (bitmap_bytes == 0) {
      return streams;
    }
    streams.survivors = survivors;
    streams.bitmap_bytes = bitmap_bytes;
    streams.length = plan.units[b] * frame::kUnitBytes - bitmap_bytes;
    const uint32_t zeros = plan.mode[b] == frame::kSignedZeros ? kBlockLanes - survivors : 0;
    for (uint32_t i = 0; i < Split::kFields; ++i) {
      streams.at[i + 1] = streams.at[i] + stream_bytes(survivors, Split::field_width(i));
    }
    streams.at[kSigns] = streams.at[kCodes] + stream_bytes(survivors, 2);
    streams.at[kEscapes] = streams.at[kSigns] + stream_bytes(zeros, 1);
    streams.good = streams.at[kEscapes] <= streams.length;
    if (streams.good && streams.length != 0) {
      load_bytes(area(b), plan.payload[b] + bitmap_bytes, streams.length);
    }
    return streams;
  }

  // Where the survivors are, and how many each block has.
  __aicore__ inline void find_ranks(uint32_t blocks, uint32_t* survivors) {
    for (uint32_t b = 0; b < blocks; ++b) {
      bitmaps_.expand(bits()[b * kBlockLanes], b);
    }
    barrier();
    half_to_lanes(bits(), blocks * kBlockLanes);
    barrier();
    ranks_.compute(ranks(), bits(), exponents_.Get<int16_t>(), blocks);
    hand_over<HardEvent::V_S>(pipe_);
    for (uint32_t b = 0; b < blocks; ++b) {
      const uint32_t last = (b + 1) * kBlockLanes - 1;
      survivors[b] = static_cast<uint32_t>(ranks().GetValue(last) + bits().GetValue(last));
    }
    hand_over<HardEvent::S_V>(pipe_);
  }

  // The symbols of stream `i` of block b, each to the lane that has its number.
  __aicore__ inline void fetch(const Lanes& to, const Lanes& numbers, uint32_t b,
                               const Streams& streams, uint32_t i, uint32_t width) {
    Adds(to, numbers, (int16_t)0, static_cast<int32_t>(kBlockLanes));
    barrier();
    symbols_.fetch(to, area(b), streams.at[i], streams.at[i + 1] - streams.at[i], width);
  }

  // One block's fields and exponents to where their elements are. False: the payload is damaged.
  __aicore__ inline bool spread(const Plan& plan, uint32_t b, const Streams& streams) {
    constexpr int32_t n = kBlockLanes;
    const uint32_t first = b * kBlockLanes;
    const Lanes is_survivor = bits()[first];
    if (streams.good && streams.survivors == 0 && plan.mode[b] == frame::kZeros) {
      clear_lanes(b);  // as half of the blocks behind a causal mask
      return streams.ends_at(0);
    }
    if (!streams.good || !find_exponents(plan, b, streams)) {
      clear_lanes(b);
      return false;
    }
    for (uint32_t i = 0; i < Split::kFields; ++i) {
      const Lanes field = work(i)[first];
      fetch(field, ranks()[first], b, streams, i, Split::field_width(i));
      Mul(field, field, is_survivor, n);
    }
    barrier();
    if (plan.mode[b] == frame::kSignedZeros) {
      const Lanes signs = block(0);
      const Lanes is_zero = block(1);
      Sub(is_zero, lane_numbers_.Get<int16_t>(), ranks()[first], n);
      barrier();
      fetch(signs, is_zero, b, streams, kSigns, 1);
      one_minus(is_zero, is_survivor, n);
      Mul(signs, signs, is_zero, n);
      barrier();
      // The field is 0 there so far.
      Or(as_bits(work(0))[first], as_bits(work(0))[first], as_bits(signs), n);
      barrier();
    }
    return true;
  }

  __aicore__ inline bool find_exponents(const Plan& plan, uint32_t b, const Streams& streams) {
    constexpr int32_t n = kBlockLanes;
    const uint32_t first = b * kBlockLanes;
    const Lanes is_survivor = bits()[first];
    const Lanes e = exponents_.Get<int16_t>()[first];
    const Lanes flags = block(0);
    fetch(e, ranks()[first], b, streams, kCodes, 2);
    Mins(flags, e, (int16_t)1, n);
    barrier();
    one_minus(flags, flags, n);
    Mul(flags, flags, is_survivor, n);
    barrier();
    EscapeStreams escapes;
    escapes.streams = area(b);
    escapes.length = streams.length;
    escapes.before = streams.bitmap_bytes;
    escapes.at = streams.at[kEscapes];
    escapes.center = plan.center[b];
    escapes.mode = frame::kLq2;
    escapes_.resolve(&escapes, 1, e, flags, block(1), block(2));
    EscapeReader::exponents(e, e, flags, &plan.center[b], 1, masks_.low_bits(Split::kExponentBits),
                            true);
    Mul(e, e, is_survivor, n);
    barrier();
    return escapes.good;
  }

  // Something defined for the join, where the block is literal or damaged.
  __aicore__ inline void clear_lanes(uint32_t b) {
    const uint32_t first = b * kBlockLanes;
    Duplicate(exponents_.Get<int16_t>()[first], (int16_t)0, static_cast<int32_t>(kBlockLanes));
    for (uint32_t i = 0; i < Split::kFields; ++i) {
      Duplicate(work(i)[first], (int16_t)0, static_cast<int32_t>(kBlockLanes));
    }
    barrier();
  }

  __aicore__ inline bool read_literal_block(const Plan& plan, uint32_t b, const Bytes& x) {
    if (plan.units[b] * frame::kUnitBytes == kBlockBytes) {
      hand_over<HardEvent::V_MTE2>(pipe_);
      load_bytes(area(b), plan.payload[b], kBlockBytes);
      hand_over<HardEvent::MTE2_V>(pipe_);
    }
    return read_literal(x, x, 0, area(b), plan.units[b], kBlockBytes);
  }

  TPipe* pipe_;
  TBuf<TPosition::VECCALC> exponents_, work_, block_, lane_numbers_, areas_;
  Masks masks_;
  SymbolFetcher symbols_;
  Ranks ranks_;
  Bitmaps bitmaps_;
  EscapeReader escapes_;
  WordPairs pairs_;
};

}  // namespace memswap::ascend
