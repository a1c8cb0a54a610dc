// How long the escapes of LQ2 and LQ3 would be (docs/format.md section 3), without writing them.
#pragma once

#include "statistics.h"
#include "streams.h"

namespace memswap::ascend {

// Of one block.
struct EscapeCounts {
  uint32_t escapes = 0;
  uint32_t rare = 0;                // of LQ2: 3 in S1
  uint32_t explicit_exponents = 0;  // with a byte E

  __aicore__ inline uint32_t lq2_bytes() const {
    return stream_bytes(escapes, 2) + stream_bytes(rare, 4) + explicit_exponents;
  }
  __aicore__ inline uint32_t lq3_bytes() const {
    return kBlockLanes / 8 + stream_bytes(escapes, 4) + explicit_exponents;
  }
};

class EscapeCounter {
  static constexpr uint32_t kMaxBlocks = frame::kTileBlocks;
  static constexpr uint32_t kCounts = 3;
  static constexpr uint32_t kSums = 32;  // that a reduction leaves; more than are used
  static_assert(kCounts * kMaxBlocks <= kSums);

 public:
  static constexpr uint32_t kUnifiedBytes = unified(kSums * 2) + unified(kSums * 4);

  __aicore__ inline void init(TPipe* pipe) {
    pipe_ = pipe;
    pipe->InitBuffer(sums_, kSums * 2);
    pipe->InitBuffer(words_, kSums * 4);
  }

  // Of `blocks` blocks' exponents, 1024 lanes each, as are a, b, c and d, which are overwritten.
  template <bool kLq2>
  __aicore__ inline void count(const Lanes& e, const uint32_t* centers, uint32_t blocks,
                               const Lanes& a, const Lanes& b, const Lanes& c, const Lanes& d,
                               Masks& masks, EscapeCounts* counts) {
    constexpr frame::NibbleCode nibbles = kLq2 ? frame::kLq2Nibbles : frame::kLq3Nibbles;
    // A code says 1..codes; v = 0 is an escape, and one less than it is far from all of these.
    constexpr int16_t codes = kLq2 ? 3 : 7;
    // v from here on have no nibble, up to the least that has one again.
    constexpr int16_t none = nibbles.first + 12;
    constexpr int16_t again = nibbles.thirteen;
    static_assert(nibbles.twelve == 0 || nibbles.twelve > nibbles.thirteen);
    const uint32_t lanes = blocks * kBlockLanes;
    const int32_t n = static_cast<int32_t>(lanes);
    subtract_from_centers(a, e, centers, blocks, kBlockLanes, masks.low_bits(8));
    Adds(b, a, (int16_t)-1, n);
    barrier();
    and_all(b, b, masks.low_bits(8), lanes);
    clamp(c, a, none, n);
    clamp(d, a, again, n);
    Sub(c, c, d, n);
    barrier();
    Adds(c, c, static_cast<int16_t>(again - none), n);
    Mins(d, e, (int16_t)1, n);  // E = 0 has a nibble
    barrier();
    Mul(c, c, d, n);
    clamp(b, b, codes, n);
    // All counts in one lane: of 16 lanes they stay below 2^5 each, when what each lane has too
    // many is taken off their sum.
    int16_t too_many = codes - 1;
    Muls(c, c, (int16_t)(1 << 2 * kBits), n);
    barrier();
    Add(b, b, c, n);
    barrier();
    if constexpr (kLq2) {
      clamp(a, a, nibbles.first, n);
      Muls(a, a, (int16_t)(1 << kBits), n);
      barrier();
      Add(b, b, a, n);
      barrier();
      too_many += (nibbles.first - 1) << kBits;
    }
    const Lanes sums = fold_to_64<Fold::kAdd>(b, a, blocks);
    Adds(sums, sums, static_cast<int16_t>(-16 * too_many), static_cast<int32_t>(blocks * 64));
    barrier();
    read(sums, d, blocks, counts);
  }

 private:
  static constexpr uint32_t kBits = 5;

  // `bound` where x >= bound, else bound - 1.
  __aicore__ inline static void clamp(const Lanes& to, const Lanes& x, int16_t bound, int32_t n) {
    Maxs(to, x, static_cast<int16_t>(bound - 1), n);
    barrier();
    Mins(to, to, bound, n);
    barrier();
  }

  // Sums of 16 lanes, 64 of them per block; `fields` is overwritten.
  __aicore__ inline void read(const Lanes& sums, const Lanes& fields, uint32_t blocks,
                              EscapeCounts* counts) {
    const uint32_t lanes = blocks * 64;
    const int32_t n = static_cast<int32_t>(lanes);
    const LocalTensor<half> totals = sums_.Get<half>();
    const LocalTensor<int32_t> words = words_.Get<int32_t>();
    ShiftLeft(as_bits(fields), as_bits(sums), (uint16_t)(16 - kBits), n);
    ShiftLeft(as_bits(fields)[lanes], as_bits(sums), (uint16_t)(16 - 2 * kBits), n);
    ShiftRight(as_bits(fields)[2 * lanes], as_bits(sums), (uint16_t)(2 * kBits), n);
    // The scalar unit has read what was counted before.
    hand_over<HardEvent::S_V>(pipe_);
    Duplicate(totals, static_cast<half>(0.0f), static_cast<int32_t>(kSums));
    barrier();
    ShiftRight(as_bits(fields), as_bits(fields), (uint16_t)(16 - kBits), 2 * n);
    barrier();
    lanes_to_half(fields, kCounts * lanes);
    barrier();
    // At most 1024, which half holds exactly.
    WholeReduceSum(totals, as_half(fields), 64, static_cast<int32_t>(kCounts * blocks), 1, 1, 4);
    barrier();
    Cast(words, totals, RoundMode::CAST_RINT, kSums);
    hand_over<HardEvent::V_S>(pipe_);
    for (uint32_t b = 0; b < blocks; ++b) {
      counts[b].escapes = static_cast<uint32_t>(words.GetValue(b));
      counts[b].rare = static_cast<uint32_t>(words.GetValue(blocks + b));
      counts[b].explicit_exponents = static_cast<uint32_t>(words.GetValue(2 * blocks + b));
    }
  }

  TPipe* pipe_;
  TBuf<TPosition::VECCALC> sums_, words_;
};

}  // namespace memswap::ascend
