// Shape bits: one-byte elements that are 0 or 1 as a bitmap; blocks with anything else are literal.
#pragma once

#include "bitmaps.h"
#include "raw.h"
#include "statistics.h"

namespace memswap::ascend {

class BitsCoder : public ChecksumScratch<1> {
 public:
  static constexpr uint32_t kWidth = 1;
  static constexpr uint32_t kSlabBytes = 0;

  __aicore__ inline void init(TPipe* pipe) {
    pipe_ = pipe;
    ChecksumScratch<1>::init(pipe);
    pipe->InitBuffer(lanes_, 2 * kLanes * 2);
    pipe->InitBuffer(bitmaps_, kBlocks * frame::kBitmapBytes);
    pipe->InitBuffer(slots_, 2, kBlocks * frame::kBitmapBytes);
    greatest_.init(pipe);
    writer_.init(pipe);
  }

  __aicore__ inline void encode(const Step& step, const Bytes& x, const Bytes&,
                                PayloadWriter* payloads, HeaderCounters*) {
    const Lanes values = lanes_.Get<int16_t>();
    const Bytes bitmaps = bitmaps_.Get<uint8_t>();
    bytes_to_half(values, x, kLanes);
    barrier();
    CompareScalar(bitmaps, as_half(values), static_cast<half>(0.0f), CMPMODE::NE, kLanes);
    barrier();
    half_to_lanes(values, kLanes);
    barrier();
    uint32_t greatest[kBlocks];
    greatest_.find(greatest, values, values[kLanes], kBlocks);
    writer_.prepare(bitmaps, values);
    Bytes slots = slots_.AllocTensor<uint8_t>();
    uint32_t lengths[kBlocks];
    for (uint32_t b = 0; b < step.blocks; ++b) {
      lengths[b] = greatest[b] <= 1 ? writer_.write(slots[b * frame::kBitmapBytes], b) : 0;
    }
    slots_.EnQue(slots);
    slots = slots_.DeQue<uint8_t>();
    LiteralWriter literals(pipe_);
    for (uint32_t b = 0; b < step.blocks; ++b) {
      const bool literal = lengths[b] == 0;
      const uint32_t bytes = literal ? kBlockLanes : round_up(lengths[b], frame::kUnitBytes);
      GM_ADDR to =
          payloads->add(step.first + b, literal ? frame::kLiteral : frame::kBitmap,
                        bytes / frame::kUnitBytes, 0, !literal && lengths[b] < frame::kBitmapBytes);
      if (to == nullptr) {
        continue;
      }
      if (literal) {
        literals.store(to, x[b * kBlockLanes], kBlockLanes);
      } else {
        store_bytes(to, slots[b * frame::kBitmapBytes], bytes);
      }
    }
    literals.end();
    slots_.FreeTensor(slots);
  }

 private:
  static constexpr uint32_t kBlocks = step_blocks(1);
  static constexpr uint32_t kLanes = kBlocks * kBlockLanes;
  static_assert(BitmapWriter<kBlocks>::kScratchLanes <= kLanes);

  TPipe* pipe_;
  TQue<TPosition::VECOUT, 1> slots_;
  TBuf<TPosition::VECCALC> lanes_, bitmaps_;
  Greatest greatest_;
  BitmapWriter<kBlocks> writer_;
};

class BitsReader : public ChecksumScratch<1> {
 public:
  static constexpr uint32_t kWidth = 1;
  static constexpr uint32_t kSlabBytes = 0;
  static constexpr uint32_t kSlotBytes = kBlockLanes;
  static constexpr uint32_t kMaxUnits = kSlotBytes / frame::kUnitBytes;

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
  static constexpr uint32_t kBlocks = step_blocks(1);
  using Bitmaps = BitmapReader<kBlocks, kSlotBytes>;

  TBuf<TPosition::VECCALC> lanes_;
  Ranks ranks_;
  Bitmaps bitmaps_;
};

}  // namespace memswap::ascend
