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

  __aicore__ inline void encode_all() {
    counters_.init(pipe_, job_.frame);
    if (share_.first_tile < share_.end_tile) {
      init();
      const uint32_t first = share_.first_tile * kSteps;
      const uint32_t end = share_.end_tile * kSteps;
      load(first);
      for (uint32_t step = first; step < end; ++step) {
        if (step + 1 < end) {
          load(step + 1);
        }
        if (step % kSteps == 0) {
          sum_ = 0;
          payloads_.begin_tile();
        }
        encode(step);
        if (step % kSteps == kSteps - 1) {
          const TileRecord& record =
              payloads_.end_tile(static_cast<uint32_t>(sum_ % Checksum::kPrime));
          counters_.count(record);
          records_.add(record);
        }
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
    TileRecord record;
    uint32_t tile = next_placed(share_.first_tile, &reader, &record);
    if (tile < share_.end_tile) {
      load(tile * kSteps);
    }
    while (tile < share_.end_tile) {
      payloads_.begin_placed(record);
      const uint32_t next = next_placed(tile + 1, &reader, &record);
      for (uint32_t step = tile * kSteps; step < (tile + 1) * kSteps; ++step) {
        if (step + 1 < (tile + 1) * kSteps) {
          load(step + 1);
        } else if (next < share_.end_tile) {
          load(next * kSteps);
        }
        encode(step);
      }
      tile = next;
    }
  }

  // The core's first tile from `tile` on that was deferred and has payloads, or its end_tile. The
  // first core's other tiles have been stored.
  __aicore__ inline uint32_t next_placed(uint32_t tile, RecordReader* reader, TileRecord* record) {
    for (; tile < share_.end_tile; ++tile) {
      *record = reader->read(tile);
      const bool in_overflow = (record->base & frame::kBaseInOverflow) != 0;
      if (record->units != 0 && (share_.first_tile != 0 || in_overflow)) {
        break;
      }
    }
    return tile;
  }

  __aicore__ inline bool any_placed() {
    TBuf<TPosition::VECCALC> buffer;
    pipe_->InitBuffer(buffer, frame::kHeaderBytes);
    const LocalTensor<uint32_t> words = buffer.Get<uint32_t>();
    GlobalTensor<uint32_t> global;
    global.SetGlobalBuffer(reinterpret_cast<__gm__ uint32_t*>(job_.frame), kHeaderWords);
    DataCopy(words, global, kHeaderWords);
    hand_over<HardEvent::MTE2_S>(pipe_);
    const bool in_var = share_.first_tile != 0 && words.GetValue(HeaderWord::kVarUsed) != 0;
    return words.GetValue(HeaderWord::kStatus) == frame::kOk &&
           (in_var || words.GetValue(HeaderWord::kOverflowUsed) != 0);
  }

  __aicore__ inline void init() {
    pipe_->InitBuffer(in_, 2, kStepBytes);
    if constexpr (Coder::kSlabBytes != 0) {
      pipe_->InitBuffer(slabs_, 2, kStepBlocks * Coder::kSlabBytes);
    }
    coder_.init(pipe_);
    if (job_.checksum != 0) {
      checksum_.init(pipe_);
    }
    records_.init(pipe_, job_.frame + share_.records, share_.first_tile);
  }

  __aicore__ inline Step at(uint32_t step) {
    const uint32_t block = step * kStepBlocks;
    Step found{};
    found.first = step % kSteps * kStepBlocks;
    if (block < share_.blocks) {
      found.count = Share::elements_from(job_.elements, block, kStepBlocks * kBlockLanes);
      found.blocks = (found.count + kBlockLanes - 1) / kBlockLanes;
    }
    return found;
  }

  __aicore__ inline void load(uint32_t step) {
    const uint32_t count = at(step).count;
    if (count == 0) {
      return;
    }
    GlobalTensor<uint8_t> from;
    from.SetGlobalBuffer(reinterpret_cast<__gm__ uint8_t*>(
        job_.input + uint64_t{step} * kStepBlocks * kBlockLanes * kWidth));
    Bytes x = in_.template AllocTensor<uint8_t>();
    DataCopyPad(x, from, DataCopyExtParams(1, count * kWidth, 0, 0, 0),
                DataCopyPadExtParams<uint8_t>(false, 0, 0, 0));
    in_.EnQue(x);
  }

  __aicore__ inline void encode(uint32_t index) {
    const Step step = at(index);
    if (step.count == 0) {
      return;
    }
    Bytes x = in_.template DeQue<uint8_t>();
    clear_bytes(pipe_, x.template ReinterpretCast<int16_t>(), step.count * kWidth, kStepBytes);
    barrier();
    if (job_.checksum != 0) {
      checksum_.compute(x.template ReinterpretCast<int32_t>(), coder_.scratch(), kStepBytes / 4);
      barrier();
    }
    Bytes slab;
    if constexpr (Coder::kSlabBytes != 0) {
      slab = slabs_.template AllocTensor<uint8_t>();
    }
    coder_.encode(step, x, slab, &payloads_, &counters_);
    in_.FreeTensor(x);
    if (job_.checksum != 0) {
      hand_over<HardEvent::V_S>(pipe_);
      sum_ += checksum_.result(index % kSteps * (kStepBytes / 4));
    }
    if constexpr (Coder::kSlabBytes != 0) {
      if (stores_slabs_) {
        slabs_.EnQue(slab);
        slab = slabs_.template DeQue<uint8_t>();
        GlobalTensor<uint8_t> to;
        to.SetGlobalBuffer(reinterpret_cast<__gm__ uint8_t*>(
            job_.frame + frame::kHeaderBytes + uint64_t{index} * kStepBlocks * Coder::kSlabBytes));
        DataCopy(to, slab, step.blocks * Coder::kSlabBytes);
      }
      slabs_.FreeTensor(slab);
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
