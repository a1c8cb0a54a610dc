// Shape bits: one-byte elements that are 0 or 1 as a bitmap; blocks with anything else are literal.
#pragma once

#include "raw.h"
#include "statistics.h"

namespace memswap::ascend {

class BitsCoder : public ChecksumScratch<1> {
 public:
  static constexpr uint32_t kWidth = 1;
  static constexpr uint32_t kSlabBytes = frame::kBitmapBytes;

  __aicore__ inline void init(TPipe* pipe) {
    pipe_ = pipe;
    ChecksumScratch<1>::init(pipe);
    pipe->InitBuffer(lanes_, 2 * kBlocks * kBlockLanes * 2);
    greatest_.init(pipe);
  }

  __aicore__ inline void encode(const Step& step, const Bytes& x, const Bytes& slab,
                                PayloadWriter* payloads, HeaderCounters*) {
    constexpr uint32_t n = kBlocks * kBlockLanes;
    const Lanes values = lanes_.Get<int16_t>();
    bytes_to_half(values, x, n);
    barrier();
    CompareScalar(slab, as_half(values), static_cast<half>(0.0f), CMPMODE::NE, n);
    barrier();
    half_to_lanes(values, n);
    barrier();
    uint32_t greatest[kBlocks];
    greatest_.find(greatest, values, values[n], kBlocks);
    LiteralWriter literals(pipe_);
    for (uint32_t b = 0; b < step.blocks; ++b) {
      if (greatest[b] <= 1) {
        payloads->set(step.first + b, frame::kBitmap, 0, 0);
        continue;
      }
      barrier();
      copy_bytes(slab[b * kSlabBytes], x[b * kBlockLanes], kSlabBytes);
      GM_ADDR to =
          payloads->add(step.first + b, frame::kLiteral, kLiteralBytes / frame::kUnitBytes, 0);
      if (to == nullptr) {
        continue;
      }
      literals.store(to, x[b * kBlockLanes + kSlabBytes], kLiteralBytes);
    }
    literals.end();
  }

 private:
  static constexpr uint32_t kBlocks = step_blocks(1);
  static constexpr uint32_t kLiteralBytes = kBlockLanes - kSlabBytes;

  TPipe* pipe_;
  TBuf<TPosition::VECCALC> lanes_;
  Greatest greatest_;
};

class BitsReader : public ChecksumScratch<1> {
 public:
  static constexpr uint32_t kWidth = 1;
  static constexpr uint32_t kSlabBytes = frame::kBitmapBytes;
  static constexpr uint32_t kSlotBytes = kBlockLanes - kSlabBytes;
  static constexpr uint32_t kMaxUnits = kSlotBytes / frame::kUnitBytes;

  __aicore__ static constexpr bool takes(uint32_t mode) {
    return mode == frame::kBitmap || mode == frame::kLiteral;
  }

  __aicore__ inline void init(TPipe* pipe) {
    ChecksumScratch<1>::init(pipe);
    pipe->InitBuffer(lanes_, kBlockLanes * 2);
    pipe->InitBuffer(ones_, kBlockLanes * 2);
    Duplicate(ones_.Get<half>(), static_cast<half>(1.0f), static_cast<int32_t>(kBlockLanes));
    barrier();
  }

  __aicore__ inline void load(const Bytes& slot, GM_ADDR from, uint32_t, uint32_t units) {
    load_bytes(slot, from, units * frame::kUnitBytes);
  }

  __aicore__ inline uint32_t decode(const Plan& plan, const Bytes& x, const Bytes& slab,
                                    const Bytes& slots) {
    const Lanes values = lanes_.Get<int16_t>();
    uint32_t errors = 0;
    for (uint32_t b = 0; b < plan.blocks; ++b) {
      const Bytes block = x[b * kBlockLanes];
      const Bytes bitmap = slab[b * kSlabBytes];
      if (plan.mode[b] == frame::kLiteral) {
        errors |= read_literal(block, bitmap, kSlabBytes, slots[b * kSlotBytes], plan.units[b],
                               kBlockLanes)
                      ? 0u
                      : uint32_t{frame::kBadPayload};
        continue;
      }
      errors |= plan.units[b] == 0 ? 0u : uint32_t{frame::kBadPayload};
      barrier();
      Select(as_half(values), bitmap, ones_.Get<half>(), static_cast<half>(0.0f),
             SELMODE::VSEL_TENSOR_SCALAR_MODE, kBlockLanes);
      barrier();
      half_to_bytes(block, values, kBlockLanes);
    }
    return errors;
  }

 private:
  TBuf<TPosition::VECCALC> lanes_, ones_;
};

}  // namespace memswap::ascend
