// Layout ints for elements of 8 bytes, in words of 32 bits: the vector unit orders and adds no
// others.
#pragma once

#include "halves.h"
#include "reference.h"

namespace memswap::ascend {

// Vectors of 1024 words.
using Words = LocalTensor<int32_t>;
constexpr int32_t kBlockWords = kBlockLanes;

// 1 where a < b as unsigned words, else 0: in the order of signed words with their highest bits
// changed, max(a, b) - a is 0 unless a < b. a and b are given so changed; `b` is one value for all.
__aicore__ inline void less_than(const Words& result, const Words& a, int32_t b,
                                 const Words& scratch) {
  const LocalTensor<uint16_t> bits = result.ReinterpretCast<uint16_t>();
  Maxs(result, a, b, kBlockWords);
  barrier();
  Sub(result, result, a, kBlockWords);
  barrier();
  // Of t and -t, one has the highest bit, unless t is 0.
  Muls(scratch, result, -1, kBlockWords);
  barrier();
  Or(bits, bits, scratch.ReinterpretCast<uint16_t>(), 2 * kBlockWords);
  barrier();
  ShiftRight(result.ReinterpretCast<uint32_t>(), result.ReinterpretCast<uint32_t>(), uint32_t{31},
             kBlockWords);
  barrier();
}

constexpr int32_t kHighestBit = static_cast<int32_t>(0x80000000u);

__aicore__ inline int32_t change_highest_bit(uint32_t word) {
  return static_cast<int32_t>(word ^ 0x80000000u);
}

template <bool kSigned>
class Ints64Coder : public ChecksumScratch<8> {
  static constexpr uint32_t kBlockBytes = 8 * kBlockLanes;
  static constexpr uint32_t kCommonBytes = unified(5 * kBlockLanes * 4) + unified(kBlockLanes / 8);

 public:
  static constexpr uint32_t kWidth = 8;
  static constexpr uint32_t kSlabBytes = 0;
  static constexpr bool kHasPayloads = true;
  static constexpr uint32_t kMeasureBytes = kCommonBytes + ChecksumScratch<8>::kUnifiedBytes;
  static constexpr uint32_t kStoreBytes =
      kCommonBytes + unified(6 * kBlockLanes * 2) + ReferenceWriter::unified_bytes(kBlockBytes);

  __aicore__ inline void init_measure(TPipe* pipe, const EncodeJob&) {
    init_common(pipe);
    ChecksumScratch<8>::init(pipe);
  }

  __aicore__ inline void init_store(TPipe* pipe) {
    init_common(pipe);
    pipe->InitBuffer(lanes_, 6 * kBlockLanes * 2);
    references_.init(pipe, kBlockBytes);
  }

  __aicore__ inline void measure(const Step& step, const Bytes& x, TileRecord* record,
                                 HeaderCounters*) {
    for (uint32_t b = 0; b < step.blocks; ++b) {
      take(x[b * kBlockBytes], count_of(step, b));
      const uint64_t minimum = find<false>();
      set_reference(record, step.first + b, bit_length(find<true>() - minimum), kWidth);
    }
  }

  __aicore__ inline void encode(const Step& step, const Bytes& x, const Bytes&,
                                const TileRecord& record, GM_ADDR to) {
    LiteralWriter literals(pipe_);
    for (uint32_t b = 0; b < step.blocks; ++b) {
      if (record.mode_of(step.first + b) == frame::kLiteral) {
        literals.store(to, x[b * kBlockBytes], kBlockBytes);
      } else {
        const uint32_t count = count_of(step, b);
        take(x[b * kBlockBytes], count);
        const uint64_t minimum = find<false>();
        subtract(minimum, count);
        store_reference(to, record.center[step.first + b], minimum);
      }
      to += record.units_of(step.first + b) * frame::kUnitBytes;
    }
    literals.end();
  }

 private:
  __aicore__ inline void init_common(TPipe* pipe) {
    pipe_ = pipe;
    pipe->InitBuffer(words_, 5 * kBlockLanes * 4);
    pipe->InitBuffer(equal_, kBlockLanes / 8);
  }

  __aicore__ inline static uint32_t count_of(const Step& step, uint32_t b) {
    const uint32_t left = step.count - b * kBlockLanes;
    return left < kBlockLanes ? left : kBlockLanes;
  }

  // Signed words order as they are.
  static constexpr int32_t kShift = kSigned ? 0 : kHighestBit;

  __aicore__ inline Words words(uint32_t i) { return words_.Get<int32_t>()[i * kBlockLanes]; }
  __aicore__ inline Words low() { return words(0); }   // highest bits changed
  __aicore__ inline Words high() { return words(1); }  // likewise where unsigned

  // Lower and upper words of a block, in the order of signed words; missing elements are like the
  // last one that is there.
  __aicore__ inline void take(const Bytes& x, uint32_t count) {
    const LocalTensor<uint32_t> pairs = x.ReinterpretCast<uint32_t>();
    uint64_t kept = 0;
    barrier();
    GatherMask(low().template ReinterpretCast<uint32_t>(), pairs, (uint8_t)1, true, 2 * kBlockLanes,
               GatherMaskParams(1, 1, 0, 0), kept);
    GatherMask(high().template ReinterpretCast<uint32_t>(), pairs, (uint8_t)2, true,
               2 * kBlockLanes, GatherMaskParams(1, 1, 0, 0), kept);
    barrier();
    Adds(low(), low(), kHighestBit, kBlockWords);
    Adds(high(), high(), kShift, kBlockWords);
    barrier();
    if (count < kBlockLanes) {
      hand_over<HardEvent::V_S>(pipe_);
      const int32_t last_low = low().GetValue(count - 1);
      const int32_t last_high = high().GetValue(count - 1);
      hand_over<HardEvent::S_V>(pipe_);
      fill(low(), count, kBlockLanes, last_low);
      fill(high(), count, kBlockLanes, last_high);
      barrier();
    }
  }

  template <bool kMaximum>
  __aicore__ inline static void pick(const Words& to, const Words& a, const Words& b, int32_t n) {
    if constexpr (kMaximum) {
      Max(to, a, b, n);
    } else {
      Min(to, a, b, n);
    }
  }

  template <bool kMaximum>
  __aicore__ inline int32_t extreme(const Words& values) {
    const Words folded = words(2);
    const Words spread = folded[512];
    pick<kMaximum>(folded, values, values[512], 512);
    barrier();
    for (int32_t left = 256; left >= 8; left /= 2) {
      pick<kMaximum>(folded, folded, folded[left], left);
      barrier();
    }
    // Lanes do not move sideways within 32 bytes: each of the eight becomes a row.
    Brcb(spread, folded, 1, BrcbRepeatParams(1, 8));
    barrier();
    for (int32_t left = 32; left >= 8; left /= 2) {
      pick<kMaximum>(spread, spread, spread[left], left);
      barrier();
    }
    hand_over<HardEvent::V_S>(pipe_);
    const int32_t best = spread.GetValue(0);
    hand_over<HardEvent::S_V>(pipe_);
    return best;
  }

  // The bits of the least or greatest element: by the upper words, and among those that have the
  // best one by the lower words.
  template <bool kMaximum>
  __aicore__ inline uint64_t find() {
    const int32_t upper = extreme<kMaximum>(high());
    const Words candidates = words(3);
    CompareScalar(equal_.Get<uint8_t>(), high(), upper, CMPMODE::EQ, kBlockLanes);
    barrier();
    uint64_t kept = 0;
    GatherMask(candidates, low(), equal_.Get<uint32_t>(), true, kBlockLanes,
               GatherMaskParams(1, 1, 0, 0), kept);
    barrier();
    fill(candidates, static_cast<uint32_t>(kept), kBlockLanes,
         kMaximum ? kHighestBit : ~kHighestBit);
    barrier();
    const int32_t lower = extreme<kMaximum>(candidates);
    return uint64_t{static_cast<uint32_t>(upper) ^ static_cast<uint32_t>(kShift)} << 32 |
           static_cast<uint32_t>(change_highest_bit(static_cast<uint32_t>(lower)));
  }

  // Distances above the minimum; 0 for missing elements.
  __aicore__ inline void subtract(uint64_t minimum, uint32_t count) {
    const Words borrow = words(2);
    const uint32_t lower = static_cast<uint32_t>(minimum);
    const uint32_t upper = static_cast<uint32_t>(minimum >> 32) ^ static_cast<uint32_t>(kShift);
    less_than(borrow, low(), change_highest_bit(lower), words(3));
    Adds(low(), low(), static_cast<int32_t>(0u - (lower ^ 0x80000000u)), kBlockWords);
    Adds(high(), high(), static_cast<int32_t>(0u - upper), kBlockWords);
    barrier();
    Sub(high(), high(), borrow, kBlockWords);
    barrier();
    if (count < kBlockLanes) {
      fill(low(), count, kBlockLanes, 0);
      fill(high(), count, kBlockLanes, 0);
      barrier();
    }
  }

  __aicore__ inline void store_reference(GM_ADDR to, uint32_t bits, uint64_t minimum) {
    const Lanes quarters = lanes_.Get<int16_t>();
    separate_halves<2>(quarters, kBlockLanes, low().template ReinterpretCast<int16_t>(),
                       kBlockLanes);
    separate_halves<2>(quarters[2 * kBlockLanes], kBlockLanes,
                       high().template ReinterpretCast<int16_t>(), kBlockLanes);
    references_.store(to, bits, minimum,
                      [&](const Bytes& plane, uint32_t shift, uint32_t width) __aicore__ {
                        put_plane(plane, quarters[shift / 16 * kBlockLanes], shift % 16, width,
                                  quarters[4 * kBlockLanes], quarters[5 * kBlockLanes]);
                      });
  }

  TPipe* pipe_;
  ReferenceWriter references_;
  TBuf<TPosition::VECCALC> words_, lanes_, equal_;
};

class Ints64Reader : public ChecksumScratch<8>, public IntsReaderBase<8> {
  using Base = IntsReaderBase<8>;

 public:
  using Base::kWidth;
  static constexpr uint32_t kUnifiedBytes = ChecksumScratch<8>::kUnifiedBytes +
                                            unified(4 * kBlockLanes * 2) +
                                            unified(4 * kBlockLanes * 4) + Ones::kUnifiedBytes +
                                            Masks::kUnifiedBytes + WordPairs::kUnifiedBytes;

  __aicore__ inline void init(TPipe* pipe) {
    pipe_ = pipe;
    ChecksumScratch<8>::init(pipe);
    pipe->InitBuffer(quarters_, 4 * kBlockLanes * 2);
    pipe->InitBuffer(words_, 4 * kBlockLanes * 4);
    ones_.init(pipe);
    masks_.init(pipe);
    pairs_.init(pipe, kBlockLanes);
  }

  __aicore__ inline uint32_t decode(const Plan& plan, const Bytes& x, const Bytes&,
                                    const Bytes& slots) {
    return decode_blocks(plan, x, slots,
                         [&](const Bytes& block, const Bytes& slot, uint32_t bits)
                             __aicore__ { read_reference(block, slot, bits); });
  }

 private:
  __aicore__ inline Words words(uint32_t i) { return words_.Get<int32_t>()[i * kBlockLanes]; }

  __aicore__ inline void read_reference(const Bytes& x, const Bytes& slot, uint32_t bits) {
    hand_over<HardEvent::V_S>(pipe_);
    const uint32_t lower = slot.ReinterpretCast<uint32_t>().GetValue(0);
    const uint32_t upper = slot.ReinterpretCast<uint32_t>().GetValue(1);
    hand_over<HardEvent::S_V>(pipe_);
    const Lanes quarters = quarters_.Get<int16_t>();
    const Lanes scratch = words(2).ReinterpretCast<int16_t>();
    Duplicate(quarters, (int16_t)0, static_cast<int32_t>(4 * kBlockLanes));
    barrier();
    for_each_plane(bits, [&](uint32_t shift, uint32_t width, uint32_t at) __aicore__ {
      add_plane(quarters[shift / 16 * kBlockLanes], slot[kPlanesAt + at], shift % 16, width,
                scratch, scratch[kBlockLanes], masks_, ones_);
    });
    const Words low = words(0);
    const Words high = words(1);
    const Words carry = words(2);
    combine_halves(low.ReinterpretCast<int16_t>(), quarters, quarters[kBlockLanes], scratch,
                   kBlockLanes);
    combine_halves(high.ReinterpretCast<int16_t>(), quarters[2 * kBlockLanes],
                   quarters[3 * kBlockLanes], scratch, kBlockLanes);
    // low + minimum, and 1 for the upper word where that is less than the minimum.
    Adds(low, low, change_highest_bit(lower), kBlockWords);
    barrier();
    less_than(carry, low, change_highest_bit(lower), words(3));
    Adds(low, low, kHighestBit, kBlockWords);
    Adds(high, high, static_cast<int32_t>(upper), kBlockWords);
    barrier();
    Add(high, high, carry, kBlockWords);
    barrier();
    pairs_.combine(x.ReinterpretCast<uint32_t>(), low.ReinterpretCast<uint32_t>());
  }

  TPipe* pipe_;
  TBuf<TPosition::VECCALC> quarters_, words_;
  Masks masks_;
  Ones ones_;
  WordPairs pairs_;
};

}  // namespace memswap::ascend
