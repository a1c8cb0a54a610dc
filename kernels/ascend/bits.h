// Shape bits: one-byte elements that are 0 or 1 as a bitmap; blocks with anything else are literal.
#pragma once

#include "raw.h"
#include "statistics.h"

namespace memswap::ascend {

class Bits {
 public:
  static constexpr uint32_t kSlabBytes = frame::kBitmapBytes;
  static constexpr uint32_t kPayloadBytes = kBlockLanes;
  static constexpr uint32_t kMode = frame::kBitmap;
  static constexpr uint32_t kBlocks = PlainStep<1>::kBlocks;
  static constexpr uint32_t kLiteralBytes = kBlockLanes - kSlabBytes;

  __aicore__ inline void init(TPipe* pipe) {
    pipe_ = pipe;
    pipe->InitBuffer(lanes_, 2 * kBlocks * kBlockLanes * 2);
    pipe->InitBuffer(greatest_, 64);
    pipe->InitBuffer(ones_, kBlockLanes * 2);
    Duplicate(ones_.Get<half>(), static_cast<half>(1.0f), static_cast<int32_t>(kBlockLanes));
    barrier();
  }

  __aicore__ inline bool encode(const Bytes& x, const Bytes& slab, uint32_t, uint32_t blocks,
                                uint32_t first, TileRecord* record, PayloadWriter* payloads) {
    constexpr uint32_t n = kBlocks * kBlockLanes;
    const Lanes values = lanes_.Get<int16_t>();
    const LocalTensor<half> greatest = greatest_.Get<half>();
    const LocalTensor<int32_t> words = greatest_.Get<int32_t>()[8];
    bytes_to_half(values, x, n);
    barrier();
    CompareScalar(slab, as_half(values), static_cast<half>(0.0f), CMPMODE::NE, n);
    barrier();
    half_to_lanes(values, n);
    barrier();
    const Lanes folded = fold_to_64<Fold::kMax>(values, values[n], kBlocks);
    lanes_to_half(folded, kBlocks * 64);
    hand_over<HardEvent::S_V>(pipe_);
    barrier();
    WholeReduceMax(greatest, as_half(folded), 64, static_cast<int32_t>(kBlocks), 1, 1, 4,
                   ReduceOrder::ORDER_ONLY_VALUE);
    barrier();
    Cast(words, greatest, RoundMode::CAST_RINT, kBlocks);
    hand_over<HardEvent::V_S>(pipe_);
    bool stored = true;
    bool moved = false;
    for (uint32_t b = 0; b < blocks; ++b) {
      if (words.GetValue(b) <= 1) {
        record->set(first + b, frame::kBitmap, 0, 0);
        continue;
      }
      barrier();
      copy_bytes(slab[b * kSlabBytes], x[b * kBlockLanes], kSlabBytes);
      record->set(first + b, frame::kLiteral, kLiteralBytes / frame::kUnitBytes, 0);
      GM_ADDR to = payloads->take(kLiteralBytes / frame::kUnitBytes);
      if (to == nullptr) {
        stored = false;
        continue;
      }
      if (!moved) {
        hand_over<HardEvent::V_MTE3>(pipe_);  // and, by V's own wait, what MTE2 loaded
        moved = true;
      }
      PayloadWriter::store(to, x[b * kBlockLanes + kSlabBytes], kLiteralBytes);
    }
    if (moved) {
      hand_over<HardEvent::MTE3_V>(pipe_);  // before the queue gives x away
    }
    return stored;
  }

  __aicore__ inline void load(const Bytes& payload, GM_ADDR from, uint32_t mode, uint32_t bytes) {
    if (mode == frame::kLiteral && bytes == kLiteralBytes) {
      GlobalTensor<uint8_t> global;
      global.SetGlobalBuffer(reinterpret_cast<__gm__ uint8_t*>(from), bytes);
      DataCopyPad(payload, global, DataCopyExtParams(1, bytes, 0, 0, 0),
                  DataCopyPadExtParams<uint8_t>(false, 0, 0, 0));
    }
  }

  __aicore__ inline bool decode(const Bytes& x, const Bytes& slab, const Bytes& payload,
                                uint32_t mode, uint32_t bytes, uint32_t) {
    if (bytes != (mode == frame::kLiteral ? kLiteralBytes : 0)) {
      return false;
    }
    if (mode == frame::kLiteral) {
      copy_bytes(x, slab, kSlabBytes);
      copy_bytes(x[kSlabBytes], payload, kLiteralBytes);
      return true;
    }
    const Lanes values = lanes_.Get<int16_t>();
    barrier();
    Select(as_half(values), slab, ones_.Get<half>(), static_cast<half>(0.0f),
           SELMODE::VSEL_TENSOR_SCALAR_MODE, kBlockLanes);
    barrier();
    half_to_bytes(x, values, kBlockLanes);
    return true;
  }

 private:
  TPipe* pipe_;
  TBuf<TPosition::VECCALC> lanes_, greatest_, ones_;
};

}  // namespace memswap::ascend
