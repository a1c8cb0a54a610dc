// The escapes of LQ3 on the way in (docs/format.md section 3): compaction, their 4-bit symbols and
// the exponents that no symbol stands for.
#pragma once

#include "streams.h"

namespace memswap::ascend {

// The steps below compute these in place of comparisons.
static_assert(frame::kLq3Nibbles.is(8, 0, 255));

constexpr uint32_t kDenseSlotBytes = 1024;  // of one block's payload while it is put together
constexpr uint32_t kHighBitsBytes = kBlockLanes / 8;

struct Lq3Counts {
  uint32_t escapes = 0;
  uint32_t explicit_exponents = 0;  // symbol 15

  __aicore__ inline uint32_t bytes() const {
    return kHighBitsBytes + stream_bytes(escapes, 4) + explicit_exponents;
  }
};

class Lq3Escapes {
 public:
  static constexpr uint32_t kBlocks = 8;
  static constexpr uint32_t kUnifiedBytes =
      2 * unified(kBlocks * kHighBitsBytes) + unified(128) + unified(64);

  __aicore__ inline void init(TPipe* pipe) {
    pipe_ = pipe;
    pipe->InitBuffer(is_escape_, kBlocks * kHighBitsBytes);
    pipe->InitBuffer(is_explicit_, kBlocks * kHighBitsBytes);
    pipe->InitBuffer(greatest_, 128);
    pipe->InitBuffer(any_, 64);
  }

  // Of `codes`, as half: bitmaps of bit 2 into the slots, of the escapes for later.
  __aicore__ inline void compare(const Lanes& codes, const Bytes& slots, uint32_t blocks) {
    for (uint32_t b = 0; b < blocks; ++b) {
      CompareScalar(slots[b * kDenseSlotBytes], as_half(codes)[b * kBlockLanes],
                    static_cast<half>(4.0f), CMPMODE::GE, kBlockLanes);
    }
    CompareScalar(is_escape_.Get<uint8_t>(), as_half(codes), static_cast<half>(0.0f), CMPMODE::EQ,
                  blocks * kBlockLanes);
    barrier();
  }

  // Writes the streams behind the bitmaps in the slots and counts. a, b, c and d are overwritten.
  // Exponents without a symbol stand behind S1, from the next multiple of 32 bytes on.
  __aicore__ inline void write(const Lanes& exponents, const uint32_t* centers, const Bytes& slots,
                               uint32_t blocks, const Lanes& a, const Lanes& b, const Lanes& c,
                               const Lanes& d, const Lanes& byte_mask, Lq3Counts* counts) {
    const uint32_t lanes = compact(exponents, blocks, a, b, counts);
    if (lanes == 0) {
      return;
    }
    const uint32_t all = blocks * lanes;
    subtract_from_centers(c, b, centers, blocks, lanes, byte_mask);
    symbols(b, c, a, d, static_cast<int32_t>(all));
    for (uint32_t i = 0; i < blocks; ++i) {
      fill(c, i * lanes + counts[i].escapes, (i + 1) * lanes, (int16_t)0);
    }
    barrier();
    Cast(as_half(d), c, RoundMode::CAST_RINT, all);
    uint64_t kept = 0;
    GatherMask(a, c, (uint8_t)1, true, all, GatherMaskParams(1, 1, 0, 0), kept);
    barrier();
    const bool any = any_explicit(d, all);
    // The odd symbols take the symbols' own place.
    GatherMask(d, c, (uint8_t)2, true, all, GatherMaskParams(1, 1, 0, 0), kept);
    barrier();
    ShiftLeft(as_bits(d), as_bits(d), (uint16_t)4, static_cast<int32_t>(all / 2));
    barrier();
    Or(as_bits(a), as_bits(a), as_bits(d), static_cast<int32_t>(all / 2));
    barrier();
    lanes_to_half(a, all / 2);
    barrier();
    for (uint32_t i = 0; i < blocks; ++i) {
      half_to_bytes(slots[i * kDenseSlotBytes + kHighBitsBytes], a[i * lanes / 2], lanes / 2);
    }
    barrier();
    if (any) {
      explicit_exponents(b, a, slots, blocks, lanes, counts);
    }
  }

 private:
  // Escapes of each block into b, `lanes` apart; returns lanes, a multiple of 256, or 0 for none.
  __aicore__ inline uint32_t compact(const Lanes& exponents, uint32_t blocks, const Lanes& a,
                                     const Lanes& b, Lq3Counts* counts) {
    const LocalTensor<uint16_t> escapes = is_escape_.Get<uint16_t>();
    uint32_t most = 0;
    for (uint32_t i = 0; i < blocks; ++i) {
      uint64_t kept = 0;
      GatherMask(as_bits(a)[i * kBlockLanes], as_bits(exponents)[i * kBlockLanes],
                 escapes[i * kHighBitsBytes / 2], true, kBlockLanes, GatherMaskParams(1, 1, 0, 0),
                 kept);
      counts[i].escapes = static_cast<uint32_t>(kept);
      most = counts[i].escapes > most ? counts[i].escapes : most;
    }
    barrier();
    if (most == 0) {
      return 0;
    }
    const uint32_t lanes = round_up(most, 256);
    for (uint32_t i = 0; i < blocks; ++i) {
      fill(a, i * kBlockLanes + counts[i].escapes, i * kBlockLanes + lanes, (int16_t)0);
    }
    barrier();
    for (uint32_t i = 0; i < lanes; i += kRepeatLanes) {
      Copy(b[i], a[i], kAllLanes, static_cast<uint8_t>(blocks),
           CopyRepeatParams(1, 1, stride_of(lanes), stride_of(kBlockLanes)));
    }
    barrier();
    return lanes;
  }

  // The symbol is min(near, far), where near is v - 8 for v = 8..19, 12 for v = 0 and 20 or more
  // for others; far is 13 for v = 255, else 14 for E = 0, else 15. In place of comparisons:
  // min(x, 1) is 1 for all x but 0, and max(x, n) - n is 0 up to n. Result in v.
  __aicore__ inline void symbols(const Lanes& exponents, const Lanes& v, const Lanes& far,
                                 const Lanes& near, int32_t n) {
    Maxs(far, v, (int16_t)254, n);
    Mins(near, exponents, (int16_t)1, n);
    barrier();
    Adds(far, far, (int16_t)-254, n);
    Muls(near, near, (int16_t)-1, n);
    barrier();
    Muls(far, far, (int16_t)2, n);
    Adds(near, near, (int16_t)1, n);
    barrier();
    Max(far, far, near, n);
    barrier();
    Muls(far, far, (int16_t)-1, n);
    Maxs(near, v, (int16_t)19, n);
    barrier();
    Adds(far, far, (int16_t)15, n);
    Adds(near, near, (int16_t)-19, n);
    barrier();
    Mins(near, near, (int16_t)1, n);
    barrier();
    Muls(near, near, (int16_t)8, n);
    barrier();
    Add(near, near, v, n);
    barrier();
    Adds(near, near, (int16_t)-8, n);
    Mins(v, v, (int16_t)1, n);
    barrier();
    Muls(v, v, (int16_t)-20, n);
    barrier();
    Adds(v, v, (int16_t)20, n);
    barrier();
    Add(near, near, v, n);
    barrier();
    Min(v, near, far, n);
    barrier();
  }

  // Whether any of the symbols, as half, is 15; where they are.
  __aicore__ inline bool any_explicit(const Lanes& symbols, uint32_t all) {
    const LocalTensor<half> greatest = greatest_.Get<half>();
    const LocalTensor<half> top = any_.Get<half>();
    const LocalTensor<int32_t> top_word = any_.Get<int32_t>()[8];
    CompareScalar(is_explicit_.Get<uint8_t>(), as_half(symbols), static_cast<half>(15.0f),
                  CMPMODE::EQ, all);
    const uint32_t repeats = all / kRepeatLanes;
    WholeReduceMax(greatest, as_half(symbols), 128, static_cast<int32_t>(repeats), 1, 1, 8,
                   ReduceOrder::ORDER_ONLY_VALUE);
    hand_over<HardEvent::S_V>(pipe_);
    Duplicate(top, static_cast<half>(0.0f), 16);
    barrier();
    WholeReduceMax(top, greatest, static_cast<int32_t>(repeats), 1, 1, 1, 8,
                   ReduceOrder::ORDER_ONLY_VALUE);
    barrier();
    Cast(top_word, top, RoundMode::CAST_RINT, 8);
    hand_over<HardEvent::V_S>(pipe_);
    return top_word.GetValue(0) == 15;
  }

  __aicore__ inline void explicit_exponents(const Lanes& exponents, const Lanes& out,
                                            const Bytes& slots, uint32_t blocks, uint32_t lanes,
                                            Lq3Counts* counts) {
    const LocalTensor<uint16_t> where = is_explicit_.Get<uint16_t>();
    for (uint32_t i = 0; i < blocks; ++i) {
      uint64_t kept = 0;
      GatherMask(as_bits(out)[i * lanes], as_bits(exponents)[i * lanes], where[i * lanes / 16],
                 true, lanes, GatherMaskParams(1, 1, 0, 0), kept);
      counts[i].explicit_exponents = static_cast<uint32_t>(kept);
    }
    barrier();
    for (uint32_t i = 0; i < blocks; ++i) {
      fill(out, i * lanes + counts[i].explicit_exponents, (i + 1) * lanes, (int16_t)0);
    }
    barrier();
    lanes_to_half(out, blocks * lanes);
    barrier();
    for (uint32_t i = 0; i < blocks; ++i) {
      const uint32_t at = kHighBitsBytes + round_up(stream_bytes(counts[i].escapes, 4), 32);
      // A block without room for them takes FW.
      const uint32_t room = kDenseSlotBytes - at;
      const uint32_t bytes = round_up(counts[i].explicit_exponents + 8, 32);
      if (counts[i].explicit_exponents != 0 && bytes <= room) {
        half_to_bytes(slots[i * kDenseSlotBytes + at], out[i * lanes],
                      bytes < lanes ? bytes : lanes);
      }
    }
    barrier();
  }

  TPipe* pipe_;
  TBuf<TPosition::VECCALC> is_escape_, is_explicit_, greatest_, any_;
};

}  // namespace memswap::ascend
