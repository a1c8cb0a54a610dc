// The coder of layouts dense and upcast: per block the shortest of FW, LQ2 and LQ3, as the
// canonical encoder has it (docs/format.md section 5). In layout upcast a block whose low halves
// are not all 0 is literal.
#pragma once

#include "encode_frame.h"
#include "escape_counts.h"
#include "lq2_escapes.h"
#include "lq3_escapes.h"
#include "outliers.h"
#include "splits.h"
#include "statistics.h"

namespace memswap::ascend {

template <class Split>
class DenseCoder {
  static constexpr uint32_t kBlocks = Split::kBlocks;
  static constexpr uint32_t kLanes = Split::kLanes;
  static constexpr uint32_t kSlotWords = kDenseSlotBytes / 4;
  static constexpr bool kUpcast = std::is_same_v<Split, SplitUpcast>;
  static constexpr bool kOutliers = Split::kExponentBits == canonical::kOutlierBits;
  // A lane per element each, for planes, statistics and the checksum.
  static constexpr uint32_t kVectors = max_of(4u, Split::kTakeVectors, Split::kWidth);
  static constexpr uint32_t kRestBytes = rest_bytes<Split>();
  static constexpr uint32_t kPayloadBytes = kBlockLanes / 8 * (Split::kExponentBits - 2);
  // Bytes of an LQ2 payload's streams, a lane each, and which of them are the payload's.
  static constexpr uint32_t kS1Lanes = kBlockLanes / 4;
  static constexpr uint32_t kS2Lanes = kBlockLanes / 2;
  static constexpr uint32_t kStreamLanes = kS1Lanes + kS2Lanes + kBlockLanes;
  static constexpr uint32_t kPatternWords = kStreamLanes / 16;
  static_assert(kPatternWords <= kRepeatLanes, "one repeat makes the pattern");

  static constexpr uint32_t kVectorBytes = unified(kLanes * 2) + unified(kVectors * kLanes * 2);

 public:
  static constexpr uint32_t kWidth = Split::kWidth;
  static constexpr uint32_t kSlabBytes = kRestBytes + frame::kLowPlaneBytes;
  static constexpr bool kHasPayloads = true;
  static constexpr uint32_t kMeasureBytes =
      kVectorBytes + Masks::kUnifiedBytes + Statistics::kUnifiedBytes +
      EscapeCounter::kUnifiedBytes + (kOutliers ? Windows::kUnifiedBytes : 0) +
      (kUpcast ? Greatest::kUnifiedBytes : 0);
  static constexpr uint32_t kStoreBytes =
      kVectorBytes + 2 * unified(kBlocks * kPayloadBytes) + unified(kBlocks * kDenseSlotBytes) +
      unified(kBlocks * 32) + unified(kSlotWords * 4) + unified(kRepeatLanes * 2) +
      Masks::kUnifiedBytes + Lq2Writer::kUnifiedBytes + Lq3Escapes::kUnifiedBytes;

  __aicore__ inline void init_measure(TPipe* pipe, const EncodeJob& job) {
    init_vectors(pipe);
    fast_ = job.fast != 0;
    center_ = job.center;
    statistics_.init(pipe_);
    counter_.init(pipe_);
    if constexpr (kOutliers) {
      windows_.init(pipe_);
    }
    if constexpr (kUpcast) {
      greatest_.init(pipe_);
    }
  }

  __aicore__ inline void init_store(TPipe* pipe) {
    init_vectors(pipe);
    pipe_->InitBuffer(payloads_, 2, kBlocks * kPayloadBytes);
    pipe_->InitBuffer(slots_, kBlocks * kDenseSlotBytes);
    pipe_->InitBuffer(used_, kBlocks * 32);
    pipe_->InitBuffer(indices_, kSlotWords * 4);
    pipe_->InitBuffer(pattern_, kRepeatLanes * 2);
    // What is read of a slot is what has been written, but in whole slots.
    Duplicate(slots_.Get<uint32_t>(), 0u, static_cast<int32_t>(kBlocks * kSlotWords));
    CreateVecIndex(indices_.Get<float>(), 0.0f, kSlotWords);
    barrier();
    lq2_.init(pipe_);
    lq3_.init(pipe_);
  }

  __aicore__ inline LocalTensor<int32_t> scratch() { return work_.Get<int32_t>(); }

  __aicore__ inline void measure(const Step& step, const Bytes& x, TileRecord* record,
                                 HeaderCounters* counters) {
    const Lanes e = exponents_.Get<int16_t>();
    Split::take_exponents(x, e, work(0), masks_);
    bool literal[kBlocks] = {};
    if constexpr (kUpcast) {
      find_literal(literal);
    }
    Choice choices[kBlocks];
    if (fast_) {
      choose_around(e, choices);
    } else {
      choose(e, step.blocks, choices);
    }
    for (uint32_t b = 0; b < step.blocks; ++b) {
      if (literal[b]) {
        record->set(step.first + b, frame::kLiteral, kLiteralBytes / frame::kUnitBytes, 0);
        continue;
      }
      record->set(step.first + b, choices[b].mode, choices[b].units, choices[b].center);
      // Missing elements look like zeros.
      const uint32_t left = step.count - b * kBlockLanes;
      const uint32_t there = left < kBlockLanes ? left : kBlockLanes;
      counters->add_zeros(there - static_cast<uint32_t>(blocks_[b].nonzero));
      counters->add_center(fast_ ? center_ : center_of(blocks_[b], canonical::kLq2Eighths));
    }
  }

  __aicore__ inline void encode(const Step& step, const Bytes& x, const Bytes& slab,
                                const TileRecord& record, GM_ADDR to) {
    const Lanes e = exponents_.Get<int16_t>();
    Split::take(x, e, work(0), masks_);
    uint32_t offset = 0;
    for (uint32_t i = 0; i < Split::kFields; ++i) {
      store_field(slab[offset], kSlabBytes, work(i), work(Split::kFields), Split::field_width(i),
                  kBlocks);
      offset += kBlockLanes / 8 * Split::field_width(i);
    }
    Modes modes{};
    for (uint32_t b = 0; b < kBlocks; ++b) {
      const bool there = b < step.blocks;
      modes.of[b] = there ? record.mode_of(step.first + b) : uint32_t{frame::kNone};
      modes.units[b] = there ? record.units_of(step.first + b) : 0;
      modes.center[b] = there ? record.center[step.first + b] : 0;
      modes.total += modes.units[b];
      modes.any_lq3 = modes.any_lq3 || modes.of[b] == frame::kLq3;
      modes.any_literal = modes.any_literal || modes.of[b] == frame::kLiteral;
    }
    bool any_explicit = false;
    if (modes.any_lq3) {
      any_explicit = encode_lq3(e, slab, modes);
    }
    for (uint32_t b = 0; b < step.blocks; ++b) {
      if (modes.of[b] == frame::kLq2) {
        encode_lq2(b, modes.center[b], e, slab);
      } else if (modes.of[b] >= frame::kFw2 && modes.of[b] != frame::kLiteral) {
        encode_fw(b, modes.of[b] - frame::kFw2 + 2, modes.center[b], e, slab);
      }
    }
    if constexpr (kUpcast) {
      if (modes.any_literal) {
        store_literal(modes, x, slab, to);
      }
    }
    if (modes.any_literal) {
      store_one_by_one(modes, to);
    } else if (modes.total != 0) {
      store_together(modes, to);
    }
    if (any_explicit) {
      store_explicit(modes, to);
    }
  }

 private:
  static constexpr uint32_t kBlockBytes = kBlockLanes * kWidth;
  static constexpr uint32_t kLiteralBytes = kBlockBytes - kSlabBytes;

  struct Choice {
    uint32_t mode = frame::kFw2;
    uint32_t units = 0;
    uint32_t center = 0;
  };

  // What the record says of a step's blocks.
  struct Modes {
    uint32_t of[kBlocks];  // kNone: there is no such block
    uint32_t units[kBlocks];
    uint32_t center[kBlocks];
    uint32_t total;
    bool any_lq3;
    bool any_literal;
  };

  __aicore__ inline void init_vectors(TPipe* pipe) {
    pipe_ = pipe;
    pipe_->InitBuffer(exponents_, kLanes * 2);
    pipe_->InitBuffer(work_, kVectors * kLanes * 2);
    masks_.init(pipe_);
  }

  // The work tensors are neighbours.
  __aicore__ inline Lanes work(uint32_t i) { return work_.Get<int16_t>()[i * kLanes]; }

  // Centres without outliers; of a block that they have no part of, only FW is left.
  __aicore__ inline void narrow(const Lanes& e, bool* fixed) {
    if (!Windows::any_far(blocks_, kBlocks)) {
      return;
    }
    windows_.begin();
    for (uint32_t b = 0; b < kBlocks; ++b) {
      if (Windows::is_far(blocks_[b])) {
        windows_.sample(b, e[b * kBlockLanes]);
      }
    }
    uint32_t windows[kBlocks];
    windows_.find(windows, kBlocks);
    for (uint32_t b = 0; b < kBlocks; ++b) {
      fixed[b] = Windows::is_far(blocks_[b]) && windows[b] == 0;
    }
    statistics_.narrow(e, work(1), work(3), kBlocks, windows, blocks_);
  }

  // The fast profile: LQ2 around the given centre, or FW of all of E's bits below it.
  __aicore__ inline void choose_around(const Lanes& e, Choice* choices) {
    EscapeCounts counts[kBlocks];
    uint32_t centers[kBlocks];
    statistics_.count_nonzero(e, work(1), work(3), kBlocks, blocks_);
    for (uint32_t b = 0; b < kBlocks; ++b) {
      centers[b] = center_;
      choices[b].mode = frame::kFw2 + Split::kExponentBits - 2;
      choices[b].units = kPayloadBytes / frame::kUnitBytes;
      choices[b].center = center_;
    }
    counter_.template count<true>(e, centers, kBlocks, work(0), work(1), work(2), work(3), masks_,
                                  counts);
    for (uint32_t b = 0; b < kBlocks; ++b) {
      take_shorter(&choices[b], frame::kLq2, counts[b].lq2_bytes(), center_, false);
    }
  }

  // The canonical profile: the shortest mode of each block; among equals FW, then LQ2, then LQ3.
  __aicore__ inline void choose(const Lanes& e, uint32_t blocks, Choice* choices) {
    bool fixed[kBlocks] = {};
    statistics_.compute(e, work(1), work(3), kBlocks, blocks_);
    if constexpr (kOutliers) {
      narrow(e, fixed);
    }
    EscapeCounts counts[kBlocks];
    uint32_t centers[kBlocks];
    bool any_longer = false;
    for (uint32_t b = 0; b < kBlocks; ++b) {
      const uint32_t range = static_cast<uint32_t>(blocks_[b].max - blocks_[b].min);
      uint32_t bits = 2;
      while (range >> bits != 0) {
        ++bits;
      }
      choices[b].mode = frame::kFw2 + bits - 2;
      choices[b].units = (bits - 2) * (kBlockLanes / 8 / frame::kUnitBytes);
      choices[b].center = static_cast<uint32_t>(blocks_[b].max);
      centers[b] = center_of(blocks_[b], canonical::kLq2Eighths);
      any_longer = any_longer || (b < blocks && !fixed[b] && choices[b].units != 0);
    }
    if (!any_longer) {
      return;
    }
    counter_.template count<true>(e, centers, kBlocks, work(0), work(1), work(2), work(3), masks_,
                                  counts);
    any_longer = false;
    for (uint32_t b = 0; b < kBlocks; ++b) {
      take_shorter(&choices[b], frame::kLq2, counts[b].lq2_bytes(), centers[b], fixed[b]);
      // LQ3 has a plane to begin with.
      constexpr uint32_t least = kBlockLanes / 8 / frame::kUnitBytes;
      any_longer = any_longer || (b < blocks && !fixed[b] && choices[b].units > least);
      centers[b] = center_of(blocks_[b], canonical::kLq3Eighths);
    }
    if (!any_longer) {
      return;
    }
    counter_.template count<false>(e, centers, kBlocks, work(0), work(1), work(2), work(3), masks_,
                                   counts);
    for (uint32_t b = 0; b < kBlocks; ++b) {
      take_shorter(&choices[b], frame::kLq3, counts[b].lq3_bytes(), centers[b], fixed[b]);
    }
  }

  __aicore__ inline static void take_shorter(Choice* choice, uint32_t mode, uint32_t bytes,
                                             uint32_t center, bool fixed) {
    const uint32_t units = round_up(bytes, frame::kUnitBytes) / frame::kUnitBytes;
    if (!fixed && units < choice->units) {
      choice->mode = mode;
      choice->units = units;
      choice->center = center;
    }
  }

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

  // Every block in LQ3, whatever becomes of the others. Returns whether one of it has E bytes.
  __aicore__ inline bool encode_lq3(const Lanes& e, const Bytes& slab, const Modes& modes) {
    const Lanes v = work(0);
    const Lanes low = work(1);
    const Lanes codes = work(2);
    const Lanes packed = work(3);
    const Bytes slots = slots_.Get<uint8_t>();
    constexpr int32_t n = kLanes;
    Duplicate(slots_.Get<uint32_t>(), 0u, static_cast<int32_t>(kBlocks * kSlotWords));
    subtract_from_centers(v, e, modes.center, kBlocks, kBlockLanes, masks_.low_bits(8));
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
    lq3_.compare(codes, slots, kBlocks);
    for (uint32_t b = 0; b < kBlocks; ++b) {
      counts_[b] = Lq3Counts();
    }
    lq3_.write(e, modes.center, slots, kBlocks, work(0), work(1), work(2), work(3),
               masks_.low_bits(8), counts_);
    bool any_explicit = false;
    for (uint32_t b = 0; b < kBlocks; ++b) {
      if (modes.of[b] != frame::kLq3) {
        counts_[b].explicit_exponents = 0;
      }
      any_explicit = any_explicit || counts_[b].explicit_exponents != 0;
    }
    return any_explicit;
  }

  // One block in LQ2: each stream's bytes as lanes in an area of its own, from where a pattern
  // brings them together.
  __aicore__ inline void encode_lq2(uint32_t b, uint32_t center, const Lanes& e,
                                    const Bytes& slab) {
    const Lanes exponents = work(0);
    const Lanes symbols = exponents[kBlockLanes];
    const Lanes streams = exponents[Lq2Writer::kVectors * kBlockLanes];
    const Lanes joined = streams[2 * kBlockLanes];
    static_assert((Lq2Writer::kVectors + 4) * kBlockLanes <= kVectors * kLanes);
    Adds(exponents, e[b * kBlockLanes], (int16_t)0, static_cast<int32_t>(kBlockLanes));
    barrier();
    const EscapeCounts counts = lq2_.encode(
        exponents, kBlockLanes, center, symbols, masks_,
        [&](const Lanes& codes, const Lanes& t)
            __aicore__ { store_field(slab[b * kSlabBytes + kRestBytes], 0, codes, t, 2, 1); },
        [&](uint32_t level, const Lanes& lanes, const Lanes& t) __aicore__ {
          const Lanes stream = streams[level == 0   ? 0
                                       : level == 1 ? kS1Lanes
                                                    : kS1Lanes + kS2Lanes];
          if (level == 2) {
            Adds(stream, lanes, (int16_t)0, static_cast<int32_t>(kBlockLanes));
            barrier();
          } else {
            pack_lanes(stream, lanes, 2u << level, t);
          }
        });
    const uint32_t bytes = counts.lq2_bytes();
    if (bytes == 0) {
      return;
    }
    make_pattern(counts);
    uint64_t kept = 0;
    GatherMask(as_bits(joined), as_bits(streams), pattern_.Get<uint16_t>(), true,
               counts.explicit_exponents != 0 ? kStreamLanes
               : counts.rare != 0             ? kS1Lanes + kS2Lanes
                                              : kS1Lanes,
               GatherMaskParams(1, 1, 0, 0), kept);
    barrier();
    const uint32_t lanes = round_up(bytes + frame::kUnitBytes, kRepeatLanes);
    fill(joined, bytes, lanes, (int16_t)0);
    barrier();
    lanes_to_half(joined, lanes);
    barrier();
    half_to_bytes(slots_.Get<uint8_t>()[b * kDenseSlotBytes], joined, lanes);
    barrier();
  }

  // The lanes of `streams` that are a payload's bytes.
  __aicore__ inline void make_pattern(const EscapeCounts& counts) {
    const LocalTensor<uint16_t> words = pattern_.Get<uint16_t>();
    Duplicate(words, (uint16_t)0, static_cast<int32_t>(kRepeatLanes));
    barrier();
    set_bits(words, 0, stream_bytes(counts.escapes, 2));
    set_bits(words, kS1Lanes / 16, stream_bytes(counts.rare, 4));
    set_bits(words, (kS1Lanes + kS2Lanes) / 16, counts.explicit_exponents);
  }

  // The first `bits` bits from a word on.
  __aicore__ inline static void set_bits(const LocalTensor<uint16_t>& words, uint32_t first,
                                         uint32_t bits) {
    const uint32_t whole = bits / 16;
    if (whole != 0) {
      set_words(words, (uint16_t)0xffff, first, whole);
    }
    if (bits % 16 != 0) {
      set_words(words, static_cast<uint16_t>((1u << bits % 16) - 1), first + whole, 1);
    }
  }
  __aicore__ inline static void set_words(const LocalTensor<uint16_t>& words, uint16_t value,
                                          uint32_t first, uint32_t count) {
    // Bits first..first + count - 1 of a mask of 128.
    const uint32_t end = first + count;
    uint64_t mask[2] = {low_mask(end) & ~low_mask(first),
                        low_mask(end < 64 ? 0 : end - 64) & ~low_mask(first < 64 ? 0 : first - 64)};
    Duplicate(words, value, mask, 1, 1, 8);
    barrier();
  }
  __aicore__ inline static uint64_t low_mask(uint32_t bits) {
    return bits >= 64 ? ~uint64_t{0} : (uint64_t{1} << bits) - 1;
  }

  // What the blocks' slabs have been given so far is overwritten.
  __aicore__ inline void store_literal(const Modes& modes, const Bytes& x, const Bytes& slab,
                                       GM_ADDR to) {
    barrier();
    LiteralWriter literals(pipe_);
    for (uint32_t b = 0; b < kBlocks; ++b) {
      if (modes.of[b] == frame::kLiteral) {
        copy_bytes(slab[b * kSlabBytes], x[b * kBlockBytes], kSlabBytes);
        literals.store(to, x[b * kBlockBytes + kSlabBytes], kLiteralBytes);
      }
      to += modes.units[b] * frame::kUnitBytes;
    }
    literals.end();
  }

  __aicore__ inline void encode_fw(uint32_t b, uint32_t bits, uint32_t top, const Lanes& e,
                                   const Bytes& slab) {
    const Lanes v = work(0);
    const Lanes symbols = work(1);
    const Lanes packed = work(2);
    const Lanes scratch = work(3);
    const Bytes slot = slots_.Get<uint8_t>()[b * kDenseSlotBytes];
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
  __aicore__ inline void store_together(const Modes& modes, GM_ADDR to) {
    const Bytes used = used_.Get<uint8_t>();
    for (uint32_t b = 0; b < kBlocks; ++b) {
      CompareScalar(used[b * 32], indices_.Get<float>(), static_cast<float>(2 * modes.units[b]),
                    CMPMODE::LT, kSlotWords);
    }
    barrier();
    LocalTensor<uint32_t> out = payloads_.template AllocTensor<uint32_t>();
    uint64_t words = 0;
    GatherMask(out, slots_.Get<uint32_t>(), used_.Get<uint32_t>(), true, kBlocks * kSlotWords,
               GatherMaskParams(1, 1, 0, 0), words);
    payloads_.EnQue(out);
    out = payloads_.template DeQue<uint32_t>();
    store_bytes(to, out.ReinterpretCast<uint8_t>(), modes.total * frame::kUnitBytes);
    payloads_.FreeTensor(out);
  }

  __aicore__ inline void store_one_by_one(const Modes& modes, GM_ADDR to) {
    hand_over<HardEvent::V_MTE3>(pipe_);
    for (uint32_t b = 0; b < kBlocks; ++b) {
      if (modes.of[b] != frame::kLiteral && modes.units[b] != 0) {
        store_bytes(to, slots_.Get<uint8_t>()[b * kDenseSlotBytes],
                    modes.units[b] * frame::kUnitBytes);
      }
      to += modes.units[b] * frame::kUnitBytes;
    }
    hand_over<HardEvent::MTE3_V>(pipe_);
  }

  // The E bytes, which follow S1 without a gap, over what the stored piece has there. Rare.
  __aicore__ inline void store_explicit(const Modes& modes, GM_ADDR to) {
    const Bytes slots = slots_.Get<uint8_t>();
    hand_over<HardEvent::V_MTE3>(pipe_);
    PipeBarrier<PIPE_MTE3>();
    for (uint32_t b = 0; b < kBlocks; ++b) {
      if (counts_[b].explicit_exponents != 0) {
        const uint32_t s1 = stream_bytes(counts_[b].escapes, 4);
        const uint32_t offset = kHighBitsBytes + s1;
        store_bytes(to + offset, slots[b * kDenseSlotBytes + kHighBitsBytes + round_up(s1, 32)],
                    modes.units[b] * frame::kUnitBytes - offset);
      }
      to += modes.units[b] * frame::kUnitBytes;
    }
    hand_over<HardEvent::MTE3_V>(pipe_);
  }

  TPipe* pipe_;
  TQue<TPosition::VECOUT, 1> payloads_;
  TBuf<TPosition::VECCALC> exponents_, work_, slots_, used_, indices_, pattern_;
  Greatest greatest_;
  Masks masks_;
  Statistics statistics_;
  EscapeCounter counter_;
  Windows windows_;
  Lq2Writer lq2_;
  Lq3Escapes lq3_;
  bool fast_ = false;
  uint32_t center_ = 0;  // of the fast profile
  BlockStatistics blocks_[kBlocks];
  Lq3Counts counts_[kBlocks];
};

}  // namespace memswap::ascend
