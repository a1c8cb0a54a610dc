// The encoder around all shapes: loading, records, checksums, slabs and counters. What becomes of a
// step's blocks is the Coder's business:
//
//   kWidth, kSlabBytes
//   init(pipe)
//   scratch()   words, twice as many as a step has; free between calls of encode
//   encode(step, x, slab, payloads, counters)   x: the step's elements, missing ones 0
#pragma once

#include "checksum.h"
#include "decode_header.h"
#include "payload_writer.h"

namespace memswap::ascend {

template <class Coder>
class FrameEncoder {
 public:
  __aicore__ inline FrameEncoder(TPipe* pipe, const EncodeJob& job)
      : pipe_(pipe), job_(job), share_(job.elements, Coder::kSlabBytes), payloads_(job, share_) {}

  __aicore__ inline void run() {
    if (job_.pass == static_cast<uint32_t>(Pass::kStore)) {
      store_placed();
    } else {
      encode_all();
    }
  }

 private:
  static constexpr uint32_t kWidth = Coder::kWidth;
  static constexpr uint32_t kStepBlocks = step_blocks(kWidth);
  static constexpr uint32_t kSteps = frame::kTileBlocks / kStepBlocks;  // per tile
  static constexpr uint32_t kStepBytes = kStepBlocks * kBlockLanes * kWidth;
  static constexpr uint32_t kMoveSteps = move_steps(kWidth);

  __aicore__ inline void encode_all() {
    counters_.init(pipe_, job_.frame);
    if (share_.first_tile < share_.end_tile) {
      init();
      load(first_step());
      for (uint32_t step = first_step(); step < end_step(); step += kMoveSteps) {
        if (step + kMoveSteps < end_step()) {
          load(step + kMoveSteps);
        }
        encode_move(step);
      }
      records_.flush();
      if (share_.first_tile == 0) {
        counters_.set_var_used(payloads_.next());
      }
    }
    counters_.store();
  }

  // Codes the core's deferred tiles again, for their payloads alone.
  __aicore__ inline void store_placed() {
    if (share_.first_tile >= share_.end_tile || !any_placed()) {
      return;
    }
    job_.checksum = 0;
    stores_slabs_ = false;
    init();
    RecordReader reader;
    reader.init(pipe_, job_.frame + share_.records, share_.tiles);
    uint32_t move = next_placed(first_step(), &reader);
    if (move < end_step()) {
      load(move);
    }
    while (move < end_step()) {
      const uint32_t next = next_placed(move + kMoveSteps, &reader);
      if (next < end_step()) {
        load(next);
      }
      store_move(move, &reader);
      move = next;
    }
  }

  // The core's first move from `step` on with a tile that is_placed, or what is behind its last
  // one.
  __aicore__ inline uint32_t next_placed(uint32_t step, RecordReader* reader) {
    for (; step < end_step(); step += kMoveSteps) {
      for (uint32_t i = step; i < end_of_move(step); ++i) {
        if (is_placed(reader->read(i / kSteps))) {
          return step;
        }
      }
    }
    return step;
  }

  // Whether a tile was deferred and has payloads. The first core's other tiles have been stored.
  __aicore__ inline bool is_placed(const TileRecord& record) {
    const bool in_overflow = (record.base & frame::kBaseInOverflow) != 0;
    return record.units != 0 && (share_.first_tile != 0 || in_overflow);
  }

  __aicore__ inline bool any_placed() {
    TBuf<TPosition::VECCALC> buffer;
    const LocalTensor<uint32_t> words = load_header(pipe_, &buffer, job_.frame);
    const bool in_var = share_.first_tile != 0 && words.GetValue(HeaderWord::kVarUsed) != 0;
    return words.GetValue(HeaderWord::kStatus) == frame::kOk &&
           (in_var || words.GetValue(HeaderWord::kOverflowUsed) != 0);
  }

  __aicore__ inline void init() {
    pipe_->InitBuffer(in_, 2, kMoveSteps * kStepBytes);
    if constexpr (Coder::kSlabBytes != 0) {
      pipe_->InitBuffer(slabs_, 2, kMoveSteps * kStepBlocks * Coder::kSlabBytes);
    }
    coder_.init(pipe_);
    if (job_.checksum != 0) {
      checksum_.init(pipe_);
    }
    records_.init(pipe_, job_.frame + share_.records, share_.first_tile);
  }

  __aicore__ inline uint32_t first_step() const { return share_.first_tile * kSteps; }
  __aicore__ inline uint32_t end_step() const { return share_.end_tile * kSteps; }
  __aicore__ inline uint32_t end_of_move(uint32_t step) const {
    const uint32_t left = end_step() - step;
    return step + (left < kMoveSteps ? left : kMoveSteps);
  }

  // Elements of the steps first..end-1. A frame's last tile may lack steps.
  __aicore__ inline uint32_t count_of(uint32_t first, uint32_t end) const {
    const uint32_t block = first * kStepBlocks;
    return block < share_.blocks ? Share::elements_from(job_.elements, block,
                                                        (end - first) * kStepBlocks * kBlockLanes)
                                 : 0;
  }

  __aicore__ inline void load(uint32_t move) {
    const uint32_t count = count_of(move, end_of_move(move));
    if (count == 0) {
      return;
    }
    Bytes x = in_.template AllocTensor<uint8_t>();
    load_bytes(x, job_.input + uint64_t{move} * kStepBytes, count * kWidth);
    in_.EnQue(x);
  }

  __aicore__ inline void encode_move(uint32_t move) {
    const Moved moved = begin_move(move);
    for (uint32_t step = move; step < end_of_move(move); ++step) {
      if (step % kSteps == 0) {
        sum_ = 0;
        payloads_.begin_tile();
      }
      encode(moved, step);
      if (step % kSteps == kSteps - 1) {
        const TileRecord& record =
            payloads_.end_tile(static_cast<uint32_t>(sum_ % frame::kChecksumPrime));
        counters_.count(record);
        records_.add(record);
      }
    }
    end_move(moved);
  }

  // The placed ones of a move's tiles.
  __aicore__ inline void store_move(uint32_t move, RecordReader* reader) {
    const Moved moved = begin_move(move);
    for (uint32_t step = move; step < end_of_move(move); ++step) {
      const TileRecord record = reader->read(step / kSteps);
      if (!is_placed(record)) {
        continue;
      }
      if (step % kSteps == 0) {
        payloads_.begin_placed(record);
      }
      encode(moved, step);
    }
    end_move(moved);
  }

  // A move's elements and slabs in UB.
  struct Moved {
    uint32_t first;  // step
    uint32_t count;  // elements; 0: there is nothing
    Bytes x;
    Bytes slabs;
  };

  __aicore__ inline Moved begin_move(uint32_t move) {
    const uint32_t end = end_of_move(move);
    Moved moved{move, count_of(move, end), Bytes(), Bytes()};
    if (moved.count != 0) {
      moved.x = in_.template DeQue<uint8_t>();
      clear_bytes(pipe_, moved.x.template ReinterpretCast<int16_t>(), moved.count * kWidth,
                  (end - move) * kStepBytes);
      barrier();
      if constexpr (Coder::kSlabBytes != 0) {
        moved.slabs = slabs_.template AllocTensor<uint8_t>();
      }
    }
    return moved;
  }

  __aicore__ inline void end_move(Moved moved) {
    if (moved.count == 0) {
      return;
    }
    in_.FreeTensor(moved.x);
    if constexpr (Coder::kSlabBytes != 0) {
      if (stores_slabs_) {
        slabs_.EnQue(moved.slabs);
        moved.slabs = slabs_.template DeQue<uint8_t>();
        const uint64_t first = uint64_t{moved.first} * kStepBlocks;
        const uint32_t blocks = (moved.count + kBlockLanes - 1) / kBlockLanes;
        store_bytes(job_.frame + frame::kHeaderBytes + first * Coder::kSlabBytes, moved.slabs,
                    blocks * Coder::kSlabBytes);
      }
      slabs_.FreeTensor(moved.slabs);
    }
  }

  __aicore__ inline void encode(const Moved& moved, uint32_t index) {
    Step step{};
    step.first = index % kSteps * kStepBlocks;
    step.count = count_of(index, index + 1);
    step.blocks = (step.count + kBlockLanes - 1) / kBlockLanes;
    if (step.count == 0) {
      return;
    }
    const uint32_t part = index - moved.first;
    const Bytes x = moved.x[part * kStepBytes];
    Bytes slab;
    if constexpr (Coder::kSlabBytes != 0) {
      slab = moved.slabs[part * kStepBlocks * Coder::kSlabBytes];
    }
    if (job_.checksum != 0) {
      checksum_.compute(x.template ReinterpretCast<int32_t>(), coder_.scratch(), kStepBytes / 4);
      barrier();
    }
    coder_.encode(step, x, slab, &payloads_, &counters_);
    if (job_.checksum != 0) {
      hand_over<HardEvent::V_S>(pipe_);
      sum_ += checksum_.result(index % kSteps * (kStepBytes / 4));
    }
  }

  TPipe* pipe_;
  EncodeJob job_;
  Share share_;
  PayloadWriter payloads_;
  TQue<TPosition::VECIN, 2> in_;
  TQue<TPosition::VECOUT, 1> slabs_;
  Coder coder_;
  Checksum checksum_;
  RecordWriter records_;
  HeaderCounters counters_;
  uint64_t sum_ = 0;  // of the tile's checksum
  bool stores_slabs_ = true;
};

}  // namespace memswap::ascend
