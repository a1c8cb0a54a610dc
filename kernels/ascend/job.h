// What the host tells the kernels, and how the cores share a frame.
//
// Note [positions without talking]
// Cores of this generation cannot take a ticket: atomic addition to memory returns nothing, and a
// barrier over all cores is not safe beside other streams. So each core owns a contiguous range of
// tiles and a share of var in proportion to their blocks, and fills it from the front. A frame is
// therefore unordered, with gaps, and a core whose share is too small sets kNoRoom although
// another's may have room left; with the worst case as the capacity it cannot happen. The overflow
// arena is not used: its cursor would need the ticket.
//
// Counters of the header are added up by the memory (SetAtomicAdd on int32, hence below 2^32
// elements); a launch before the encoder clears them, one after it makes the status 0 or 1.
#pragma once

#include "lanes.h"

namespace memswap::ascend {

struct EncodeJob {
  GM_ADDR input;
  GM_ADDR frame;
  uint64_t elements;
  uint64_t var_capacity;  // units
  uint32_t dtype;
  uint32_t shape;
  uint32_t slab_bytes;
  uint32_t checksum;  // 1: write checksums
};

struct DecodeJob {
  GM_ADDR frame;
  GM_ADDR output;
  GM_ADDR status;              // u32; an error adds its bits
  GM_ADDR overflow;            // or null
  uint64_t overflow_capacity;  // units
  uint64_t frame_bytes;
  uint64_t elements;
  uint32_t dtype;
  uint32_t verify;  // 1: compare checksums, where the frame has them
};

constexpr uint64_t kMaxElements = 0xffffffffu;
constexpr uint32_t kHeaderWords = frame::kHeaderBytes / 4;

// Indices of u32 words in the header.
struct HeaderWord {
  static constexpr uint32_t kMagic = 0;
  static constexpr uint32_t kVersion = 1;  // | dtype << 16 | shape << 24
  static constexpr uint32_t kFlags = 2;
  static constexpr uint32_t kStatus = 3;
  static constexpr uint32_t kElements = 4;  // and 5
  static constexpr uint32_t kBlocks = 6;
  static constexpr uint32_t kSlabBytes = 7;
  static constexpr uint32_t kVarCapacity = 8;  // and 9
  static constexpr uint32_t kVarUsed = 10;
  static constexpr uint32_t kOverflowUsed = 12;
  static constexpr uint32_t kZeros = 14;
  static constexpr uint32_t kCenterSum = 16;
  static constexpr uint32_t kModeCount = 18;
};

// The tiles of one core, and the places of the frame's sections.
struct Share {
  uint32_t blocks;  // of the frame
  uint32_t tiles;
  uint32_t first_tile;
  uint32_t end_tile;
  uint64_t records;  // byte offsets in the frame
  uint64_t var;

  __aicore__ inline Share(uint64_t elements, uint32_t slab_bytes) {
    blocks = static_cast<uint32_t>((elements + frame::kBlockElements - 1) / frame::kBlockElements);
    tiles = (blocks + frame::kTileBlocks - 1) / frame::kTileBlocks;
    const uint64_t core = static_cast<uint64_t>(GetBlockIdx());
    const uint64_t cores = static_cast<uint64_t>(GetBlockNum());
    first_tile = static_cast<uint32_t>(tiles * core / cores);
    end_tile = static_cast<uint32_t>(tiles * (core + 1) / cores);
    records = frame::kHeaderBytes + uint64_t{blocks} * slab_bytes;
    var = records + uint64_t{tiles} * frame::kRecordBytes;
  }

  __aicore__ inline uint64_t blocks_before(uint32_t tile) const {
    const uint64_t before = uint64_t{tile} * frame::kTileBlocks;
    return before < blocks ? before : blocks;
  }

  // Elements of the frame from block `block` on, at most `most`.
  __aicore__ inline static uint32_t elements_from(uint64_t elements, uint32_t block,
                                                  uint32_t most) {
    const uint64_t left = elements - uint64_t{block} * frame::kBlockElements;
    return left < most ? static_cast<uint32_t>(left) : most;
  }
};

// Units of var that a core may fill.
class VarShare {
 public:
  __aicore__ inline VarShare(const Share& share, uint64_t capacity) {
    const uint64_t usable = capacity < frame::kMaxBaseUnits ? capacity : frame::kMaxBaseUnits;
    next_ = share.blocks == 0 ? 0 : usable * share.blocks_before(share.first_tile) / share.blocks;
    end_ = share.blocks == 0 ? 0 : usable * share.blocks_before(share.end_tile) / share.blocks;
  }
  __aicore__ inline uint32_t next() const { return static_cast<uint32_t>(next_); }
  __aicore__ inline bool take(uint32_t units) {
    if (units > end_ - next_) {
      return false;
    }
    next_ += units;
    return true;
  }

 private:
  uint64_t next_;
  uint64_t end_;
};

}  // namespace memswap::ascend
