// The encoder around all layouts: loading, records, checksums, slabs and counters. What becomes of
// a step's blocks is the Coder's business:
//
//   kWidth, kSlabBytes
//   kHasPayloads        false: measuring stores the slabs as well, and nothing is left to store
//   kMeasureBytes, kStoreBytes   of UB that init_measure and init_store take
//   init_measure(pipe, job), init_store(pipe)
//   scratch()           words, twice as many as a step has; free between calls of measure
//   measure(step, x, record, counters)   sets the step's blocks in the tile's record
//   encode(step, x, slab, record, to)    codes them so; `to`: where their payloads begin
//
// x: the step's elements, missing ones 0.
#pragma once

#include "checksum.h"
#include "decode_header.h"
#include "literal_writer.h"

namespace memswap::ascend {

template <class Coder>
class FrameEncoder {
  static constexpr uint32_t kWidth = Coder::kWidth;
  static constexpr uint32_t kStepBlocks = step_blocks(kWidth);
  static constexpr uint32_t kSteps = frame::kTileBlocks / kStepBlocks;  // per tile
  static constexpr uint32_t kStepBytes = kStepBlocks * kBlockLanes * kWidth;
  static constexpr uint32_t kMoveSteps = move_steps(kWidth);
  static constexpr uint32_t kMoveSlabBytes = kMoveSteps * kStepBlocks * Coder::kSlabBytes;

  static constexpr uint32_t kInBytes = 2 * unified(kMoveSteps * kStepBytes);
  static constexpr uint32_t kSlabsBytes = 2 * unified(kMoveSlabBytes);
  static constexpr uint32_t kMeasureBytes =
      HeaderCounters::kUnifiedBytes + kInBytes + (Coder::kHasPayloads ? 0 : kSlabsBytes) +
      Coder::kMeasureBytes + Checksum::kUnifiedBytes + RecordWriter::kUnifiedBytes;
  static constexpr uint32_t kStoreBytes = unified(frame::kHeaderBytes) + kInBytes + kSlabsBytes +
                                          Coder::kStoreBytes + RecordReader::kUnifiedBytes;

 public:
  static constexpr uint32_t kUnifiedBytes =
      Coder::kHasPayloads ? max_of(kMeasureBytes, kStoreBytes) : kMeasureBytes;
  static_assert(kUnifiedBytes <= kUsableUnifiedBytes, "the encoder does not fit UB");

  __aicore__ inline FrameEncoder(TPipe* pipe, const EncodeJob& job)
      : pipe_(pipe), job_(job), share_(job.elements, Coder::kSlabBytes) {}

  __aicore__ inline void run() {
    if (job_.pass == static_cast<uint32_t>(Pass::kMeasure)) {
      measure_all();
    } else if constexpr (Coder::kHasPayloads) {
      store_all();
    }
  }

 private:
  __aicore__ inline void measure_all() {
    counters_.init(pipe_, job_.frame);
    if (share_.first_tile < share_.end_tile) {
      init_queues(!Coder::kHasPayloads);
      coder_.init_measure(pipe_, job_);
      if (job_.checksum != 0) {
        checksum_.init(pipe_);
      }
      records_.init(pipe_, job_.frame + share_.records, share_.first_tile);
      for_each_move([&](const Moved& moved, uint32_t step, const Step& part)
                        __aicore__ { measure(moved, step, part); });
      records_.flush();
    }
    counters_.store();
  }

  __aicore__ inline void store_all() {
    if (share_.first_tile >= share_.end_tile) {
      return;
    }
    TBuf<TPosition::VECCALC> header;
    if (load_header(pipe_, &header, job_.frame).GetValue(HeaderWord::kStatus) != frame::kOk) {
      return;  // there was no room
    }
    init_queues(true);
    coder_.init_store(pipe_);
    placed_.init(pipe_, job_.frame + share_.records, share_.tiles);
    for_each_move([&](const Moved& moved, uint32_t step, const Step& part)
                      __aicore__ { store(moved, step, part); });
  }

  __aicore__ inline void init_queues(bool stores_slabs) {
    pipe_->InitBuffer(in_, 2, kMoveSteps * kStepBytes);
    if constexpr (Coder::kSlabBytes != 0) {
      if (stores_slabs) {
        pipe_->InitBuffer(slabs_, 2, kMoveSlabBytes);
        stores_slabs_ = true;
      }
    }
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

  // A move's elements and slabs in UB.
  struct Moved {
    uint32_t first;  // step
    uint32_t count;  // elements; 0: there is nothing
    Bytes x;
    Bytes slabs;
  };

  // visit(moved, step, part) for each step of each of the core's moves, the next one of which is
  // under way. Steps behind the last block come with count 0.
  template <class Visit>
  __aicore__ inline void for_each_move(Visit visit) {
    load(first_step());
    for (uint32_t move = first_step(); move < end_step(); move += kMoveSteps) {
      if (move + kMoveSteps < end_step()) {
        load(move + kMoveSteps);
      }
      const Moved moved = begin_move(move);
      for (uint32_t step = move; step < end_of_move(move); ++step) {
        Step part{};
        part.first = step % kSteps * kStepBlocks;
        part.count = count_of(step, step + 1);
        part.blocks = (part.count + kBlockLanes - 1) / kBlockLanes;
        visit(moved, step, part);
      }
      end_move(moved);
    }
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

  __aicore__ inline Moved begin_move(uint32_t move) {
    const uint32_t end = end_of_move(move);
    Moved moved{move, count_of(move, end), Bytes(), Bytes()};
    if (moved.count != 0) {
      moved.x = in_.template DeQue<uint8_t>();
      clear_bytes(pipe_, moved.x.template ReinterpretCast<int16_t>(), moved.count * kWidth,
                  (end - move) * kStepBytes);
      barrier();
      if constexpr (Coder::kSlabBytes != 0) {
        if (stores_slabs_) {
          moved.slabs = slabs_.template AllocTensor<uint8_t>();
        }
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
        slabs_.FreeTensor(moved.slabs);
      }
    }
  }

  __aicore__ inline Bytes elements_of(const Moved& moved, uint32_t step) const {
    return moved.x[(step - moved.first) * kStepBytes];
  }
  __aicore__ inline Bytes slab_of(const Moved& moved, uint32_t step) const {
    if constexpr (Coder::kSlabBytes != 0) {
      return moved.slabs[(step - moved.first) * kStepBlocks * Coder::kSlabBytes];
    } else {
      return Bytes();
    }
  }

  __aicore__ inline void measure(const Moved& moved, uint32_t step, const Step& part) {
    if (step % kSteps == 0) {
      record_ = TileRecord();
      sum_ = 0;
    }
    if (part.count != 0) {
      const Bytes x = elements_of(moved, step);
      if (job_.checksum != 0) {
        checksum_.compute(x.template ReinterpretCast<int32_t>(), coder_.scratch(), kStepBytes / 4);
        barrier();
      }
      coder_.measure(part, x, &record_, &counters_);
      if constexpr (!Coder::kHasPayloads) {
        coder_.encode(part, x, slab_of(moved, step), record_, nullptr);
      }
      if (job_.checksum != 0) {
        hand_over<HardEvent::V_S>(pipe_);
        sum_ += checksum_.result(step % kSteps * (kStepBytes / 4));
      }
    }
    if (step % kSteps == kSteps - 1) {
      record_.base = record_.units;
      record_.checksum = static_cast<uint32_t>(sum_ % frame::kChecksumPrime);
      counters_.count(record_);
      records_.add(record_);
    }
  }

  __aicore__ inline void store(const Moved& moved, uint32_t step, const Step& part) {
    if (step % kSteps == 0) {
      record_ = placed_.read(step / kSteps);
      const uint64_t at = uint64_t{record_.base & ~frame::kBaseInOverflow} * frame::kUnitBytes;
      next_payload_ = (record_.base & frame::kBaseInOverflow) != 0 ? job_.overflow + at
                                                                   : job_.frame + share_.var + at;
    }
    if (part.count == 0) {
      return;
    }
    coder_.encode(part, elements_of(moved, step), slab_of(moved, step), record_, next_payload_);
    for (uint32_t b = 0; b < part.blocks; ++b) {
      next_payload_ += record_.units_of(part.first + b) * frame::kUnitBytes;
    }
  }

  TPipe* pipe_;
  EncodeJob job_;
  Share share_;
  TQue<TPosition::VECIN, 2> in_;
  TQue<TPosition::VECOUT, 1> slabs_;
  Coder coder_;
  Checksum checksum_;
  RecordWriter records_;
  RecordReader placed_;
  HeaderCounters counters_;
  TileRecord record_;
  GM_ADDR next_payload_ = nullptr;  // of the step that is stored next
  uint64_t sum_ = 0;                // of the tile's checksum
  bool stores_slabs_ = false;
};

}  // namespace memswap::ascend
