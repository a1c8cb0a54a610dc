// The encoder around shapes that are not split: raw, bits and ints. What becomes of a step's blocks
// is the Codec's business; loading, records, checksums and slabs are the same.
#pragma once

#include "checksum.h"
#include "tile_records.h"

namespace memswap::ascend {

// Bytes from..to-1 become 0. What is behind the last byte of a padded copy is undefined, and an odd
// byte is within a lane: it is the scalar unit's.
__aicore__ inline void clear_bytes(TPipe* pipe, const Lanes& lanes, uint32_t from, uint32_t to) {
  if (from >= to) {
    return;
  }
  if (from % 2 != 0) {
    hand_over<HardEvent::V_S>(pipe);
    lanes.ReinterpretCast<uint8_t>().SetValue(from, uint8_t{0});
    hand_over<HardEvent::S_V>(pipe);
  }
  fill(lanes, (from + 1) / 2, to / 2, (int16_t)0);
  barrier();
}

// 16 KiB, or a tile where that is less.
template <uint32_t kWidth>
struct PlainStep {
  static constexpr uint32_t kBlocks = kWidth <= 2 ? 8 : 16 / kWidth;
  static constexpr uint32_t kSteps = frame::kTileBlocks / kBlocks;  // per tile
  static constexpr uint32_t kBytes = kBlocks * kBlockLanes * kWidth;
  static constexpr uint32_t kBlockBytes = kBlockLanes * kWidth;
};

// Stores payloads, which a codec has in UB at addresses that are multiples of 32.
class PayloadWriter {
 public:
  __aicore__ inline PayloadWriter(const EncodeJob& job, const Share& share)
      : frame_var_(job.frame + share.var), room_(share, job.var_capacity) {}
  __aicore__ inline uint32_t next() const { return room_.next(); }
  // Where `units` units may go, or null.
  __aicore__ inline GM_ADDR take(uint32_t units) {
    const uint32_t base = room_.next();
    return room_.take(units) ? frame_var_ + uint64_t{base} * frame::kUnitBytes : nullptr;
  }
  __aicore__ inline static void store(GM_ADDR to, const Bytes& from, uint32_t bytes) {
    GlobalTensor<uint8_t> global;
    global.SetGlobalBuffer(reinterpret_cast<__gm__ uint8_t*>(to), bytes);
    DataCopyPad(global, from, DataCopyExtParams(1, bytes, 0, 0, 0));
  }

 private:
  GM_ADDR frame_var_;
  VarShare room_;
};

template <uint32_t kWidth, class Codec>
class PlainEncoder {
  using Step = PlainStep<kWidth>;

 public:
  __aicore__ inline PlainEncoder(TPipe* pipe, const EncodeJob& job)
      : pipe_(pipe), job_(job), share_(job.elements, Codec::kSlabBytes), payloads_(job, share_) {}

  __aicore__ inline void run() {
    counters_.init(pipe_, job_.frame);
    if (share_.first_tile < share_.end_tile) {
      init();
      load(0);
      const uint32_t steps = (share_.end_tile - share_.first_tile) * Step::kSteps;
      for (uint32_t step = 0; step < steps; ++step) {
        if (step + 1 < steps) {
          load(step + 1);
        }
        if (step % Step::kSteps == 0) {
          record_ = TileRecord();
          record_.base = payloads_.next();
          sum_ = 0;
          stored_ = true;
        }
        if (count_of(step) != 0) {
          encode(step);
        }
        if (step % Step::kSteps == Step::kSteps - 1) {
          record_.checksum = static_cast<uint32_t>(sum_ % Checksum::kPrime);
          counters_.count(record_, stored_);
          records_.add(record_);
        }
      }
      records_.flush();
      if (share_.end_tile == share_.tiles) {
        counters_.set_var_used(payloads_.next());
      }
    }
    counters_.store();
  }

 private:
  __aicore__ inline void init() {
    pipe_->InitBuffer(in_, 2, Step::kBytes);
    if constexpr (Codec::kSlabBytes != 0) {
      pipe_->InitBuffer(slabs_, 2, Step::kBlocks * Codec::kSlabBytes);
    }
    pipe_->InitBuffer(work_, 2 * Step::kBytes);
    codec_.init(pipe_);
    if (job_.checksum != 0) {
      checksum_.init(pipe_);
    }
    records_.init(pipe_, job_.frame + share_.records, share_.first_tile);
  }

  __aicore__ inline uint32_t first_block(uint32_t step) {
    return share_.first_tile * frame::kTileBlocks + step * Step::kBlocks;
  }
  __aicore__ inline uint32_t count_of(uint32_t step) {
    return first_block(step) < share_.blocks
               ? Share::elements_from(job_.elements, first_block(step), Step::kBlocks * kBlockLanes)
               : 0;
  }

  __aicore__ inline void load(uint32_t step) {
    const uint32_t count = count_of(step);
    if (count == 0) {
      return;
    }
    GlobalTensor<uint8_t> from;
    from.SetGlobalBuffer(reinterpret_cast<__gm__ uint8_t*>(
        job_.input + uint64_t{first_block(step)} * Step::kBlockBytes));
    Bytes x = in_.template AllocTensor<uint8_t>();
    DataCopyPad(x, from, DataCopyExtParams(1, count * kWidth, 0, 0, 0),
                DataCopyPadExtParams<uint8_t>(false, 0, 0, 0));
    in_.EnQue(x);
  }

  __aicore__ inline void encode(uint32_t step) {
    const uint32_t count = count_of(step);
    const uint32_t blocks = (count + kBlockLanes - 1) / kBlockLanes;
    const uint32_t first = step % Step::kSteps * Step::kBlocks;
    Bytes x = in_.template DeQue<uint8_t>();
    clear_bytes(pipe_, x.template ReinterpretCast<int16_t>(), count * kWidth, Step::kBytes);
    if (job_.checksum != 0) {
      barrier();
      checksum_.compute(x.template ReinterpretCast<int32_t>(), work_.Get<int32_t>(),
                        Step::kBytes / 4);
      hand_over<HardEvent::V_S>(pipe_);
      sum_ += checksum_.result(step % Step::kSteps * (Step::kBytes / 4));
    }
    barrier();
    Bytes slab;
    if constexpr (Codec::kSlabBytes != 0) {
      slab = slabs_.template AllocTensor<uint8_t>();
    }
    if (!codec_.encode(x, slab, count, blocks, first, &record_, &payloads_)) {
      stored_ = false;
    }
    in_.FreeTensor(x);
    if constexpr (Codec::kSlabBytes != 0) {
      slabs_.EnQue(slab);
      slab = slabs_.template DeQue<uint8_t>();
      GlobalTensor<uint8_t> to;
      to.SetGlobalBuffer(reinterpret_cast<__gm__ uint8_t*>(
          job_.frame + frame::kHeaderBytes + uint64_t{first_block(step)} * Codec::kSlabBytes));
      DataCopy(to, slab, blocks * Codec::kSlabBytes);
      slabs_.FreeTensor(slab);
    }
  }

  TPipe* pipe_;
  EncodeJob job_;
  Share share_;
  PayloadWriter payloads_;
  TQue<TPosition::VECIN, 2> in_;
  TQue<TPosition::VECOUT, 1> slabs_;
  TBuf<TPosition::VECCALC> work_;
  Codec codec_;
  Checksum checksum_;
  RecordWriter records_;
  HeaderCounters counters_;
  TileRecord record_;
  uint64_t sum_ = 0;
  bool stored_ = true;
};

}  // namespace memswap::ascend
