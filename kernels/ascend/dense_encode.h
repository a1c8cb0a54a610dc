// The coder of shapes dense and upcast: per block the shorter of LQ3 and FW, with the canonical
// centres. LQ2 is not for this vector unit: a quarter of the elements would be escapes. In shape
// upcast a block whose low halves are not all 0 is literal.
#pragma once

#include "encode_frame.h"
#include "lq3_escapes.h"
#include "outliers.h"
#include "splits.h"
#include "statistics.h"

namespace memswap::ascend {

template <class Split>
class DenseCoder {
 public:
  static constexpr uint32_t kWidth = Split::kWidth;
  static constexpr uint32_t kSlabBytes = rest_bytes<Split>() + frame::kLowPlaneBytes;

  __aicore__ inline void init(TPipe* pipe) {
    pipe_ = pipe;
    pipe_->InitBuffer(payloads_, 2, kBlocks * 128 * (Split::kExponentBits - 2));
    pipe_->InitBuffer(exponents_, kLanes * 2);
    pipe_->InitBuffer(work_, kVectors * kLanes * 2);
    pipe_->InitBuffer(slots_, kBlocks * kDenseSlotBytes);
    pipe_->InitBuffer(used_, kBlocks * 32);
    pipe_->InitBuffer(indices_, kSlotWords * 4);
    masks_.init(pipe_);
    CreateVecIndex(indices_.Get<float>(), 0.0f, kSlotWords);
    barrier();
    statistics_.init(pipe_);
    escapes_.init(pipe_);
    if constexpr (kOutliers) {
      windows_.init(pipe_);
    }
    if constexpr (kUpcast) {
      greatest_.init(pipe_);
    }
  }

  __aicore__ inline LocalTensor<int32_t> scratch() { return work_.Get<int32_t>(); }

  __aicore__ inline void encode(const Step& step, const Bytes& x, const Bytes& slab,
                                PayloadWriter* payloads, HeaderCounters* counters) {
    const Lanes e = exponents_.Get<int16_t>();
    Split::take(x, e, work(0), masks_);
    bool literal[kBlocks] = {};
    if constexpr (kUpcast) {
      find_literal(literal);
    }
    uint32_t offset = 0;
    for (uint32_t i = 0; i < Split::kFields; ++i) {
      store_field(slab[offset], kSlabBytes, work(i), work(Split::kFields), Split::field_width(i),
                  kBlocks);
      offset += kBlockLanes / 8 * Split::field_width(i);
    }
    statistics_.compute(e, work(1), work(3), kBlocks, blocks_);
    if constexpr (kOutliers) {
      if (Windows::any_far(blocks_, kBlocks)) {
        windows_.begin();
        for (uint32_t b = 0; b < kBlocks; ++b) {
          if (Windows::is_far(blocks_[b])) {
            windows_.sample(b, e[b * kBlockLanes]);
          }
        }
        uint32_t windows[kBlocks];
        windows_.find(windows, kBlocks);
        statistics_.narrow(e, work(1), work(3), kBlocks, windows, blocks_);
      }
    }
    encode_lq3(e, slab);
    finish_blocks(step, literal, x, e, slab, payloads, counters);
  }

 private:
  static constexpr uint32_t kBlocks = Split::kBlocks;
  static constexpr uint32_t kLanes = Split::kLanes;
  static constexpr uint32_t kSlotWords = kDenseSlotBytes / 4;
  static constexpr bool kUpcast = std::is_same_v<Split, SplitUpcast>;
  static constexpr bool kOutliers = Split::kExponentBits == canonical::kOutlierBits;
  // A lane per element each, for planes, statistics and the checksum.
  static constexpr uint32_t kVectors = max_of(4u, Split::kTakeVectors, kWidth);
  static constexpr uint32_t kRestBytes = rest_bytes<Split>();
  static constexpr uint32_t kBlockBytes = kBlockLanes * kWidth;
  static constexpr uint32_t kLiteralBytes = kBlockBytes - kSlabBytes;

  // The work tensors are neighbours.
  __aicore__ inline Lanes work(uint32_t i) { return work_.Get<int16_t>()[i * kLanes]; }

  // Blocks of which some low half is not 0.
  __aicore__ inline void find_literal(bool* literal) {
    const Lanes low = work(SplitUpcast::kLowHalves);
    const Lanes scratch = work(SplitUpcast::kLowHalves + 1);
    // 1 where any bit is set: the upper ones come down, the rest is small and positive.
    extract(scratch, low, 8, 8, masks_, kLanes);
    and_all(low, low, masks_.low_bits(8), kLanes);
    barrier();
    Or(as_bits(low), as_bits(low), as_bits(scratch), static_cast<int32_t>(kLanes));
    barrier();
    uint32_t greatest[kBlocks];
    greatest_.find(greatest, low, scratch, kBlocks);
    for (uint32_t b = 0; b < kBlocks; ++b) {
      literal[b] = greatest[b] != 0;
    }
  }

  // Every block in LQ3.
  __aicore__ inline void encode_lq3(const Lanes& e, const Bytes& slab) {
    const Lanes v = work(0);
    const Lanes low = work(1);
    const Lanes codes = work(2);
    const Lanes packed = work(3);
    const Bytes slots = slots_.Get<uint8_t>();
    constexpr int32_t n = kLanes;
    Duplicate(slots_.Get<uint32_t>(), 0u, static_cast<int32_t>(kBlocks * kSlotWords));
    for (uint32_t b = 0; b < kBlocks; ++b) {
      centers_[b] = center_of(blocks_[b], canonical::kLq3Eighths);
    }
    subtract_from_centers(v, e, centers_, kBlocks, kBlockLanes, masks_.low_bits(8));
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
      half_to_bytes(slab[b * kSlabBytes + kRestBytes], packed[b * frame::kLowPlaneBytes],
                    frame::kLowPlaneBytes);
    }
    escapes_.compare(codes, slots, kBlocks);
    for (uint32_t b = 0; b < kBlocks; ++b) {
      counts_[b] = Lq3Counts();
    }
    escapes_.write(e, centers_, slots, kBlocks, work(0), work(1), work(2), work(3),
                   masks_.low_bits(8), counts_);
  }

  // Chooses, makes FW blocks of those that are shorter so, and stores the payloads.
  __aicore__ inline void finish_blocks(const Step& step, const bool* literal, const Bytes& x,
                                       const Lanes& e, const Bytes& slab, PayloadWriter* payloads,
                                       HeaderCounters* counters) {
    uint32_t units[kBlocks] = {};
    bool any_explicit = false;
    bool any_literal = false;
    uint32_t total = 0;
    for (uint32_t b = 0; b < step.blocks; ++b) {
      if (literal[b]) {
        any_literal = true;
        units[b] = kLiteralBytes / frame::kUnitBytes;
        payloads->set(step.first + b, frame::kLiteral, units[b], 0);
        counts_[b].explicit_exponents = 0;
        total += units[b];
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
        payloads->set(step.first + b, frame::kFw2 + bits - 2, fw_units,
                      static_cast<uint32_t>(blocks_[b].max));
        counts_[b].explicit_exponents = 0;
      } else {
        payloads->set(step.first + b, frame::kLq3, lq3_units, centers_[b]);
        any_explicit = any_explicit || counts_[b].explicit_exponents != 0;
      }
      total += units[b];
      // Missing elements look like zeros.
      const uint32_t left = step.count - b * kBlockLanes;
      const uint32_t there = left < kBlockLanes ? left : kBlockLanes;
      counters->add_zeros(there - static_cast<uint32_t>(blocks_[b].nonzero));
      counters->add_center(center_of(blocks_[b], canonical::kLq2Eighths));
    }
    GM_ADDR to = total != 0 ? payloads->take(total) : nullptr;
    if constexpr (kUpcast) {
      if (any_literal) {
        store_literal(step, literal, units, x, slab, to);
      }
    }
    if (to == nullptr) {
      return;
    }
    if (any_literal) {
      store_one_by_one(literal, units, to);
    } else {
      store_together(to, units, total);
    }
    if (any_explicit) {
      store_explicit(to, units);
    }
  }

  // What the blocks' slabs have been given so far is overwritten.
  __aicore__ inline void store_literal(const Step& step, const bool* literal, const uint32_t* units,
                                       const Bytes& x, const Bytes& slab, GM_ADDR to) {
    barrier();
    LiteralWriter literals(pipe_);
    for (uint32_t b = 0; b < step.blocks; ++b) {
      if (literal[b]) {
        copy_bytes(slab[b * kSlabBytes], x[b * kBlockBytes], kSlabBytes);
        if (to != nullptr) {
          literals.store(to, x[b * kBlockBytes + kSlabBytes], kLiteralBytes);
        }
      }
      to = to != nullptr ? to + units[b] * frame::kUnitBytes : to;
    }
    literals.end();
  }

  __aicore__ inline void encode_fw(uint32_t b, uint32_t bits, const Lanes& e, const Bytes& slab) {
    const Lanes v = work(0);
    const Lanes symbols = work(1);
    const Lanes packed = work(2);
    const Lanes scratch = work(3);
    const Bytes slot = slots_.Get<uint8_t>()[b * kDenseSlotBytes];
    const uint32_t top = static_cast<uint32_t>(blocks_[b].max);
    Duplicate(slots_.Get<uint32_t>()[b * kSlotWords], 0u, static_cast<int32_t>(kSlotWords));
    subtract_from_centers(v, e[b * kBlockLanes], &top, 1, kBlockLanes, masks_.low_bits(8));
    and_all(symbols, v, masks_.low_bits(2), kBlockLanes);
    barrier();
    pack_rows(packed, symbols, scratch, 2, 1);
    lanes_to_half(packed, frame::kLowPlaneBytes);
    barrier();
    half_to_bytes(slab[b * kSlabBytes + kRestBytes], packed, frame::kLowPlaneBytes);
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
  __aicore__ inline void store_together(GM_ADDR to, const uint32_t* units, uint32_t total) {
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
    store_bytes(to, out.ReinterpretCast<uint8_t>(), total * frame::kUnitBytes);
    payloads_.FreeTensor(out);
  }

  __aicore__ inline void store_one_by_one(const bool* literal, const uint32_t* units, GM_ADDR to) {
    hand_over<HardEvent::V_MTE3>(pipe_);
    for (uint32_t b = 0; b < kBlocks; ++b) {
      if (!literal[b] && units[b] != 0) {
        store_bytes(to, slots_.Get<uint8_t>()[b * kDenseSlotBytes], units[b] * frame::kUnitBytes);
      }
      to += units[b] * frame::kUnitBytes;
    }
    hand_over<HardEvent::MTE3_V>(pipe_);
  }

  // The E bytes, which follow S1 without a gap, over what the stored piece has there. Rare.
  __aicore__ inline void store_explicit(GM_ADDR to, const uint32_t* units) {
    const Bytes slots = slots_.Get<uint8_t>();
    hand_over<HardEvent::V_MTE3>(pipe_);
    PipeBarrier<PIPE_MTE3>();
    for (uint32_t b = 0; b < kBlocks; ++b) {
      if (counts_[b].explicit_exponents != 0) {
        const uint32_t s1 = stream_bytes(counts_[b].escapes, 4);
        const uint32_t offset = kHighBitsBytes + s1;
        store_bytes(to + offset, slots[b * kDenseSlotBytes + kHighBitsBytes + round_up(s1, 32)],
                    units[b] * frame::kUnitBytes - offset);
      }
      to += units[b] * frame::kUnitBytes;
    }
    hand_over<HardEvent::MTE3_V>(pipe_);
  }

  TPipe* pipe_;
  TQue<TPosition::VECOUT, 1> payloads_;
  TBuf<TPosition::VECCALC> exponents_, work_, slots_, used_, indices_;
  Greatest greatest_;
  Masks masks_;
  Statistics statistics_;
  Windows windows_;
  Lq3Escapes escapes_;
  BlockStatistics blocks_[kBlocks];
  uint32_t centers_[kBlocks];
  Lq3Counts counts_[kBlocks];
};

}  // namespace memswap::ascend
