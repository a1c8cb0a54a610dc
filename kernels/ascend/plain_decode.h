// The decoder around shapes that are not split, the counterpart of plain_encode.h.
#pragma once

#include "checksum.h"
#include "decode_job.h"
#include "plain_encode.h"

namespace memswap::ascend {

template <uint32_t kWidth, class Codec>
class PlainDecoder {
  using Step = PlainStep<kWidth>;

 public:
  __aicore__ inline PlainDecoder(TPipe* pipe, const DecodeJob& job, const FrameHeader& header)
      : pipe_(pipe),
        job_(job),
        header_(header),
        share_(job.elements, Codec::kSlabBytes),
        verify_(job.verify != 0 && header.checked) {}

  // Returns error bits.
  __aicore__ inline uint32_t run() {
    if (share_.first_tile >= share_.end_tile) {
      return 0;
    }
    if constexpr (Codec::kSlabBytes != 0) {
      pipe_->InitBuffer(slabs_, 2, Step::kBlocks * Codec::kSlabBytes);
    }
    if constexpr (Codec::kPayloadBytes != 0) {
      pipe_->InitBuffer(payloads_, 2, Step::kBlocks * Codec::kPayloadBytes);
    }
    pipe_->InitBuffer(out_, 2, Step::kBytes);
    pipe_->InitBuffer(work_, 2 * Step::kBytes);
    codec_.init(pipe_);
    records_.init(pipe_, job_.frame + share_.records, share_.tiles);
    if (verify_) {
      checksum_.init(pipe_);
    }
    for (uint32_t tile = share_.first_tile; tile < share_.end_tile; ++tile) {
      if (!read_record(tile)) {
        errors_ |= frame::kBadRecord;
        continue;
      }
      uint64_t sum = 0;
      for (uint32_t step = 0; step < Step::kSteps; ++step) {
        const uint32_t block = tile * frame::kTileBlocks + step * Step::kBlocks;
        if (block < share_.blocks) {
          sum += decode(block, step);
        }
      }
      if (verify_ && static_cast<uint32_t>(sum % Checksum::kPrime) != record_.checksum) {
        errors_ |= frame::kBadChecksum;
      }
    }
    return errors_;
  }

 private:
  __aicore__ inline bool read_record(uint32_t tile) {
    record_ = records_.read(tile);
    const uint32_t left = share_.blocks - tile * frame::kTileBlocks;
    for (uint32_t i = 0; i < frame::kTileBlocks; ++i) {
      const uint32_t mode = record_.block[i] >> 12;
      const uint32_t units = record_.block[i] & 0xfffu;
      const bool possible =
          i < left ? (mode == Codec::kMode || mode == frame::kLiteral) &&
                         units * frame::kUnitBytes <= Step::kBlockBytes - Codec::kSlabBytes
                   : record_.block[i] == 0;
      if (!possible) {
        return false;
      }
    }
    payloads_at_ = payloads_of(job_, header_, share_, record_);
    return payloads_at_ != nullptr;
  }

  // One step; returns its part of the checksum.
  __aicore__ inline uint64_t decode(uint32_t block, uint32_t step) {
    const uint32_t count = Share::elements_from(job_.elements, block, Step::kBlocks * kBlockLanes);
    const uint32_t blocks = (count + kBlockLanes - 1) / kBlockLanes;
    GlobalTensor<uint8_t> from;
    Bytes slab;
    if constexpr (Codec::kSlabBytes != 0) {
      slab = slabs_.template AllocTensor<uint8_t>();
      from.SetGlobalBuffer(reinterpret_cast<__gm__ uint8_t*>(job_.frame + frame::kHeaderBytes +
                                                             uint64_t{block} * Codec::kSlabBytes));
      DataCopy(slab, from, blocks * Codec::kSlabBytes);
      slabs_.EnQue(slab);
      slab = slabs_.template DeQue<uint8_t>();
    }
    Bytes payload;
    if constexpr (Codec::kPayloadBytes != 0) {
      payload = payloads_.template AllocTensor<uint8_t>();
      for (uint32_t b = 0; b < blocks; ++b) {
        const uint32_t i = step * Step::kBlocks + b;
        const uint32_t mode = record_.block[i] >> 12;
        const uint32_t bytes = (record_.block[i] & 0xfffu) * frame::kUnitBytes;
        codec_.load(payload[b * Codec::kPayloadBytes], payloads_at_, mode, bytes);
        payloads_at_ += bytes;
      }
      payloads_.EnQue(payload);
      payload = payloads_.template DeQue<uint8_t>();
    }
    Bytes x = out_.template AllocTensor<uint8_t>();
    barrier();
    for (uint32_t b = 0; b < blocks; ++b) {
      const uint32_t i = step * Step::kBlocks + b;
      Bytes block_slab;
      Bytes block_payload;
      if constexpr (Codec::kSlabBytes != 0) {
        block_slab = slab[b * Codec::kSlabBytes];
      }
      if constexpr (Codec::kPayloadBytes != 0) {
        block_payload = payload[b * Codec::kPayloadBytes];
      }
      if (!codec_.decode(x[b * Step::kBlockBytes], block_slab, block_payload,
                         record_.block[i] >> 12, (record_.block[i] & 0xfffu) * frame::kUnitBytes,
                         record_.center[i])) {
        errors_ |= frame::kBadPayload;
        Duplicate(x[b * Step::kBlockBytes].template ReinterpretCast<int16_t>(), (int16_t)0,
                  static_cast<int32_t>(Step::kBlockBytes / 2));
      }
    }
    barrier();
    if constexpr (Codec::kSlabBytes != 0) {
      slabs_.FreeTensor(slab);
    }
    if constexpr (Codec::kPayloadBytes != 0) {
      payloads_.FreeTensor(payload);
    }
    uint64_t sum = 0;
    if (verify_) {
      clear_bytes(pipe_, x.template ReinterpretCast<int16_t>(), count * kWidth, Step::kBytes);
      checksum_.compute(x.template ReinterpretCast<int32_t>(), work_.Get<int32_t>(),
                        Step::kBytes / 4);
      hand_over<HardEvent::V_S>(pipe_);
      sum = checksum_.result(step * (Step::kBytes / 4));
    }
    out_.EnQue(x);
    x = out_.template DeQue<uint8_t>();
    PayloadWriter::store(job_.output + uint64_t{block} * Step::kBlockBytes, x, count * kWidth);
    out_.FreeTensor(x);
    return sum;
  }

  TPipe* pipe_;
  DecodeJob job_;
  FrameHeader header_;
  Share share_;
  bool verify_;
  TQue<TPosition::VECIN, 1> slabs_, payloads_;
  TQue<TPosition::VECOUT, 1> out_;
  TBuf<TPosition::VECCALC> work_;
  Codec codec_;
  RecordReader records_;
  Checksum checksum_;
  TileRecord record_;
  GM_ADDR payloads_at_ = nullptr;
  uint32_t errors_ = 0;
};

}  // namespace memswap::ascend
