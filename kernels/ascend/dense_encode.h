// The encoder of shape dense: per block the shorter of LQ3 and FW, with the canonical centres. LQ2
// is not for this vector unit: a quarter of the elements would be escapes.
#pragma once

#include "checksum.h"
#include "lq3_escapes.h"
#include "splits.h"
#include "statistics.h"
#include "tile_records.h"

namespace memswap::ascend {

template <class Split>
class DenseEncoder {
 public:
  __aicore__ inline DenseEncoder(TPipe* pipe, const EncodeJob& job)
      : pipe_(pipe),
        job_(job),
        share_(job.elements, Split::kSlabBytes),
        room_(share_, job.var_capacity) {}

  __aicore__ inline void run() {
    counters_.init(pipe_, job_.frame);
    if (share_.first_tile < share_.end_tile) {
      init();
      load(0);
      const uint32_t steps = (share_.end_tile - share_.first_tile) * kSteps;
      for (uint32_t step = 0; step < steps; ++step) {
        if (step + 1 < steps) {
          load(step + 1);
        }
        if (step % kSteps == 0) {
          record_ = TileRecord();
          sum_ = 0;
          record_.base = room_.next();
          stored_ = true;
        }
        if (count_of(step) != 0) {
          encode(step);
        }
        if (step % kSteps == kSteps - 1) {
          record_.checksum = static_cast<uint32_t>(sum_ % Checksum::kPrime);
          counters_.count(record_, stored_);
          records_.add(record_);
        }
      }
      records_.flush();
      if (share_.end_tile == share_.tiles) {
        counters_.set_var_used(room_.next());
      }
    }
    counters_.store();
  }

 private:
  static constexpr uint32_t kBlocks = Split::kBlocks;
  static constexpr uint32_t kLanes = kBlocks * kBlockLanes;
  static constexpr uint32_t kSteps = frame::kTileBlocks / kBlocks;  // per tile
  static constexpr uint32_t kStepBytes = kLanes * Split::kWidth;
  static constexpr uint32_t kWords = kStepBytes / 4;
  static constexpr uint32_t kSlotWords = kSlotBytes / 4;

  __aicore__ inline void init() {
    pipe_->InitBuffer(in_, 2, kStepBytes);
    pipe_->InitBuffer(slabs_, 2, kBlocks * Split::kSlabBytes);
    pipe_->InitBuffer(payloads_, 2, kBlocks * 128 * (Split::kExponentBits - 2));
    pipe_->InitBuffer(exponents_, kLanes * 2);
    pipe_->InitBuffer(work_, 4 * kLanes * 2);
    pipe_->InitBuffer(slots_, kBlocks * kSlotBytes);
    pipe_->InitBuffer(used_, kBlocks * 32);
    pipe_->InitBuffer(indices_, kSlotWords * 4);
    masks_.init(pipe_);
    CreateVecIndex(indices_.Get<float>(), 0.0f, kSlotWords);
    barrier();
    statistics_.init(pipe_);
    escapes_.init(pipe_);
    if (job_.checksum != 0) {
      checksum_.init(pipe_);
    }
    records_.init(pipe_, job_.frame + share_.records, share_.first_tile);
  }

  // The work tensors are neighbours.
  __aicore__ inline Lanes work(uint32_t i) { return work_.Get<int16_t>()[i * kLanes]; }

  __aicore__ inline uint32_t first_block(uint32_t step) {
    return share_.first_tile * frame::kTileBlocks + step * kBlocks;
  }
  __aicore__ inline uint32_t count_of(uint32_t step) {
    return first_block(step) < share_.blocks
               ? Share::elements_from(job_.elements, first_block(step), kLanes)
               : 0;
  }

  __aicore__ inline void load(uint32_t step) {
    const uint32_t count = count_of(step);
    if (count == 0) {
      return;
    }
    GlobalTensor<int16_t> from;
    from.SetGlobalBuffer(reinterpret_cast<__gm__ int16_t*>(
        job_.input + uint64_t{first_block(step)} * kBlockLanes * Split::kWidth));
    Lanes x = in_.template AllocTensor<int16_t>();
    DataCopyPad(x, from, DataCopyExtParams(1, count * Split::kWidth, 0, 0, 0),
                DataCopyPadExtParams<int16_t>(false, 0, 0, 0));
    in_.EnQue(x);
  }

  __aicore__ inline void encode(uint32_t step) {
    const uint32_t count = count_of(step);
    const uint32_t blocks = (count + kBlockLanes - 1) / kBlockLanes;
    const Lanes e = exponents_.Get<int16_t>();
    Lanes x = in_.template DeQue<int16_t>();
    Bytes slab = slabs_.template AllocTensor<uint8_t>();
    if (count < kLanes) {
      fill(x, count * Split::kWidth / 2, kStepBytes / 2, (int16_t)0);
    }
    barrier();
    if (job_.checksum != 0) {
      checksum_.compute(x.template ReinterpretCast<int32_t>(), work_.Get<int32_t>(), kWords);
    }
    Split::split(x, e, work(1), work(2), work(3), slab, masks_);
    in_.FreeTensor(x);
    statistics_.compute(e, work(1), work(3), kBlocks, blocks_);
    if (job_.checksum != 0) {
      sum_ += checksum_.result(step % kSteps * kWords);
    }
    encode_lq3(e, slab);
    finish_blocks(step, count, blocks, e, slab);
    store_slab(step, blocks, slab);
  }

  // Every block in LQ3.
  __aicore__ inline void encode_lq3(const Lanes& e, const Bytes& slab) {
    const Lanes v = work(0);
    const Lanes low = work(1);
    const Lanes codes = work(2);
    const Lanes packed = work(3);
    const Bytes slots = slots_.Get<uint8_t>();
    constexpr int32_t n = kLanes;
    Not(as_bits(v), as_bits(e), n);
    Duplicate(slots_.Get<uint32_t>(), 0u, static_cast<int32_t>(kBlocks * kSlotWords));
    barrier();
    for (uint32_t b = 0; b < kBlocks; ++b) {
      centers_[b] = center_of(blocks_[b], 19);
      Adds(v[b * kBlockLanes], v[b * kBlockLanes], static_cast<int16_t>(centers_[b] + 1),
           static_cast<int32_t>(kBlockLanes));
    }
    barrier();
    and_all(v, v, masks_.low_bits(8), kLanes);
    barrier();
    // 1..7 stay, all others become 0: min(v, 8) mod 8.
    Mins(codes, v, (int16_t)8, n);
    barrier();
    and_all(codes, codes, masks_.low_bits(3), kLanes);
    barrier();
    and_all(low, codes, masks_.low_bits(2), kLanes);
    barrier();
    constexpr uint32_t packed_lanes = kBlocks * frame::kLowPlaneBytes;
    pack_rows(packed, low, packed[packed_lanes], 2, kBlocks);
    lanes_to_half(packed, packed_lanes);
    lanes_to_half(codes, kLanes);
    barrier();
    for (uint32_t b = 0; b < kBlocks; ++b) {
      half_to_bytes(slab[b * Split::kSlabBytes + Split::kRestBytes],
                    packed[b * frame::kLowPlaneBytes], frame::kLowPlaneBytes);
    }
    escapes_.compare(codes, slots, kBlocks);
    for (uint32_t b = 0; b < kBlocks; ++b) {
      counts_[b] = Lq3Counts();
    }
    escapes_.write(e, centers_, slots, kBlocks, work(0), work(1), work(2), work(3),
                   masks_.low_bits(8), counts_);
  }

  // Chooses, makes FW blocks of those that are shorter so, and stores the payloads.
  __aicore__ inline void finish_blocks(uint32_t step, uint32_t count, uint32_t blocks,
                                       const Lanes& e, const Bytes& slab) {
    uint32_t units[kBlocks];
    bool any_explicit = false;
    uint32_t total = 0;
    const uint32_t first = step % kSteps * kBlocks;
    for (uint32_t b = 0; b < kBlocks; ++b) {
      units[b] = 0;
      if (b >= blocks) {
        continue;
      }
      const uint32_t range = static_cast<uint32_t>(blocks_[b].max - blocks_[b].min);
      uint32_t bits = 2;
      while (range >> bits != 0) {
        ++bits;
      }
      const uint32_t fw_units = (bits - 2) * 16;
      const uint32_t lq3_units = (counts_[b].bytes() + 7) / 8;
      units[b] = fw_units <= lq3_units ? fw_units : lq3_units;
      if (fw_units <= lq3_units) {
        encode_fw(b, bits, e, slab);
        record_.set(first + b, frame::kFw2 + bits - 2, fw_units,
                    static_cast<uint32_t>(blocks_[b].max));
        counts_[b].explicit_exponents = 0;
      } else {
        record_.set(first + b, frame::kLq3, lq3_units, centers_[b]);
        any_explicit = any_explicit || counts_[b].explicit_exponents != 0;
      }
      total += units[b];
      counters_.add_zeros(kBlockLanes - static_cast<uint32_t>(blocks_[b].nonzero));
      counters_.add_center(center_of(blocks_[b], 7));
    }
    // Missing elements were counted as zeros.
    counters_.add_zeros(count - blocks * kBlockLanes);
    const uint32_t base = room_.next();
    if (total == 0) {
      return;
    }
    if (!room_.take(total)) {
      stored_ = false;
      return;
    }
    store_payloads(base, units, total);
    if (any_explicit) {
      store_explicit(base, units);
    }
  }

  __aicore__ inline void encode_fw(uint32_t b, uint32_t bits, const Lanes& e, const Bytes& slab) {
    const Lanes v = work(0);
    const Lanes symbols = work(1);
    const Lanes packed = work(2);
    const Lanes scratch = work(3);
    const Bytes slot = slots_.Get<uint8_t>()[b * kSlotBytes];
    constexpr int32_t n = kBlockLanes;
    Not(as_bits(v), as_bits(e)[b * kBlockLanes], n);
    Duplicate(slots_.Get<uint32_t>()[b * kSlotWords], 0u, static_cast<int32_t>(kSlotWords));
    barrier();
    Adds(v, v, static_cast<int16_t>(blocks_[b].max + 1), n);
    barrier();
    and_all(symbols, v, masks_.low_bits(2), kBlockLanes);
    barrier();
    pack_rows(packed, symbols, scratch, 2, 1);
    lanes_to_half(packed, frame::kLowPlaneBytes);
    barrier();
    half_to_bytes(slab[b * Split::kSlabBytes + Split::kRestBytes], packed, frame::kLowPlaneBytes);
    barrier();
    uint32_t shift = 2;
    uint32_t at = 0;
    for (uint32_t width = 4; width >= 1; width /= 2) {
      if (((bits - 2) & width) == 0) {
        continue;
      }
      put_plane(slot[at], v, shift, width, symbols, packed);
      at += kBlockLanes / 8 * width;
      shift += width;
    }
  }

  // Closes the gaps between the slots and stores one piece.
  __aicore__ inline void store_payloads(uint32_t base, const uint32_t* units, uint32_t total) {
    const Bytes used = used_.Get<uint8_t>();
    for (uint32_t b = 0; b < kBlocks; ++b) {
      CompareScalar(used[b * 32], indices_.Get<float>(), static_cast<float>(2 * units[b]),
                    CMPMODE::LT, kSlotWords);
    }
    barrier();
    LocalTensor<uint32_t> out = payloads_.template AllocTensor<uint32_t>();
    uint64_t words = 0;
    GatherMask(out, slots_.Get<uint32_t>(), used_.Get<uint32_t>(), true, kBlocks * kSlotWords,
               GatherMaskParams(1, 1, 0, 0), words);
    payloads_.EnQue(out);
    out = payloads_.template DeQue<uint32_t>();
    DataCopyPad(var<uint32_t>(base, 0), out,
                DataCopyExtParams(1, total * frame::kUnitBytes, 0, 0, 0));
    payloads_.FreeTensor(out);
  }

  // The E bytes, which follow S1 without a gap, over what the stored piece has there. Rare.
  __aicore__ inline void store_explicit(uint32_t base, const uint32_t* units) {
    const Bytes slots = slots_.Get<uint8_t>();
    hand_over<HardEvent::V_MTE3>(pipe_);
    PipeBarrier<PIPE_MTE3>();
    uint32_t position = base;
    for (uint32_t b = 0; b < kBlocks; ++b) {
      if (counts_[b].explicit_exponents != 0) {
        const uint32_t s1 = nibble_bytes(counts_[b].escapes);
        const uint32_t offset = kHighBitsBytes + s1;
        DataCopyPad(var<uint8_t>(position, offset),
                    slots[b * kSlotBytes + kHighBitsBytes + round_up(s1, 32)],
                    DataCopyExtParams(1, units[b] * frame::kUnitBytes - offset, 0, 0, 0));
      }
      position += units[b];
    }
    hand_over<HardEvent::MTE3_V>(pipe_);
  }

  template <class T>
  __aicore__ inline GlobalTensor<T> var(uint32_t units, uint32_t bytes) {
    GlobalTensor<T> tensor;
    tensor.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(
        job_.frame + share_.var + uint64_t{units} * frame::kUnitBytes + bytes));
    return tensor;
  }

  __aicore__ inline void store_slab(uint32_t step, uint32_t blocks, Bytes& slab) {
    slabs_.EnQue(slab);
    slab = slabs_.template DeQue<uint8_t>();
    GlobalTensor<uint8_t> to;
    to.SetGlobalBuffer(job_.frame + frame::kHeaderBytes +
                       uint64_t{first_block(step)} * Split::kSlabBytes);
    DataCopy(to, slab, blocks * Split::kSlabBytes);
    slabs_.FreeTensor(slab);
  }

  TPipe* pipe_;
  EncodeJob job_;
  Share share_;
  VarShare room_;
  TQue<TPosition::VECIN, 2> in_;
  TQue<TPosition::VECOUT, 1> slabs_, payloads_;
  TBuf<TPosition::VECCALC> exponents_, work_, slots_, used_, indices_;
  Masks masks_;
  Statistics statistics_;
  Lq3Escapes escapes_;
  Checksum checksum_;
  RecordWriter records_;
  HeaderCounters counters_;
  TileRecord record_;
  uint64_t sum_ = 0;  // of the tile's checksum
  bool stored_ = true;
  BlockStatistics blocks_[kBlocks];
  uint32_t centers_[kBlocks];
  Lq3Counts counts_[kBlocks];
};

}  // namespace memswap::ascend
