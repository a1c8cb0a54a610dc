// Layout bits: one-byte elements that are 0 or 1 as a bitmap; blocks with anything else are
// literal.
#pragma once

#include "bitmaps.h"
#include "raw.h"
#include "statistics.h"

namespace memswap::ascend {

class BitsCoder : public ChecksumScratch<1> {
  static constexpr uint32_t kBlocks = step_blocks(1);
  static constexpr uint32_t kLanes = kBlocks * kBlockLanes;
  static_assert(BitmapWriter<kBlocks>::kScratchLanes <= kLanes);

  static constexpr uint32_t kCommonBytes = unified(2 * kLanes * 2) +
                                           unified(kBlocks * frame::kBitmapBytes) +
                                           BitmapWriter<kBlocks>::kUnifiedBytes;

 public:
  static constexpr uint32_t kWidth = 1;
  static constexpr uint32_t kSlabBytes = 0;
  static constexpr bool kHasPayloads = true;
  static constexpr uint32_t kMeasureBytes =
      kCommonBytes + ChecksumScratch<1>::kUnifiedBytes + Greatest::kUnifiedBytes;
  static constexpr uint32_t kStoreBytes = kCommonBytes + 2 * unified(kBlocks * frame::kBitmapBytes);

  __aicore__ inline void init_measure(TPipe* pipe, const EncodeJob&) {
    init_common(pipe);
    ChecksumScratch<1>::init(pipe);
    greatest_.init(pipe);
  }

  __aicore__ inline void init_store(TPipe* pipe) {
    init_common(pipe);
    pipe->InitBuffer(slots_, 2, kBlocks * frame::kBitmapBytes);
  }

  __aicore__ inline void measure(const Step& step, const Bytes& x, TileRecord* record,
                                 HeaderCounters*) {
    const Lanes values = lanes_.Get<int16_t>();
    find_bits(x);
    half_to_lanes(values, kLanes);
    barrier();
    uint32_t greatest[kBlocks];
    greatest_.find(greatest, values, values[kLanes], kBlocks);
    writer_.prepare(bitmaps_.Get<uint8_t>(), values);
    for (uint32_t b = 0; b < step.blocks; ++b) {
      const bool literal = greatest[b] > 1;
      const uint32_t length = literal ? kBlockLanes : writer_.length(b);
      record->set(step.first + b, literal ? frame::kLiteral : frame::kBitmap,
                  round_up(length, frame::kUnitBytes) / frame::kUnitBytes, 0,
                  length < frame::kBitmapBytes);
    }
  }

  __aicore__ inline void encode(const Step& step, const Bytes& x, const Bytes&,
                                const TileRecord& record, GM_ADDR to) {
    find_bits(x);
    writer_.prepare(bitmaps_.Get<uint8_t>(), lanes_.Get<int16_t>());
    Bytes slots = slots_.AllocTensor<uint8_t>();
    for (uint32_t b = 0; b < step.blocks; ++b) {
      if (record.mode_of(step.first + b) == frame::kBitmap) {
        writer_.write(slots[b * frame::kBitmapBytes], b);
      }
    }
    slots_.EnQue(slots);
    slots = slots_.DeQue<uint8_t>();
    LiteralWriter literals(pipe_);
    for (uint32_t b = 0; b < step.blocks; ++b) {
      const uint32_t bytes = record.units_of(step.first + b) * frame::kUnitBytes;
      if (record.mode_of(step.first + b) == frame::kLiteral) {
        literals.store(to, x[b * kBlockLanes], kBlockLanes);
      } else {
        store_bytes(to, slots[b * frame::kBitmapBytes], bytes);
      }
      to += bytes;
    }
    literals.end();
    slots_.FreeTensor(slots);
  }

 private:
  __aicore__ inline void init_common(TPipe* pipe) {
    pipe_ = pipe;
    pipe->InitBuffer(lanes_, 2 * kLanes * 2);
    pipe->InitBuffer(bitmaps_, kBlocks * frame::kBitmapBytes);
    writer_.init(pipe);
  }

  // The step's bitmaps; its elements are lanes of half then.
  __aicore__ inline void find_bits(const Bytes& x) {
    const Lanes values = lanes_.Get<int16_t>();
    bytes_to_half(values, x, kLanes);
    barrier();
    CompareScalar(bitmaps_.Get<uint8_t>(), as_half(values), static_cast<half>(0.0f), CMPMODE::NE,
                  kLanes);
    barrier();
  }

  TPipe* pipe_;
  TQue<TPosition::VECOUT, 1> slots_;
  TBuf<TPosition::VECCALC> lanes_, bitmaps_;
  Greatest greatest_;
  BitmapWriter<kBlocks> writer_;
};

class BitsReader : public ChecksumScratch<1> {
  static constexpr uint32_t kBlocks = step_blocks(1);

 public:
  static constexpr uint32_t kWidth = 1;
  static constexpr uint32_t kSlabBytes = 0;
  static constexpr uint32_t kSlotBytes = kBlockLanes;
  static constexpr uint32_t kMaxUnits = kSlotBytes / frame::kUnitBytes;

 private:
  using Bitmaps = BitmapReader<kBlocks, kSlotBytes>;

 public:
  static constexpr uint32_t kUnifiedBytes = ChecksumScratch<1>::kUnifiedBytes +
                                            unified(Bitmaps::kScratchLanes * 2) +
                                            Ranks::kUnifiedBytes + Bitmaps::kUnifiedBytes;

  __aicore__ static constexpr bool takes(uint32_t mode) {
    return mode == frame::kBitmap || mode == frame::kLiteral;
  }

  __aicore__ inline void init(TPipe* pipe) {
    ChecksumScratch<1>::init(pipe);
    pipe->InitBuffer(lanes_, Bitmaps::kScratchLanes * 2);
    ranks_.init(pipe);
    bitmaps_.init(pipe);
  }

  __aicore__ inline void load(const Bytes& slot, GM_ADDR from, uint32_t, uint32_t units) {
    load_bytes(slot, from, units * frame::kUnitBytes);
  }

  __aicore__ inline uint32_t decode(const Plan& plan, const Bytes& x, const Bytes&,
                                    const Bytes& slots) {
    const Lanes values = lanes_.Get<int16_t>();
    uint32_t lengths[kBlocks];
    bitmaps_.read(plan, slots, values, ranks_, lengths);
    uint32_t errors = 0;
    for (uint32_t b = 0; b < plan.blocks; ++b) {
      const Bytes block = x[b * kBlockLanes];
      bool good;
      if (plan.mode[b] == frame::kLiteral) {
        good = read_literal(block, block, 0, slots[b * kSlotBytes], plan.units[b], kBlockLanes);
      } else {
        good = lengths[b] != 0 &&
               round_up(lengths[b], frame::kUnitBytes) == plan.units[b] * frame::kUnitBytes;
        bitmaps_.expand(values, b);
        barrier();
        half_to_bytes(block, values, kBlockLanes);
        barrier();
      }
      errors |= bad_payload_unless(good);
    }
    return errors;
  }

 private:
  TBuf<TPosition::VECCALC> lanes_;
  Ranks ranks_;
  Bitmaps bitmaps_;
};

}  // namespace memswap::ascend
