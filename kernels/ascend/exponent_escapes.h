// The escapes of LQ2 and LQ3 on the way out (docs/format.md section 3).
//
// Note [escapes level by level]
// Symbols stand in streams, in the order of their lanes, and this vector unit has neither an
// expansion nor a scatter. So lanes fetch instead: the sum of the escapes before a lane is the
// number of its symbol, and Gather brings it. A stream becomes a table of distances v = c - E
// first, so a lane fetches what it needs. Lanes whose symbol only says that the next stream knows
// (kNext) are the escapes of the next level: LQ2 has S1, S2 and the E bytes, LQ3 has S1 and these.
// The scalar unit reads two numbers per block and level, whatever the number of escapes.
#pragma once

#include "ranks.h"
#include "statistics.h"
#include "streams.h"

namespace memswap::ascend {

// What is known of one block's escapes.
struct EscapeStreams {
  Bytes streams;        // at a multiple of 32 bytes
  uint32_t length = 0;  // bytes
  uint32_t before = 0;  // bytes of the payload before them
  uint32_t center = 0;
  uint32_t mode = 0;  // without escapes, unless it is LQ2 or LQ3
  bool good = true;   // after resolve(): the length is that of the streams
  uint32_t at = 0;    // where the next level's stream begins: at first, S1

  __aicore__ inline bool has_escapes() const { return mode == frame::kLq2 || mode == frame::kLq3; }
};

class EscapeReader {
  static constexpr uint32_t kEntries = 16;  // of a table of distances: one for each symbol
  static constexpr uint32_t kTables = 3;

 public:
  static constexpr uint32_t kUnifiedBytes =
      unified(kTables * kEntries * 2) + Greatest::kUnifiedBytes;

  // What it uses beside the reader that it is part of.
  __aicore__ inline void init(TPipe* pipe, Ranks* ranks, SymbolFetcher* symbols, Masks* masks) {
    pipe_ = pipe;
    ranks_ = ranks;
    symbols_ = symbols;
    masks_ = masks;
    pipe->InitBuffer(distances_, kTables * kEntries * 2);
    greatest_.init(pipe);
    make_distances();
  }

  // The escapes, where flags are 1 (elsewhere 0), get their v. All vectors have 1024 lanes per
  // block; flags and both scratch vectors are overwritten.
  __aicore__ inline void resolve(EscapeStreams* blocks, uint32_t count, const Lanes& v,
                                 const Lanes& flags, const Lanes& a, const Lanes& b) {
    const int32_t n = static_cast<int32_t>(count * kBlockLanes);
    for (uint32_t level = 0; level < kLevels; ++level) {
      if (level != 0 && !any(flags, b, count)) {
        break;
      }
      ranks_->compute(a, flags, b, count);
      fetch(blocks, count, level, flags, a);
      // v = fetched and, where that is kNext, an escape of the next level.
      Maxs(b, a, (int16_t)(kNext - 1), n);
      barrier();
      Adds(b, b, (int16_t)(1 - kNext), n);
      Sub(a, a, v, n);
      barrier();
      Mul(a, a, flags, n);
      barrier();
      Mul(flags, flags, b, n);
      Add(v, v, a, n);
      barrier();
    }
    for (uint32_t i = 0; i < count; ++i) {
      EscapeStreams& block = blocks[i];
      // Nothing but the padding of the last unit is left.
      block.good = block.good &&
                   (!block.has_escapes() || round_up(block.before + block.at, frame::kUnitBytes) ==
                                                block.before + block.length);
    }
  }

  // E = c - v, or 0 where v says so; e may be v. `scratch` has as many lanes and is overwritten.
  __aicore__ inline static void exponents(const Lanes& e, const Lanes& v, const Lanes& scratch,
                                          const uint32_t* centers, uint32_t blocks,
                                          const Lanes& mask, bool escapes) {
    const int32_t n = static_cast<int32_t>(blocks * kBlockLanes);
    if (escapes) {
      // 1 for v up to 255, 0 for kZero.
      Maxs(scratch, v, (int16_t)(kZero - 1), n);
      barrier();
      Muls(scratch, scratch, (int16_t)-1, n);
      barrier();
      Adds(scratch, scratch, (int16_t)kZero, n);
    }
    subtract_from_centers(e, v, centers, blocks, kBlockLanes, mask);
    if (escapes) {
      Mul(e, e, scratch, n);
      barrier();
    }
  }

 private:
  // Beside distances: E = 0, and the next stream knows.
  static constexpr int16_t kZero = 256;
  static constexpr int16_t kNext = 512;

  static constexpr uint32_t kLevels = 3;
  static constexpr uint32_t kLq3First = 0;
  static constexpr uint32_t kLq2First = 1;
  static constexpr uint32_t kLq2Second = 2;
  __aicore__ inline Lanes distances(uint32_t table) {
    return distances_.Get<int16_t>()[table * kEntries];
  }
  __aicore__ inline static void set_entry(const Lanes& table, uint32_t symbol, int16_t distance) {
    uint64_t mask[2] = {uint64_t{1} << symbol, 0};
    Duplicate(table, distance, mask, 1, 1, 8);
  }

  __aicore__ inline void make_distances() {
    const Lanes lq2_first = distances(kLq2First);
    CreateVecIndex(distances(kLq3First), (int16_t)frame::kLq3Nibbles.first, kEntries);
    CreateVecIndex(distances(kLq2Second), (int16_t)frame::kLq2Nibbles.first, kEntries);
    Duplicate(lq2_first, (int16_t)0, static_cast<int32_t>(kEntries));
    barrier();
    set_entry(distances(kLq3First), 12, frame::kLq3Nibbles.twelve);
    set_entry(distances(kLq3First), 13, frame::kLq3Nibbles.thirteen);
    set_entry(distances(kLq2Second), 12, frame::kLq2Nibbles.twelve);
    set_entry(distances(kLq2Second), 13, frame::kLq2Nibbles.thirteen);
    set_entry(distances(kLq3First), 14, kZero);
    set_entry(distances(kLq3First), 15, kNext);
    set_entry(distances(kLq2Second), 14, kZero);
    set_entry(distances(kLq2Second), 15, kNext);
    set_entry(lq2_first, 1, 4);
    set_entry(lq2_first, 2, 5);
    set_entry(lq2_first, 3, kNext);
    barrier();
  }

  __aicore__ inline bool any(const Lanes& flags, const Lanes& scratch, uint32_t count) {
    uint32_t greatest[frame::kTileBlocks];
    greatest_.find(greatest, flags, scratch, count);
    uint32_t sum = 0;
    for (uint32_t i = 0; i < count; ++i) {
      sum += greatest[i];
    }
    return sum != 0;
  }

  // Of one level: each block's ranks become what its lanes fetch. Where the streams end too early
  // there are no flags any more.
  __aicore__ inline void fetch(EscapeStreams* blocks, uint32_t count, uint32_t level,
                               const Lanes& flags, const Lanes& ranks) {
    constexpr uint32_t last = kBlockLanes - 1;
    uint32_t escapes[frame::kTileBlocks];
    hand_over<HardEvent::V_S>(pipe_);
    for (uint32_t i = 0; i < count; ++i) {
      escapes[i] = blocks[i].has_escapes()
                       ? static_cast<uint32_t>(ranks[i * kBlockLanes].GetValue(last) +
                                               flags[i * kBlockLanes].GetValue(last))
                       : 0;
    }
    hand_over<HardEvent::S_V>(pipe_);
    for (uint32_t i = 0; i < count; ++i) {
      EscapeStreams& block = blocks[i];
      const Lanes lanes = ranks[i * kBlockLanes];
      const bool lq2 = block.mode == frame::kLq2;
      const uint32_t width = (lq2 ? 2u : 4u) << level;
      const uint32_t bytes = stream_bytes(escapes[i], width);
      if (escapes[i] == 0) {
        continue;
      }
      if (bytes > block.length - block.at) {
        block.good = false;
        Duplicate(flags[i * kBlockLanes], (int16_t)0, static_cast<int32_t>(kBlockLanes));
        continue;
      }
      if (width == 8) {
        symbols_->fetch(lanes, block.streams, block.at, bytes, width);
        subtract_from_centers(lanes, lanes, &block.center, 1, kBlockLanes, masks_->low_bits(8));
      } else {
        const uint32_t table = !lq2 ? kLq3First : level == 0 ? kLq2First : kLq2Second;
        symbols_->fetch(lanes, block.streams, block.at, bytes, width, distances(table));
      }
      block.at += bytes;
    }
    barrier();
  }

  TPipe* pipe_;
  Ranks* ranks_;
  SymbolFetcher* symbols_;
  Masks* masks_;
  TBuf<TPosition::VECCALC> distances_;
  Greatest greatest_;
};

}  // namespace memswap::ascend
