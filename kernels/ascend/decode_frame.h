// The decoder around all layouts: records, loading ahead, checksums and output. What a layout does
// is the Reader's business:
//
//   kWidth, kSlabBytes, kSlotBytes  what of a block's payload is loaded ahead, at most; 0: nothing
//   takes(mode)                     the modes of the layout
//   kMaxUnits                       of a block's payload
//   kUnifiedBytes                   of UB that init takes
//   init(pipe)
//   scratch()                       words, twice as many as a step has; free between calls
//   load(slot, from, mode, units)   starts the moves of one block's payload, or of its beginning
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
  bool packed[kMaxBlocks];
  uint32_t center[kMaxBlocks];
  GM_ADDR payload[kMaxBlocks];
  uint32_t checksum;
};

// Whether the payloads of a mode begin with a bitmap.
__aicore__ inline bool has_bitmap(uint32_t mode) {
  return mode == frame::kZeros || mode == frame::kSignedZeros || mode == frame::kBitmap;
}

// Error bits of a block whose payload has been looked at.
__aicore__ inline uint32_t bad_payload_unless(bool good) {
  return good ? 0u : uint32_t{frame::kBadPayload};
}

// Of blocks whose payloads say something impossible.
__aicore__ inline void clear_block(const Bytes& x, uint32_t bytes) {
  Duplicate(x.ReinterpretCast<int16_t>(), (int16_t)0, static_cast<int32_t>(bytes / 2));
}

template <class Reader>
class FrameDecoder {
  static constexpr uint32_t kWidth = Reader::kWidth;
  static constexpr uint32_t kStepBlocks = step_blocks(kWidth);
  static constexpr uint32_t kSteps = frame::kTileBlocks / kStepBlocks;  // per tile
  static constexpr uint32_t kStepBytes = kStepBlocks * kBlockLanes * kWidth;
  static constexpr uint32_t kMoveSteps = move_steps(kWidth);

 public:
  // With the header's, before it, and the report's, behind it.
  static constexpr uint32_t kUnifiedBytes =
      unified(frame::kHeaderBytes) + 2 * unified(kMoveSteps * kStepBlocks * Reader::kSlabBytes) +
      2 * unified(kMoveSteps * kStepBlocks * Reader::kSlotBytes) +
      2 * unified(kMoveSteps * kStepBytes) + Reader::kUnifiedBytes + RecordReader::kUnifiedBytes +
      Checksum::kUnifiedBytes + kReportBytes;
  static_assert(kUnifiedBytes <= kUsableUnifiedBytes, "the decoder does not fit UB");

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
    load(first_step());
    for (uint32_t step = first_step(); step < end_step(); step += kMoveSteps) {
      if (step + kMoveSteps < end_step()) {
        load(step + kMoveSteps);
      }
      if (move_at(step).good) {
        decode_move(step);
      }
    }
    return errors_;
  }

 private:
  struct Move {
    bool good;       // some step of it is
    uint32_t count;  // elements
    Plan plans[kMoveSteps];
  };

  __aicore__ inline uint32_t first_step() const { return share_.first_tile * kSteps; }
  __aicore__ inline uint32_t end_step() const { return share_.end_tile * kSteps; }
  __aicore__ inline uint32_t steps_of(uint32_t move) const {
    const uint32_t left = end_step() - move;
    return left < kMoveSteps ? left : kMoveSteps;
  }
  __aicore__ inline Move& move_at(uint32_t step) {
    return moves_[(step - first_step()) / kMoveSteps % 2];
  }

  __aicore__ inline void init() {
    if constexpr (Reader::kSlabBytes != 0) {
      pipe_->InitBuffer(slabs_, 2, kMoveSteps * kStepBlocks * Reader::kSlabBytes);
    }
    if constexpr (Reader::kSlotBytes != 0) {
      pipe_->InitBuffer(payloads_, 2, kMoveSteps * kStepBlocks * Reader::kSlotBytes);
    }
    pipe_->InitBuffer(out_, 2, kMoveSteps * kStepBytes);
    reader_.init(pipe_);
    records_.init(pipe_, job_.frame + share_.records, share_.tiles);
    if (verify_) {
      checksum_.init(pipe_);
    }
  }

  // Checks the tiles' records and starts a move.
  __aicore__ inline void load(uint32_t step) {
    Move& move = move_at(step);
    const uint32_t block = step * kStepBlocks;
    const uint32_t steps = steps_of(step);
    move.good = false;
    for (uint32_t i = 0; i < steps; ++i) {
      make_plan(step + i, &move.plans[i]);
      move.good = move.good || move.plans[i].blocks != 0;
    }
    if (!move.good) {
      return;
    }
    move.count = Share::elements_from(job_.elements, block, steps * kStepBlocks * kBlockLanes);
    if constexpr (Reader::kSlabBytes != 0) {
      Bytes slabs = slabs_.template AllocTensor<uint8_t>();
      const uint32_t blocks = (move.count + kBlockLanes - 1) / kBlockLanes;
      load_bytes(slabs, job_.frame + frame::kHeaderBytes + uint64_t{block} * Reader::kSlabBytes,
                 blocks * Reader::kSlabBytes);
      slabs_.EnQue(slabs);
    }
    if constexpr (Reader::kSlotBytes != 0) {
      Bytes slots = payloads_.template AllocTensor<uint8_t>();
      for (uint32_t i = 0; i < steps; ++i) {
        const Plan& plan = move.plans[i];
        for (uint32_t b = 0; b < plan.blocks; ++b) {
          if (plan.units[b] != 0) {
            reader_.load(slots[(i * kStepBlocks + b) * Reader::kSlotBytes], plan.payload[b],
                         plan.mode[b], plan.units[b]);
          }
        }
      }
      payloads_.EnQue(slots);
    }
  }

  // Nothing but an empty plan where the tile is damaged or has no such step.
  __aicore__ inline void make_plan(uint32_t step, Plan* plan) {
    const uint32_t block = step * kStepBlocks;
    plan->blocks = 0;
    if (step % kSteps == 0) {
      read_record(step / kSteps);
    }
    if (next_payload_ == nullptr || block >= share_.blocks) {
      return;
    }
    plan->count = Share::elements_from(job_.elements, block, kStepBlocks * kBlockLanes);
    plan->blocks = (plan->count + kBlockLanes - 1) / kBlockLanes;
    plan->checksum = record_.checksum;
    for (uint32_t b = 0; b < plan->blocks; ++b) {
      const uint32_t i = step % kSteps * kStepBlocks + b;
      plan->mode[b] = record_.mode_of(i);
      plan->units[b] = record_.units_of(i);
      plan->packed[b] = record_.is_packed(i);
      plan->center[b] = record_.center[i];
      plan->payload[b] = next_payload_;
      next_payload_ += plan->units[b] * frame::kUnitBytes;
    }
  }

  __aicore__ inline void read_record(uint32_t tile) {
    record_ = records_.read(tile);
    const uint32_t left = share_.blocks - tile * frame::kTileBlocks;
    bool possible = true;
    for (uint32_t i = 0; i < frame::kTileBlocks; ++i) {
      const uint32_t mode = record_.mode_of(i);
      const bool fits = Reader::takes(mode) && record_.units_of(i) <= Reader::kMaxUnits &&
                        (!record_.is_packed(i) || has_bitmap(mode));
      possible = possible && (i < left ? fits : record_.block[i] == 0);
    }
    next_payload_ = possible ? payloads_of(job_, header_, share_, record_) : nullptr;
    if (next_payload_ == nullptr) {
      errors_ |= frame::kBadRecord;
    }
  }

  __aicore__ inline void decode_move(uint32_t move) {
    const Move& moved = move_at(move);
    Bytes slabs;
    Bytes slots;
    if constexpr (Reader::kSlabBytes != 0) {
      slabs = slabs_.template DeQue<uint8_t>();
    }
    if constexpr (Reader::kSlotBytes != 0) {
      slots = payloads_.template DeQue<uint8_t>();
    }
    Bytes x = out_.template AllocTensor<uint8_t>();
    barrier();
    for (uint32_t i = 0; i < steps_of(move); ++i) {
      decode(move + i, moved.plans[i], x[i * kStepBytes], slabs, slots, i * kStepBlocks);
    }
    if constexpr (Reader::kSlabBytes != 0) {
      slabs_.FreeTensor(slabs);
    }
    if constexpr (Reader::kSlotBytes != 0) {
      payloads_.FreeTensor(slots);
    }
    out_.EnQue(x);
    x = out_.template DeQue<uint8_t>();
    store_bytes(job_.output + uint64_t{move} * kStepBytes, x, moved.count * kWidth);
    out_.FreeTensor(x);
  }

  // One step, whose first block is block `block` of the move.
  __aicore__ inline void decode(uint32_t step, const Plan& plan, const Bytes& x, const Bytes& slabs,
                                const Bytes& slots, uint32_t block) {
    if (plan.blocks == 0) {
      clear_block(x, kStepBytes);
      barrier();
      return;
    }
    Bytes slab;
    Bytes slot;
    if constexpr (Reader::kSlabBytes != 0) {
      slab = slabs[block * Reader::kSlabBytes];
    }
    if constexpr (Reader::kSlotBytes != 0) {
      slot = slots[block * Reader::kSlotBytes];
    }
    errors_ |= reader_.decode(plan, x, slab, slot);
    barrier();
    if (verify_) {
      verify(step, plan, x);
    }
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
    if (last && static_cast<uint32_t>(sum_ % frame::kChecksumPrime) != plan.checksum) {
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
  Move moves_[2];
  uint64_t sum_ = 0;  // of the tile's checksum
  uint32_t errors_ = 0;
};

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
