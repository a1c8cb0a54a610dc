// The decoder around all shapes: records, loading ahead, checksums and output. What a shape does is
// the Reader's business:
//
//   kWidth, kSlabBytes, kSlotBytes  of a block's payload when it is loaded ahead; 0: it is not
//   takes(mode)                     the modes of the shape, besides literal where it has that
//   kMaxUnits                       of a block's payload
//   init(pipe)
//   scratch()                       words, twice as many as a step has; free between calls
//   load(slot, from, mode, units)   starts the moves of one block's payload
//   decode(plan, x, slab, slots)    writes all of the plan's blocks; returns error bits
#pragma once

#include "checksum.h"
#include "decode_header.h"

namespace memswap::ascend {

// What a step was found to be when it was loaded.
struct Plan {
  static constexpr uint32_t kMaxBlocks = frame::kTileBlocks;
  uint32_t blocks;  // 0: nothing to do, or nothing that can be trusted
  uint32_t count;   // elements
  uint32_t mode[kMaxBlocks];
  uint32_t units[kMaxBlocks];
  uint32_t center[kMaxBlocks];
  GM_ADDR payload[kMaxBlocks];
  uint32_t checksum;
};

template <class Reader>
class FrameDecoder {
 public:
  __aicore__ inline FrameDecoder(TPipe* pipe, const DecodeJob& job, const FrameHeader& header)
      : pipe_(pipe),
        job_(job),
        header_(header),
        share_(job.elements, Reader::kSlabBytes),
        verify_(job.verify != 0 && header.checked) {}

  // Returns error bits.
  __aicore__ inline uint32_t run() {
    if (share_.first_tile >= share_.end_tile) {
      return 0;
    }
    init();
    const uint32_t first = share_.first_tile * kSteps;
    const uint32_t end = share_.end_tile * kSteps;
    load(first);
    for (uint32_t step = first; step < end; ++step) {
      if (step + 1 < end) {
        load(step + 1);
      }
      if (plans_[step % 2].blocks != 0) {
        decode(step);
      }
    }
    return errors_;
  }

 private:
  static constexpr uint32_t kWidth = Reader::kWidth;
  static constexpr uint32_t kStepBlocks = step_blocks(kWidth);
  static constexpr uint32_t kSteps = frame::kTileBlocks / kStepBlocks;  // per tile
  static constexpr uint32_t kStepBytes = kStepBlocks * kBlockLanes * kWidth;

  __aicore__ inline void init() {
    if constexpr (Reader::kSlabBytes != 0) {
      pipe_->InitBuffer(slabs_, 2, kStepBlocks * Reader::kSlabBytes);
    }
    if constexpr (Reader::kSlotBytes != 0) {
      pipe_->InitBuffer(payloads_, 2, kStepBlocks * Reader::kSlotBytes);
    }
    pipe_->InitBuffer(out_, 2, kStepBytes);
    reader_.init(pipe_);
    records_.init(pipe_, job_.frame + share_.records, share_.tiles);
    if (verify_) {
      checksum_.init(pipe_);
    }
  }

  // Checks the tile's record and starts the moves of one step.
  __aicore__ inline void load(uint32_t step) {
    Plan& plan = plans_[step % 2];
    plan.blocks = 0;
    const uint32_t block = step * kStepBlocks;
    if (step % kSteps == 0) {
      read_record(step / kSteps);
    }
    if (next_payload_ == nullptr || block >= share_.blocks) {
      return;
    }
    plan.count = Share::elements_from(job_.elements, block, kStepBlocks * kBlockLanes);
    plan.blocks = (plan.count + kBlockLanes - 1) / kBlockLanes;
    plan.checksum = record_.checksum;
    for (uint32_t b = 0; b < plan.blocks; ++b) {
      const uint32_t i = step % kSteps * kStepBlocks + b;
      plan.mode[b] = record_.block[i] >> 12;
      plan.units[b] = record_.block[i] & 0xfffu;
      plan.center[b] = record_.center[i];
      plan.payload[b] = next_payload_;
      next_payload_ += plan.units[b] * frame::kUnitBytes;
    }
    if constexpr (Reader::kSlabBytes != 0) {
      Bytes slab = slabs_.template AllocTensor<uint8_t>();
      GlobalTensor<uint8_t> from;
      from.SetGlobalBuffer(reinterpret_cast<__gm__ uint8_t*>(job_.frame + frame::kHeaderBytes +
                                                             uint64_t{block} * Reader::kSlabBytes));
      DataCopy(slab, from, plan.blocks * Reader::kSlabBytes);
      slabs_.EnQue(slab);
    }
    if constexpr (Reader::kSlotBytes != 0) {
      Bytes slots = payloads_.template AllocTensor<uint8_t>();
      for (uint32_t b = 0; b < plan.blocks; ++b) {
        if (plan.units[b] != 0) {
          reader_.load(slots[b * Reader::kSlotBytes], plan.payload[b], plan.mode[b], plan.units[b]);
        }
      }
      payloads_.EnQue(slots);
    }
  }

  __aicore__ inline void read_record(uint32_t tile) {
    record_ = records_.read(tile);
    const uint32_t left = share_.blocks - tile * frame::kTileBlocks;
    bool possible = true;
    for (uint32_t i = 0; i < frame::kTileBlocks; ++i) {
      const uint32_t mode = record_.block[i] >> 12;
      const uint32_t units = record_.block[i] & 0xfffu;
      possible = possible && (i < left ? Reader::takes(mode) && units <= Reader::kMaxUnits
                                       : record_.block[i] == 0);
    }
    next_payload_ = possible ? payloads_of(job_, header_, share_, record_) : nullptr;
    if (next_payload_ == nullptr) {
      errors_ |= frame::kBadRecord;
    }
  }

  __aicore__ inline void decode(uint32_t step) {
    const Plan& plan = plans_[step % 2];
    Bytes slab;
    Bytes slots;
    if constexpr (Reader::kSlabBytes != 0) {
      slab = slabs_.template DeQue<uint8_t>();
    }
    if constexpr (Reader::kSlotBytes != 0) {
      slots = payloads_.template DeQue<uint8_t>();
    }
    Bytes x = out_.template AllocTensor<uint8_t>();
    barrier();
    errors_ |= reader_.decode(plan, x, slab, slots);
    barrier();
    if constexpr (Reader::kSlabBytes != 0) {
      slabs_.FreeTensor(slab);
    }
    if constexpr (Reader::kSlotBytes != 0) {
      payloads_.FreeTensor(slots);
    }
    if (verify_) {
      verify(step, plan, x);
    }
    out_.EnQue(x);
    x = out_.template DeQue<uint8_t>();
    GlobalTensor<uint8_t> to;
    to.SetGlobalBuffer(reinterpret_cast<__gm__ uint8_t*>(
        job_.output + uint64_t{step} * kStepBlocks * kBlockLanes * kWidth));
    DataCopyPad(to, x, DataCopyExtParams(1, plan.count * kWidth, 0, 0, 0));
    out_.FreeTensor(x);
  }

  __aicore__ inline void verify(uint32_t step, const Plan& plan, const Bytes& x) {
    // Missing elements count as 0, and a frame may say otherwise.
    clear_bytes(pipe_, x.template ReinterpretCast<int16_t>(), plan.count * kWidth, kStepBytes);
    checksum_.compute(x.template ReinterpretCast<int32_t>(), reader_.scratch(), kStepBytes / 4);
    hand_over<HardEvent::V_S>(pipe_);
    if (step % kSteps == 0) {
      sum_ = 0;
    }
    sum_ += checksum_.result(step % kSteps * (kStepBytes / 4));
    const bool last = step % kSteps == kSteps - 1 || (step + 1) * kStepBlocks >= share_.blocks;
    if (last && static_cast<uint32_t>(sum_ % Checksum::kPrime) != plan.checksum) {
      errors_ |= frame::kBadChecksum;
    }
  }

  TPipe* pipe_;
  DecodeJob job_;
  FrameHeader header_;
  Share share_;
  bool verify_;
  TQue<TPosition::VECIN, 2> slabs_, payloads_;
  TQue<TPosition::VECOUT, 1> out_;
  Reader reader_;
  RecordReader records_;
  Checksum checksum_;
  TileRecord record_;
  GM_ADDR next_payload_ = nullptr;  // of the step to be loaded next; null: the tile is damaged
  Plan plans_[2];
  uint64_t sum_ = 0;  // of the tile's checksum
  uint32_t errors_ = 0;
};

// Starts the move of a payload from its first byte on.
__aicore__ inline void load_bytes(const Bytes& to, GM_ADDR from, uint32_t bytes) {
  GlobalTensor<uint8_t> global;
  global.SetGlobalBuffer(reinterpret_cast<__gm__ uint8_t*>(from), bytes);
  DataCopyPad(to, global, DataCopyExtParams(1, bytes, 0, 0, 0),
              DataCopyPadExtParams<uint8_t>(false, 0, 0, 0));
}

// A block whose payload says something impossible.
__aicore__ inline void clear_block(const Bytes& x, uint32_t bytes) {
  Duplicate(x.ReinterpretCast<int16_t>(), (int16_t)0, static_cast<int32_t>(bytes / 2));
}

// A literal block, of which `slab_bytes` stand in the slab. False: the payload has another length.
__aicore__ inline bool read_literal(const Bytes& x, const Bytes& slab, uint32_t slab_bytes,
                                    const Bytes& payload, uint32_t units, uint32_t block_bytes) {
  if (units * frame::kUnitBytes != block_bytes - slab_bytes) {
    clear_block(x, block_bytes);
    return false;
  }
  if (slab_bytes != 0) {
    copy_bytes(x, slab, slab_bytes);
  }
  if (slab_bytes != block_bytes) {
    copy_bytes(x[slab_bytes], payload, block_bytes - slab_bytes);
  }
  return true;
}

}  // namespace memswap::ascend
