// Layout ints for elements of 1, 2 and 4 bytes: distances above the block's minimum.
#pragma once

#include "halves.h"
#include "reference.h"
#include "statistics.h"

namespace memswap::ascend {

template <uint32_t kBytes, bool kSigned>
class IntsCoder : public ChecksumScratch<kBytes> {
  static constexpr uint32_t kBlocks = step_blocks(kBytes);
  static constexpr uint32_t kBits = 8 * kBytes;
  static constexpr uint32_t kBlockBytes = kBlockLanes * kBytes;
  // Bytes are widened to lanes of 16 bits.
  using Value = std::conditional_t<kBytes == 4, int32_t, int16_t>;
  static constexpr uint32_t kValueBytes = sizeof(Value);
  static constexpr Value kLowest = static_cast<Value>(1u << (8 * kValueBytes - 1));
  // Unsigned values become signed ones by a change of their highest bit; bytes are small anyway.
  static constexpr bool kShifted = !kSigned && kBytes != 1;
  // Two halves of a step's words, or the scratch of a fold; and two blocks behind them.
  static constexpr uint32_t kLanesNeeded = 8 * kBlockLanes + 2 * kBlockLanes;
  static constexpr uint32_t kExtremes = 4 * 8;

  static constexpr uint32_t kCommonBytes = unified(kBlocks * kBlockLanes * kValueBytes) +
                                           unified(kLanesNeeded * 2) + unified(8 * 64 * 4) +
                                           unified(kExtremes * 4);

 public:
  static constexpr uint32_t kWidth = kBytes;
  static constexpr uint32_t kSlabBytes = 0;
  static constexpr bool kHasPayloads = true;
  static constexpr uint32_t kMeasureBytes = kCommonBytes + ChecksumScratch<kBytes>::kUnifiedBytes;
  static constexpr uint32_t kStoreBytes =
      kCommonBytes + ReferenceWriter::unified_bytes(kBlockBytes);

  __aicore__ inline void init_measure(TPipe* pipe, const EncodeJob&) {
    init_common(pipe);
    ChecksumScratch<kBytes>::init(pipe);
  }

  __aicore__ inline void init_store(TPipe* pipe) {
    init_common(pipe);
    references_.init(pipe, kBlockBytes);
  }

  __aicore__ inline void measure(const Step& step, const Bytes& x, TileRecord* record,
                                 HeaderCounters*) {
    // In the order of signed integers, and missing elements like one that is there.
    widen(x, step.count);
    int32_t minimum[kBlocks];
    int32_t maximum[kBlocks];
    find_extremes(minimum, maximum);
    for (uint32_t b = 0; b < step.blocks; ++b) {
      const uint32_t range = static_cast<uint32_t>(maximum[b]) - static_cast<uint32_t>(minimum[b]);
      set_reference(record, step.first + b, bit_length(range), kWidth);
    }
  }

  __aicore__ inline void encode(const Step& step, const Bytes& x, const Bytes&,
                                const TileRecord& record, GM_ADDR to) {
    widen(x, step.count);
    int32_t minimum[kBlocks];
    int32_t maximum[kBlocks];
    find_extremes(minimum, maximum);
    const LocalTensor<Value> values = values_.template Get<Value>();
    for (uint32_t b = 0; b < kBlocks; ++b) {
      Adds(values[b * kBlockLanes], values[b * kBlockLanes],
           static_cast<Value>(0u - static_cast<uint32_t>(minimum[b])),
           static_cast<int32_t>(kBlockLanes));
    }
    barrier();
    if (step.count % kBlockLanes != 0) {
      fill(values, step.count, kBlocks * kBlockLanes, static_cast<Value>(0));
      barrier();
    }
    separate();
    LiteralWriter literals(pipe_);
    for (uint32_t b = 0; b < step.blocks; ++b) {
      if (record.mode_of(step.first + b) == frame::kLiteral) {
        literals.store(to, x[b * kBlockBytes], kBlockBytes);
      } else {
        store_reference(to, b, record.center[step.first + b], element_bits(minimum[b]));
      }
      to += record.units_of(step.first + b) * frame::kUnitBytes;
    }
    literals.end();
  }

 private:
  __aicore__ inline void init_common(TPipe* pipe) {
    pipe_ = pipe;
    pipe->InitBuffer(values_, kBlocks * kBlockLanes * kValueBytes);
    pipe->InitBuffer(lanes_, kLanesNeeded * 2);
    pipe->InitBuffer(floats_, 8 * 64 * 4);
    pipe->InitBuffer(extremes_, kExtremes * 4);
  }

  __aicore__ inline Lanes lane(uint32_t i) { return lanes_.Get<int16_t>()[i * kBlockLanes]; }

  __aicore__ inline uint32_t element_bits(int32_t value) {
    const uint32_t bits = static_cast<uint32_t>(value) + (kShifted ? 1u << (kBits - 1) : 0u);
    return kBits == 32 ? bits : bits & ((1u << kBits % 32) - 1);
  }

  __aicore__ inline void widen(const Bytes& x, uint32_t count) {
    constexpr int32_t n = kBlocks * kBlockLanes;
    const LocalTensor<Value> values = values_.template Get<Value>();
    barrier();
    if constexpr (kWidth == 1) {
      const LocalTensor<half> wide = values_.template Get<half>();
      if constexpr (kSigned) {
        Cast(wide, x.ReinterpretCast<int8_t>(), RoundMode::CAST_NONE, n);
      } else {
        Cast(wide, x, RoundMode::CAST_NONE, n);
      }
      barrier();
      Cast(values, wide, RoundMode::CAST_RINT, n);
    } else {
      Adds(values, x.ReinterpretCast<Value>(), static_cast<Value>(kShifted ? kLowest : 0), n);
    }
    barrier();
    if (count % kBlockLanes != 0) {
      hand_over<HardEvent::V_S>(pipe_);
      const Value present = values.GetValue(count - 1);
      hand_over<HardEvent::S_V>(pipe_);
      fill(values, count, kBlocks * kBlockLanes, present);
      barrier();
    }
  }

  __aicore__ inline void find_extremes(int32_t* minimum, int32_t* maximum) {
    hand_over<HardEvent::S_V>(pipe_);
    if constexpr (kWidth == 4) {
      const LocalTensor<int32_t> values = values_.template Get<int32_t>();
      const LocalTensor<int32_t> scratch = lanes_.Get<int32_t>();
      const LocalTensor<int32_t> spread = scratch[kBlockLanes];
      const LocalTensor<int32_t> spread_maxima = spread[kBlocks * 64];
      for (uint32_t b = 0; b < kBlocks; ++b) {
        const LocalTensor<int32_t> block = values[b * kBlockLanes];
        Min(scratch, block, block[512], 512);
        Max(scratch[512], block, block[512], 512);
        barrier();
        for (int32_t left = 256; left >= 8; left /= 2) {
          Min(scratch, scratch, scratch[left], left);
          Max(scratch[512], scratch[512], scratch[512 + left], left);
          barrier();
        }
        // Lanes do not move sideways within 32 bytes: each of the eight becomes a row.
        Brcb(spread[b * 64], scratch, 1, BrcbRepeatParams(1, 8));
        Brcb(spread_maxima[b * 64], scratch[512], 1, BrcbRepeatParams(1, 8));
        barrier();
      }
      const BinaryRepeatParams rows(1, 1, 1, 8, 8, 8);
      for (uint32_t left = 32; left >= 8; left /= 2) {
        Min(spread, spread, spread[left], uint64_t{left}, static_cast<uint8_t>(kBlocks), rows);
        Max(spread_maxima, spread_maxima, spread_maxima[left], uint64_t{left},
            static_cast<uint8_t>(kBlocks), rows);
        barrier();
      }
      hand_over<HardEvent::V_S>(pipe_);
      for (uint32_t b = 0; b < kBlocks; ++b) {
        minimum[b] = spread.GetValue(b * 64);
        maximum[b] = spread_maxima.GetValue(b * 64);
      }
      hand_over<HardEvent::S_V>(pipe_);
    } else {
      const Lanes values = values_.template Get<int16_t>();
      const LocalTensor<int32_t> extremes = extremes_.Get<int32_t>();
      // 16 bits are exact in float.
      const LocalTensor<float> floats = floats_.Get<float>();
      const LocalTensor<float> result = extremes_.Get<float>();
      Cast(floats, fold_to_64<Fold::kMin>(values, lanes_.Get<int16_t>(), kBlocks),
           RoundMode::CAST_NONE, kBlocks * 64);
      barrier();
      WholeReduceMin(result, floats, 64, static_cast<int32_t>(kBlocks), 1, 1, 8,
                     ReduceOrder::ORDER_ONLY_VALUE);
      Cast(floats[0], fold_max(values), RoundMode::CAST_NONE, kBlocks * 64);
      barrier();
      WholeReduceMax(result[8], floats, 64, static_cast<int32_t>(kBlocks), 1, 1, 8,
                     ReduceOrder::ORDER_ONLY_VALUE);
      barrier();
      Cast(extremes[16], result, RoundMode::CAST_RINT, 16);
      hand_over<HardEvent::V_S>(pipe_);
      for (uint32_t b = 0; b < kBlocks; ++b) {
        minimum[b] = extremes.GetValue(16 + b);
        maximum[b] = extremes.GetValue(24 + b);
      }
    }
  }
  __aicore__ inline Lanes fold_max(const Lanes& values) {
    barrier();
    return fold_to_64<Fold::kMax>(values, lanes_.Get<int16_t>(), kBlocks);
  }

  // Words into halves; the lanes of a block are then where the planes are taken from.
  __aicore__ inline void separate() {
    if constexpr (kWidth == 4) {
      separate_halves<2>(lanes_.Get<int16_t>(), kBlocks * kBlockLanes,
                         values_.template Get<int16_t>(), kBlocks * kBlockLanes);
    }
  }
  __aicore__ inline Lanes symbols(uint32_t b, bool upper) {
    return kWidth == 4 ? lane(upper ? kBlocks + b : b)
                       : values_.template Get<int16_t>()[b * kBlockLanes];
  }

  __aicore__ inline void store_reference(GM_ADDR to, uint32_t b, uint32_t bits, uint32_t minimum) {
    references_.store(to, bits, minimum,
                      [&](const Bytes& plane, uint32_t shift, uint32_t width) __aicore__ {
                        put_plane(plane, symbols(b, shift >= 16), shift % 16, width, lane(2 * 4),
                                  lane(2 * 4 + 1));
                      });
  }

  TPipe* pipe_;
  ReferenceWriter references_;
  TBuf<TPosition::VECCALC> values_, lanes_, floats_, extremes_;
};

template <uint32_t kBytes>
class IntsReader : public ChecksumScratch<kBytes>, public IntsReaderBase<kBytes> {
  using Base = IntsReaderBase<kBytes>;

 public:
  using Base::kBlockBytes;
  using Base::kSlotBytes;
  using Base::kWidth;
  static constexpr uint32_t kUnifiedBytes = ChecksumScratch<kBytes>::kUnifiedBytes +
                                            unified(4 * kBlockLanes * 2) + Ones::kUnifiedBytes +
                                            Masks::kUnifiedBytes;

  __aicore__ inline void init(TPipe* pipe) {
    pipe_ = pipe;
    ChecksumScratch<kBytes>::init(pipe);
    pipe->InitBuffer(lanes_, 4 * kBlockLanes * 2);
    ones_.init(pipe);
    masks_.init(pipe);
  }

  __aicore__ inline uint32_t decode(const Plan& plan, const Bytes& x, const Bytes&,
                                    const Bytes& slots) {
    return Base::decode_blocks(plan, x, slots,
                               [&](const Bytes& block, const Bytes& slot, uint32_t bits)
                                   __aicore__ { read_reference(block, slot, bits); });
  }

 private:
  __aicore__ inline Lanes lane(uint32_t i) { return lanes_.Get<int16_t>()[i * kBlockLanes]; }

  __aicore__ inline void read_reference(const Bytes& x, const Bytes& slot, uint32_t bits) {
    hand_over<HardEvent::V_S>(pipe_);
    const uint32_t minimum = slot.ReinterpretCast<uint32_t>().GetValue(0);
    hand_over<HardEvent::S_V>(pipe_);
    const Lanes low = lane(0);
    const Lanes high = lane(1);
    Duplicate(low, (int16_t)0, static_cast<int32_t>(kBlockLanes));
    Duplicate(high, (int16_t)0, static_cast<int32_t>(kBlockLanes));
    barrier();
    for_each_plane(bits, [&](uint32_t shift, uint32_t width, uint32_t at) __aicore__ {
      add_plane(shift < 16 ? low : high, slot[kPlanesAt + at], shift % 16, width, lane(2), lane(3),
                masks_, ones_);
    });
    if constexpr (kWidth == 4) {
      const LocalTensor<int32_t> words = x.ReinterpretCast<int32_t>();
      combine_halves(x.ReinterpretCast<int16_t>(), low, high, lane(2), kBlockLanes);
      Adds(words, words, static_cast<int32_t>(minimum), static_cast<int32_t>(kBlockLanes));
    } else {
      Adds(low, low, static_cast<int16_t>(minimum), static_cast<int32_t>(kBlockLanes));
      barrier();
      if constexpr (kWidth == 2) {
        copy_bytes(x, low.ReinterpretCast<uint8_t>(), kBlockBytes);
      } else {
        and_all(low, low, masks_.low_bits(8), kBlockLanes);
        barrier();
        lanes_to_half(low, kBlockLanes);
        barrier();
        half_to_bytes(x, low, kBlockLanes);
      }
    }
  }

  TPipe* pipe_;
  TBuf<TPosition::VECCALC> lanes_;
  Masks masks_;
  Ones ones_;
};

}  // namespace memswap::ascend
