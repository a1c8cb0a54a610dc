// The reader of shape sparse. Streams follow each other without gaps, so each is loaded to a place
// of its own once the bitmap has told how long it is; the survivors then go back to their elements
// by their ranks.
#pragma once

#include "decode_frame.h"
#include "exponent_escapes.h"
#include "ranks.h"
#include "splits.h"
#include "streams.h"

namespace memswap::ascend {

template <class Split>
class SparseReader {
 public:
  static constexpr uint32_t kWidth = Split::kWidth;
  static constexpr uint32_t kSlabBytes = frame::kBitmapBytes;
  static constexpr uint32_t kSlotBytes = 0;
  static constexpr uint32_t kMaxUnits = (kBlockLanes * kWidth - kSlabBytes) / frame::kUnitBytes;

  __aicore__ static constexpr bool takes(uint32_t mode) {
    return mode == frame::kZeros || mode == frame::kSignedZeros || mode == frame::kLiteral;
  }

  __aicore__ inline void init(TPipe* pipe) {
    pipe_ = pipe;
    pipe->InitBuffer(exponents_, kLanes * 2);
    pipe->InitBuffer(work_, kVectors * kLanes * 2);
    pipe->InitBuffer(block_, 3 * kBlockLanes * 2);
    pipe->InitBuffer(ones_, kBlockLanes * 2);
    pipe->InitBuffer(lane_numbers_, kBlockLanes * 2);
    pipe->InitBuffer(areas_, 2 * kAreaBytes);
    masks_.init(pipe);
    symbols_.init(pipe);
    ranks_.init(pipe);
    escapes_.init(pipe);
    CreateVecIndex(lane_numbers_.Get<int16_t>(), (int16_t)0, kBlockLanes);
    Duplicate(ones_.Get<half>(), static_cast<half>(1.0f), static_cast<int32_t>(kBlockLanes));
    barrier();
    if constexpr (Split::kHasPairs) {
      pairs_.init(pipe, kLanes);
    }
  }

  __aicore__ inline LocalTensor<int32_t> scratch() { return work_.Get<int32_t>(); }
  __aicore__ inline void load(const Bytes&, GM_ADDR, uint32_t, uint32_t) {}

  __aicore__ inline uint32_t decode(const Plan& plan, const Bytes& x, const Bytes& slab,
                                    const Bytes&) {
    uint32_t errors = 0;
    Streams streams[2];
    uint32_t survivors[kBlocks];
    find_ranks(plan.blocks, slab, survivors);
    hand_over<HardEvent::V_MTE2>(pipe_);
    load_block(plan, 0, survivors[0], &streams[0]);
    for (uint32_t b = 0; b < plan.blocks; ++b) {
      hand_over<HardEvent::MTE2_V>(pipe_);
      if (b + 1 < plan.blocks) {
        // Into the area of the block before this one.
        hand_over<HardEvent::V_MTE2>(pipe_);
        load_block(plan, b + 1, survivors[b + 1], &streams[(b + 1) % 2]);
      }
      const bool good = plan.mode[b] == frame::kLiteral || spread(plan, b, streams[b % 2]);
      errors |= good ? 0u : uint32_t{frame::kBadPayload};
      if (plan.mode[b] == frame::kLiteral) {
        clear_lanes(b);
      }
    }
    Split::join(x, exponents_.Get<int16_t>(), work(0), masks_, &pairs_, plan.blocks);
    for (uint32_t b = 0; b < plan.blocks; ++b) {
      if (plan.mode[b] == frame::kLiteral) {
        errors |= read_literal_block(plan, b, x[b * kBlockBytes], slab[b * kSlabBytes])
                      ? 0u
                      : uint32_t{frame::kBadPayload};
      }
    }
    return errors;
  }

 private:
  static constexpr uint32_t kBlocks = Split::kBlocks;
  static constexpr uint32_t kLanes = Split::kLanes;
  static constexpr uint32_t kBlockBytes = kBlockLanes * kWidth;
  // Fields and two for the ranks; or the checksum's.
  static constexpr uint32_t kVectors =
      max_of(Split::kFields + 2, Split::kJoinVectors, uint32_t{kWidth});

  // A block's streams in UB.
  __aicore__ static constexpr uint32_t field_at(uint32_t i) {
    uint32_t offset = 0;
    for (uint32_t j = 0; j < i; ++j) {
      offset += kBlockLanes / 8 * Split::field_width(j);
    }
    return offset;
  }
  static constexpr uint32_t kCodesAt = field_at(Split::kFields);
  static constexpr uint32_t kSignsAt = kCodesAt + kBlockLanes / 4;
  static constexpr uint32_t kTailAt = kSignsAt + kBlockLanes / 8;
  static constexpr uint32_t kMaxTail = kBlockLanes / 4 + kBlockLanes / 2 + kBlockLanes + 8;
  static constexpr uint32_t kAreaBytes =
      (max_of(kTailAt + kMaxTail, kBlockBytes - kSlabBytes) + 31) / 32 * 32;

  struct Streams {
    bool good = false;
    uint32_t survivors = 0;
    uint32_t tail = 0;  // bytes from S1 on
    uint32_t head = 0;  // before
  };

  __aicore__ inline Lanes work(uint32_t i) { return work_.Get<int16_t>()[i * kLanes]; }
  __aicore__ inline Lanes block(uint32_t i) { return block_.Get<int16_t>()[i * kBlockLanes]; }
  __aicore__ inline Lanes ranks() { return work(Split::kFields); }
  __aicore__ inline Lanes bits() { return work(Split::kFields + 1); }
  __aicore__ inline Bytes area(uint32_t b) { return areas_.Get<uint8_t>()[b % 2 * kAreaBytes]; }

  // Starts the moves of a block's streams.
  __aicore__ inline void load_block(const Plan& plan, uint32_t b, uint32_t survivors,
                                    Streams* streams) {
    const uint32_t bytes = plan.units[b] * frame::kUnitBytes;
    *streams = Streams();
    if (plan.mode[b] == frame::kLiteral) {
      return;
    }
    streams->survivors = survivors;
    const uint32_t zeros =
        plan.mode[b] == frame::kSignedZeros ? kBlockLanes - streams->survivors : 0;
    uint32_t lengths[Split::kFields + 2];
    uint32_t at[Split::kFields + 2];
    for (uint32_t i = 0; i < Split::kFields; ++i) {
      lengths[i] = stream_bytes(streams->survivors, Split::field_width(i));
      at[i] = field_at(i);
    }
    lengths[Split::kFields] = stream_bytes(streams->survivors, 2);
    at[Split::kFields] = kCodesAt;
    lengths[Split::kFields + 1] = stream_bytes(zeros, 1);
    at[Split::kFields + 1] = kSignsAt;
    for (const uint32_t length : lengths) {
      streams->head += length;
    }
    if (streams->head > bytes || bytes - streams->head > kMaxTail) {
      return;
    }
    streams->good = true;
    streams->tail = bytes - streams->head;
    GM_ADDR from = plan.payload[b];
    for (uint32_t i = 0; i < Split::kFields + 2; ++i) {
      if (lengths[i] != 0) {
        load_bytes(area(b)[at[i]], from, lengths[i]);
        from += lengths[i];
      }
    }
    if (streams->tail != 0) {
      load_bytes(area(b)[kTailAt], from, streams->tail);
    }
  }

  // Where the survivors are, and how many each block has.
  __aicore__ inline void find_ranks(uint32_t blocks, const Bytes& slab, uint32_t* survivors) {
    for (uint32_t b = 0; b < blocks; ++b) {
      Select(as_half(bits())[b * kBlockLanes], slab[b * kSlabBytes], ones_.Get<half>(),
             static_cast<half>(0.0f), SELMODE::VSEL_TENSOR_SCALAR_MODE, kBlockLanes);
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

  // The symbols of one of a block's streams, each to the lane that has its number.
  __aicore__ inline void fetch(const Lanes& to, const Lanes& numbers, const Bytes& stream,
                               uint32_t width, uint32_t symbols) {
    Adds(to, numbers, (int16_t)0, static_cast<int32_t>(kBlockLanes));
    barrier();
    symbols_.fetch(to, stream, 0, stream_bytes(symbols, width), width);
  }

  // One block's fields and exponents to where their elements are. False: the payload is damaged.
  __aicore__ inline bool spread(const Plan& plan, uint32_t b, const Streams& streams) {
    constexpr int32_t n = kBlockLanes;
    const uint32_t first = b * kBlockLanes;
    const Lanes is_survivor = bits()[first];
    if (!streams.good || !find_exponents(plan, b, streams)) {
      clear_lanes(b);
      return false;
    }
    for (uint32_t i = 0; i < Split::kFields; ++i) {
      const Lanes field = work(i)[first];
      fetch(field, ranks()[first], area(b)[field_at(i)], Split::field_width(i), streams.survivors);
      Mul(field, field, is_survivor, n);
    }
    barrier();
    if (plan.mode[b] == frame::kSignedZeros) {
      const Lanes signs = block(0);
      const Lanes is_zero = block(1);
      Sub(is_zero, lane_numbers_.Get<int16_t>(), ranks()[first], n);
      barrier();
      fetch(signs, is_zero, area(b)[kSignsAt], 1, kBlockLanes - streams.survivors);
      flip(is_zero, is_survivor);
      Mul(signs, signs, is_zero, n);
      barrier();
      // The field is 0 there so far.
      Or(as_bits(work(0))[first], as_bits(work(0))[first], as_bits(signs), n);
      barrier();
    }
    return true;
  }

  // 1 - x.
  __aicore__ inline static void flip(const Lanes& to, const Lanes& x) {
    Muls(to, x, (int16_t)-1, static_cast<int32_t>(kBlockLanes));
    barrier();
    Adds(to, to, (int16_t)1, static_cast<int32_t>(kBlockLanes));
    barrier();
  }

  __aicore__ inline bool find_exponents(const Plan& plan, uint32_t b, const Streams& streams) {
    constexpr int32_t n = kBlockLanes;
    const uint32_t first = b * kBlockLanes;
    const Lanes is_survivor = bits()[first];
    const Lanes e = exponents_.Get<int16_t>()[first];
    const Lanes flags = block(0);
    fetch(e, ranks()[first], area(b)[kCodesAt], 2, streams.survivors);
    Mins(flags, e, (int16_t)1, n);
    barrier();
    flip(flags, flags);
    Mul(flags, flags, is_survivor, n);
    barrier();
    EscapeStreams escapes;
    escapes.streams = area(b)[kTailAt];
    escapes.length = streams.tail;
    escapes.before = streams.head;
    escapes.center = plan.center[b];
    escapes.mode = frame::kLq2;
    escapes_.resolve(&escapes, 1, e, flags, block(1), block(2), ranks_, symbols_);
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

  __aicore__ inline bool read_literal_block(const Plan& plan, uint32_t b, const Bytes& x,
                                            const Bytes& slab) {
    const bool whole = plan.units[b] * frame::kUnitBytes == kBlockBytes - kSlabBytes;
    if (whole) {
      hand_over<HardEvent::V_MTE2>(pipe_);
      load_bytes(area(b), plan.payload[b], kBlockBytes - kSlabBytes);
      hand_over<HardEvent::MTE2_V>(pipe_);
    }
    return read_literal(x, slab, kSlabBytes, area(b), plan.units[b], kBlockBytes);
  }

  TPipe* pipe_;
  TBuf<TPosition::VECCALC> exponents_, work_, block_, ones_, lane_numbers_, areas_;
  Masks masks_;
  SymbolFetcher symbols_;
  Ranks ranks_;
  EscapeReader escapes_;
  WordPairs pairs_;
};

}  // namespace memswap::ascend
