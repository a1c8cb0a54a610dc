// The coder of layout sparse: a bitmap of the elements that are not +-0, and the survivors' fields
// as streams. It has no profile: these are the canonical encoder's bytes.
#pragma once

#include "bitmaps.h"
#include "encode_frame.h"
#include "escape_counts.h"
#include "lq2_escapes.h"
#include "outliers.h"
#include "splits.h"
#include "statistics.h"

namespace memswap::ascend {

// Where a block's bitmap and streams stand in UB: from multiples of 32 bytes on, each with room for
// the zeros that fill a payload's last unit.
template <class Split>
struct SparseSlot {
  static constexpr uint32_t kSpare = kUnifiedBlockBytes;
  static constexpr uint32_t kBitmap = 0;
  static constexpr uint32_t kStreams = frame::kBitmapBytes;
  __aicore__ static constexpr uint32_t field(uint32_t i) {
    uint32_t offset = kStreams;
    for (uint32_t j = 0; j < i; ++j) {
      offset += kBlockLanes / 8 * Split::field_width(j) + kSpare;
    }
    return offset;
  }
  static constexpr uint32_t kCodes = field(Split::kFields);
  static constexpr uint32_t kSigns = kCodes + kBlockLanes / 4 + kSpare;
  static constexpr uint32_t kS1 = kSigns + kBlockLanes / 8 + kSpare;
  static constexpr uint32_t kS2 = kS1 + kBlockLanes / 4 + kSpare;
  static constexpr uint32_t kExponents = kS2 + kBlockLanes / 2 + kSpare;
  static constexpr uint32_t kBytes = kExponents + kBlockLanes + kSpare;
};

template <class Split>
class SparseCoder {
  using Slot = SparseSlot<Split>;
  static constexpr uint32_t kBlocks = Split::kBlocks;
  static constexpr uint32_t kLanes = Split::kLanes;
  static constexpr bool kOutliers = Split::kExponentBits == canonical::kOutlierBits;
  static constexpr uint32_t kBlockBytes = kBlockLanes * Split::kWidth;
  // Fields and two more for the statistics; or the checksum's.
  static constexpr uint32_t kVectors =
      max_of(Split::kFields + 2, Split::kTakeVectors, uint32_t{Split::kWidth});
  static constexpr uint32_t kMaxPieces = Split::kFields + 6;
  static_assert(BitmapWriter<kBlocks>::kScratchLanes <= 2 * kLanes);

  static constexpr uint32_t kCommonBytes =
      unified(kLanes * 2) + unified(kVectors * kLanes * 2) +
      unified(Lq2Writer::kVectors * kBlockLanes * 2) + unified(kBlocks * frame::kBitmapBytes) +
      Masks::kUnifiedBytes + BitmapWriter<kBlocks>::kUnifiedBytes;

 public:
  static constexpr uint32_t kWidth = Split::kWidth;
  static constexpr uint32_t kSlabBytes = 0;
  static constexpr bool kHasPayloads = true;
  static constexpr uint32_t kMeasureBytes =
      kCommonBytes + Greatest::kUnifiedBytes + Statistics::kUnifiedBytes +
      EscapeCounter::kUnifiedBytes + (kOutliers ? Windows::kUnifiedBytes : 0);
  static constexpr uint32_t kStoreBytes = kCommonBytes + unified(frame::kBitmapBytes) +
                                          2 * unified(Slot::kBytes) + Lq2Writer::kUnifiedBytes;

  __aicore__ inline void init_measure(TPipe* pipe, const EncodeJob&) {
    init_common(pipe);
    greatest_.init(pipe);
    statistics_.init(pipe);
    counter_.init(pipe);
    if constexpr (kOutliers) {
      windows_.init(pipe);
    }
  }

  __aicore__ inline void init_store(TPipe* pipe) {
    init_common(pipe);
    pipe->InitBuffer(zeros_, frame::kBitmapBytes);
    pipe->InitBuffer(slots_, 2, Slot::kBytes);
    lq2_.init(pipe);
  }

  __aicore__ inline LocalTensor<int32_t> scratch() { return work_.Get<int32_t>(); }

  __aicore__ inline void measure(const Step& step, const Bytes& x, TileRecord* record,
                                 HeaderCounters* counters) {
    const Lanes e = exponents_.Get<int16_t>();
    Split::take(x, e, work(0), masks_);
    find_survivors(e);
    bool negative[kBlocks];
    find_negative(negative);
    statistics_.compute(e, free(0), free(1), kBlocks, statistics_of_);
    if constexpr (kOutliers) {
      if (Windows::any_far(statistics_of_, kBlocks)) {
        narrow(e);
      }
    }
    writer_.prepare(bitmaps_.Get<uint8_t>(), free(0));
    for (uint32_t b = 0; b < step.blocks; ++b) {
      const uint32_t left = step.count - b * kBlockLanes;
      const uint32_t missing = left < kBlockLanes ? kBlockLanes - left : 0;
      const uint32_t center = center_of(statistics_of_[b], canonical::kLq2Eighths);
      const uint32_t bitmap_bytes = writer_.length(b);
      uint32_t survivors = 0;
      const uint32_t bytes = bitmap_bytes + stream_bytes_of(e, b, center, negative[b], &survivors);
      counters->add_zeros(kBlockLanes - survivors - missing);
      const uint32_t units = round_up(bytes, frame::kUnitBytes) / frame::kUnitBytes;
      if (units < kBlockBytes / frame::kUnitBytes) {
        counters->add_center(center);
        record->set(step.first + b, negative[b] ? frame::kSignedZeros : frame::kZeros, units,
                    center, bitmap_bytes < frame::kBitmapBytes);
      } else {
        record->set(step.first + b, frame::kLiteral, kBlockBytes / frame::kUnitBytes, 0);
      }
    }
  }

  __aicore__ inline void encode(const Step& step, const Bytes& x, const Bytes&,
                                const TileRecord& record, GM_ADDR to) {
    const Lanes e = exponents_.Get<int16_t>();
    Split::take(x, e, work(0), masks_);
    find_survivors(e);
    writer_.prepare(bitmaps_.Get<uint8_t>(), free(0));
    LiteralWriter literals(pipe_);
    for (uint32_t b = 0; b < step.blocks; ++b) {
      const uint32_t mode = record.mode_of(step.first + b);
      const uint32_t bytes = record.units_of(step.first + b) * frame::kUnitBytes;
      if (mode == frame::kLiteral) {
        literals.store(to, x[b * kBlockBytes], kBlockBytes);
      } else {
        Bytes slot = slots_.template AllocTensor<uint8_t>();
        const Pieces pieces =
            make_payload(b, slot, record.center[step.first + b], mode == frame::kSignedZeros);
        slots_.EnQue(slot);
        slot = slots_.template DeQue<uint8_t>();
        pieces.store(to, slot, bytes);
        slots_.FreeTensor(slot);
      }
      to += bytes;
    }
    literals.end();
  }

 private:
  // A payload's bitmap and streams in their order.
  struct Pieces {
    uint32_t at[kMaxPieces];  // in the slot
    uint32_t length[kMaxPieces];
    uint32_t count = 0;

    __aicore__ inline void add(uint32_t where, uint32_t bytes) {
      if (bytes != 0) {
        at[count] = where;
        length[count++] = bytes;
      }
    }
    // The last one is followed by zeros.
    __aicore__ inline void store(GM_ADDR to, const Bytes& slot, uint32_t total) const {
      for (uint32_t i = 0; i < count; ++i) {
        const uint32_t bytes = i + 1 == count ? total : length[i];
        store_bytes(to, slot[at[i]], bytes);
        to += bytes;
        total -= bytes;
      }
    }
  };

  // The work tensors are neighbours; the first ones are the fields.
  __aicore__ inline Lanes work(uint32_t i) { return work_.Get<int16_t>()[i * kLanes]; }
  __aicore__ inline Lanes free(uint32_t i) { return work(Split::kFields + i); }
  __aicore__ inline Lanes block(uint32_t i) { return block_.Get<int16_t>()[i * kBlockLanes]; }

  __aicore__ inline Bytes bitmap(uint32_t b) {
    return bitmaps_.Get<uint8_t>()[b * frame::kBitmapBytes];
  }

  __aicore__ inline void init_common(TPipe* pipe) {
    pipe_ = pipe;
    pipe->InitBuffer(exponents_, kLanes * 2);
    pipe->InitBuffer(work_, kVectors * kLanes * 2);
    pipe->InitBuffer(block_, Lq2Writer::kVectors * kBlockLanes * 2);
    pipe->InitBuffer(bitmaps_, kBlocks * frame::kBitmapBytes);
    masks_.init(pipe);
    writer_.init(pipe);
  }

  // The bitmaps; free(1) has the signs of what does not survive.
  __aicore__ inline void find_survivors(const Lanes& e) {
    constexpr int32_t n = kLanes;
    const Lanes any = free(0);
    const Lanes sign = free(1);
    // The sum of all fields but the sign is 0 where the element is.
    ShiftRight(as_bits(any), as_bits(work(0)), (uint16_t)1, n);
    and_all(sign, work(0), masks_.low_bits(1), kLanes);
    barrier();
    for (uint32_t i = 1; i < Split::kFields; ++i) {
      Add(any, any, work(i), n);
      barrier();
    }
    Add(any, any, e, n);
    barrier();
    Mins(any, any, (int16_t)1, n);
    barrier();
    // sign (1 - any)
    Sub(sign, sign, any, n);
    barrier();
    lanes_to_half(any, kLanes);
    Maxs(sign, sign, (int16_t)0, n);
    barrier();
    CompareScalar(bitmap(0), as_half(any), static_cast<half>(1.0f), CMPMODE::EQ, kLanes);
    barrier();
  }

  // Whether a block has a -0.
  __aicore__ inline void find_negative(bool* negative) {
    uint32_t greatest[kBlocks];
    greatest_.find(greatest, free(1), free(0), kBlocks);
    for (uint32_t b = 0; b < kBlocks; ++b) {
      negative[b] = greatest[b] != 0;
    }
  }

  // What is behind a block's bitmap, and how many survive.
  __aicore__ inline uint32_t stream_bytes_of(const Lanes& e, uint32_t b, uint32_t center,
                                             bool negative, uint32_t* survivors) {
    *survivors =
        compact(block(0), e[b * kBlockLanes], bitmap(b).template ReinterpretCast<uint16_t>());
    uint32_t bytes = negative ? stream_bytes(kBlockLanes - *survivors, 1) : 0;
    if (*survivors == 0) {
      return bytes;
    }
    for (uint32_t i = 0; i < Split::kFields; ++i) {
      bytes += stream_bytes(*survivors, Split::field_width(i));
    }
    // What is behind the last survivor is no escape: its distance is 1.
    fill(block(0), *survivors, kBlockLanes, static_cast<int16_t>((center - 1) & 255u));
    barrier();
    EscapeCounts counts;
    counter_.template count<true>(block(0), &center, 1, block(1), block(2), block(3), block(4),
                                  masks_, &counts);
    return bytes + stream_bytes(*survivors, 2) + counts.lq2_bytes();
  }

  // Centres without outliers. The samples are of the survivors.
  __aicore__ inline void narrow(const Lanes& e) {
    windows_.begin();
    for (uint32_t b = 0; b < kBlocks; ++b) {
      if (Windows::is_far(statistics_of_[b])) {
        compact(block(0), e[b * kBlockLanes], bitmap(b).template ReinterpretCast<uint16_t>());
        windows_.sample(b, block(0));
      }
    }
    uint32_t windows[kBlocks];
    windows_.find(windows, kBlocks);
    statistics_.narrow(e, free(0), free(1), kBlocks, windows, statistics_of_);
  }

  __aicore__ inline Pieces make_payload(uint32_t b, const Bytes& slot, uint32_t center,
                                        bool negative) {
    const LocalTensor<uint16_t> is_survivor = bitmap(b).template ReinterpretCast<uint16_t>();
    Pieces pieces;
    pieces.add(Slot::kBitmap, writer_.write(slot[Slot::kBitmap], b));
    const uint32_t survivors = compact(block(0), work(0)[b * kBlockLanes], is_survivor);
    if (survivors == 0 && !negative) {
      return pieces;  // as half of the blocks behind a causal mask
    }
    Duplicate(slot[Slot::kStreams].template ReinterpretCast<int16_t>(), (int16_t)0,
              static_cast<int32_t>((Slot::kBytes - Slot::kStreams) / 2));
    Not(zeros_.Get<uint16_t>(), is_survivor, static_cast<int32_t>(kBlockLanes / 16));
    barrier();
    for (uint32_t i = 0; i < Split::kFields; ++i) {
      const uint32_t width = Split::field_width(i);
      if (i != 0) {
        compact(block(0), work(i)[b * kBlockLanes], is_survivor);
      }
      pack_stream(slot[Slot::field(i)], block(0), width, block(1));
      pieces.add(Slot::field(i), stream_bytes(survivors, width));
    }
    pieces.add(Slot::kCodes, stream_bytes(survivors, 2));
    if (negative) {
      // Of an element that is 0 only the sign is left of the field.
      const uint32_t count = compact(block(0), work(0)[b * kBlockLanes], zeros_.Get<uint16_t>());
      pack_stream(slot[Slot::kSigns], block(0), 1, block(1));
      pieces.add(Slot::kSigns, stream_bytes(count, 1));
    }
    compact(block(0), exponents_.Get<int16_t>()[b * kBlockLanes], is_survivor);
    const EscapeCounts counts = lq2_.encode(
        block(0), survivors, center, block(1), masks_,
        [&](const Lanes& codes, const Lanes& t)
            __aicore__ { pack_stream(slot[Slot::kCodes], codes, 2, t); },
        [&](uint32_t level, const Lanes& symbols, const Lanes& t) __aicore__ {
          const uint32_t at = level == 0   ? Slot::kS1
                              : level == 1 ? Slot::kS2
                                           : uint32_t{Slot::kExponents};
          pack_stream(slot[at], symbols, 2u << level, t);
        });
    pieces.add(Slot::kS1, stream_bytes(counts.escapes, 2));
    pieces.add(Slot::kS2, stream_bytes(counts.rare, 4));
    pieces.add(Slot::kExponents, counts.explicit_exponents);
    return pieces;
  }

  TPipe* pipe_;
  TQue<TPosition::VECOUT, 1> slots_;
  TBuf<TPosition::VECCALC> exponents_, work_, block_, bitmaps_, zeros_;
  BitmapWriter<kBlocks> writer_;
  Greatest greatest_;
  Masks masks_;
  Statistics statistics_;
  EscapeCounter counter_;
  Windows windows_;
  Lq2Writer lq2_;
  BlockStatistics statistics_of_[kBlocks];
};

}  // namespace memswap::ascend
