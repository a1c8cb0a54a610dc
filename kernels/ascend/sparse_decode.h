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
    pipe->InitBuffer(block_, 4 * kBlockLanes * 2);
    pipe->InitBuffer(offsets_, kBlockLanes * 4);
    pipe->InitBuffer(is_escape_, kBlockLanes / 8);
    pipe->InitBuffer(lane_numbers_, kBlockLanes * 2);
    pipe->InitBuffer(areas_, 2 * kAreaBytes);
    masks_.init(pipe);
    unpacker_.init(pipe);
    ranks_.init(pipe, kBlocks);
    CreateVecIndex(lane_numbers_.Get<int16_t>(), (int16_t)0, kBlockLanes);
    // Lanes behind the last symbol are read and never used.
    Duplicate(block_.Get<int16_t>(), (int16_t)0, static_cast<int32_t>(4 * kBlockLanes));
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
    hand_over<HardEvent::V_S>(pipe_);  // what MTE2 has loaded into the slab
    hand_over<HardEvent::V_MTE2>(pipe_);
    load_block(plan, 0, slab, &streams[0]);
    find_ranks(plan.blocks, slab);
    for (uint32_t b = 0; b < plan.blocks; ++b) {
      hand_over<HardEvent::MTE2_V>(pipe_);
      hand_over<HardEvent::MTE2_S>(pipe_);
      if (b + 1 < plan.blocks) {
        // Into the area of the block before this one.
        hand_over<HardEvent::V_MTE2>(pipe_);
        hand_over<HardEvent::S_MTE2>(pipe_);
        load_block(plan, b + 1, slab, &streams[(b + 1) % 2]);
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
  static constexpr uint32_t kExponentMask = (1u << Split::kExponentBits) - 1;
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
  __aicore__ inline void load_block(const Plan& plan, uint32_t b, const Bytes& slab,
                                    Streams* streams) {
    const uint32_t bytes = plan.units[b] * frame::kUnitBytes;
    *streams = Streams();
    if (plan.mode[b] == frame::kLiteral) {
      return;
    }
    const LocalTensor<uint64_t> bitmap = slab[b * kSlabBytes].ReinterpretCast<uint64_t>();
    for (uint32_t i = 0; i < kBlockLanes / 64; ++i) {
      streams->survivors += static_cast<uint32_t>(ScalarGetCountOfValue<1>(bitmap.GetValue(i)));
    }
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

  __aicore__ inline void find_ranks(uint32_t blocks, const Bytes& slab) {
    if (blocks < kBlocks) {
      Duplicate(bits(), (int16_t)0, static_cast<int32_t>(kLanes));
      barrier();
    }
    for (uint32_t b = 0; b < blocks; ++b) {
      Select(as_half(bits())[b * kBlockLanes], slab[b * kSlabBytes], unpacker_.ones(),
             static_cast<half>(0.0f), SELMODE::VSEL_TENSOR_SCALAR_MODE, kBlockLanes);
    }
    barrier();
    half_to_lanes(bits(), blocks * kBlockLanes);
    barrier();
    ranks_.compute(ranks(), bits(), exponents_.Get<int16_t>());
  }

  // Byte offsets of 16-bit lanes.
  __aicore__ inline void offsets_of(const Lanes& numbers) {
    const LocalTensor<float> floats = offsets_.Get<float>();
    Cast(floats, numbers, RoundMode::CAST_NONE, kBlockLanes);
    barrier();
    Cast(floats.ReinterpretCast<int32_t>(), floats, RoundMode::CAST_RINT, kBlockLanes);
    barrier();
    ShiftLeft(floats.ReinterpretCast<uint32_t>(), floats.ReinterpretCast<uint32_t>(), uint32_t{1},
              static_cast<int32_t>(kBlockLanes));
    barrier();
  }

  __aicore__ inline void move(const Lanes& to, const Lanes& from) {
    Gather(as_bits(to), as_bits(from), offsets_.Get<uint32_t>(), 0, kBlockLanes);
    barrier();
  }

  // One block's fields and exponents to where their elements are. False: the payload is damaged.
  __aicore__ inline bool spread(const Plan& plan, uint32_t b, const Streams& streams) {
    constexpr int32_t n = kBlockLanes;
    const uint32_t first = b * kBlockLanes;
    const Lanes is_survivor = bits()[first];
    const Lanes symbols = block(0);
    const Lanes e = exponents_.Get<int16_t>()[first];
    const bool good = streams.good && find_exponents(plan, b, streams);
    if (!good) {
      clear_lanes(b);
      return false;
    }
    offsets_of(ranks()[first]);
    move(e, block(3));
    Mul(e, e, is_survivor, n);
    for (uint32_t i = 0; i < Split::kFields; ++i) {
      unpacker_.unpack(symbols, area(b)[field_at(i)], Split::field_width(i), streams.survivors,
                       masks_);
      move(work(i)[first], symbols);
      Mul(work(i)[first], work(i)[first], is_survivor, n);
      barrier();
    }
    if (plan.mode[b] == frame::kSignedZeros) {
      const Lanes zero_rank = block(1);
      const Lanes signs = block(3);
      unpacker_.unpack(signs, area(b)[kSignsAt], 1, kBlockLanes - streams.survivors, masks_);
      // A survivor behind the last zero looks at the next one.
      fill(signs, kBlockLanes - streams.survivors, kBlockLanes, (int16_t)0);
      Sub(zero_rank, lane_numbers_.Get<int16_t>(), ranks()[first], n);
      barrier();
      offsets_of(zero_rank);
      move(zero_rank, signs);
      // sign (1 - bit), where the field is 0 so far.
      Sub(zero_rank, zero_rank, is_survivor, n);
      barrier();
      Maxs(zero_rank, zero_rank, (int16_t)0, n);
      barrier();
      Or(as_bits(work(0))[first], as_bits(work(0))[first], as_bits(zero_rank), n);
      barrier();
    }
    return true;
  }

  // The survivors' exponents to block(3).
  __aicore__ inline bool find_exponents(const Plan& plan, uint32_t b, const Streams& streams) {
    constexpr int32_t n = kBlockLanes;
    const Lanes codes = block(0);
    const Lanes positions = block(1);
    const Lanes e = block(3);
    unpacker_.unpack(codes, area(b)[kCodesAt], 2, streams.survivors, masks_);
    // E = c - v = ~v + 1 + c.
    Not(as_bits(e), as_bits(codes), n);
    barrier();
    fill(codes, streams.survivors, kBlockLanes, (int16_t)1);
    barrier();
    Adds(e, e, static_cast<int16_t>(plan.center[b] + 1), n);
    lanes_to_half(codes, kBlockLanes);
    barrier();
    and_all(e, e, masks_.low_bits(Split::kExponentBits), kBlockLanes);
    CompareScalar(is_escape_.Get<uint8_t>(), as_half(codes), static_cast<half>(0.0f), CMPMODE::EQ,
                  kBlockLanes);
    barrier();
    uint64_t escapes = 0;
    GatherMask(as_bits(positions), as_bits(lane_numbers_.Get<int16_t>()),
               is_escape_.Get<uint16_t>(), true, kBlockLanes, GatherMaskParams(1, 1, 0, 0),
               escapes);
    hand_over<HardEvent::V_S>(pipe_);
    EscapeReader reader(area(b)[kTailAt], streams.tail, plan.center[b], kExponentMask);
    reader.stands_behind(streams.head);
    const bool good = reader.patch_lq2(e, positions, static_cast<uint32_t>(escapes));
    hand_over<HardEvent::S_V>(pipe_);
    return good;
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
  TBuf<TPosition::VECCALC> exponents_, work_, block_, offsets_, is_escape_, lane_numbers_, areas_;
  Masks masks_;
  // Of fields, that of e4m3 alone has 4 bits.
  StreamUnpacker<Split::field_width(0) == 4> unpacker_;
  Ranks ranks_;
  WordPairs pairs_;
};

}  // namespace memswap::ascend
