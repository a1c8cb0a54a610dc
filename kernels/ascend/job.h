// What the host tells the kernels, and how the cores share a frame.
//
// Note [positions without talking]
// Cores of this generation cannot take a ticket: atomic addition to memory returns nothing, and a
// barrier over all cores is not safe beside other streams. So each core owns a contiguous range of
// tiles and a share of var in proportion to their blocks, and fills it from the front: frames are
// unordered and have gaps. A tile that does not fit what is left of its core's share is coded like
// any other, but its payloads are left out and its record says so (kDeferred). Then one core walks
// over the records and gives the deferred tiles consecutive places in the overflow arena (`place`),
// and a second run of the encoder codes these tiles again and stores their payloads (`spill`).
// Without deferred tiles both end after a look at the header. Every core but one may leave a tile's
// room of var unused, so an encode can need kMaxCores tiles of overflow beyond what var lacks.
//
// The arena's cursor is read and written by that one core, without atomics: encodes that share an
// arena have to be in the order of one stream, as those of an encode lane are.
//
// Counters of the header are added up by the memory (SetAtomicAdd on int32, hence below 2^32
// elements); a launch before the encoder clears them.
#pragma once

#include "lanes.h"

namespace memswap::ascend {

enum class Pass : uint32_t { kMain = 0, kSpill = 1 };

struct EncodeJob {
  GM_ADDR input;
  GM_ADDR frame;
  GM_ADDR overflow;         // or null
  GM_ADDR overflow_cursor;  // u64
  uint64_t elements;
  uint64_t var_capacity;       // units
  uint64_t overflow_capacity;  // units
  uint32_t dtype;
  uint32_t shape;
  uint32_t slab_bytes;
  uint32_t checksum;  // 1: write checksums
  uint32_t pass;
};

struct DecodeJob {
  GM_ADDR frame;
  GM_ADDR output;
  GM_ADDR status;              // u32; errors
  GM_ADDR overflow;            // or null
  uint64_t overflow_capacity;  // units
  uint64_t frame_bytes;
  uint64_t elements;
  uint32_t dtype;
  uint32_t verify;  // 1: compare checksums, where the frame has them
};

// Base of a record whose payloads are nowhere yet.
constexpr uint32_t kDeferred = frame::kBaseInOverflow;
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

// 16 KiB, or a tile where that is less: the blocks that are moved and coded together.
constexpr uint32_t step_blocks(uint32_t width) { return width <= 2 ? 8 : 16 / width; }

struct Step {
  uint32_t first;   // its first block in the tile
  uint32_t blocks;  // that are there
  uint32_t count;   // elements
};

// Units of an area that a core may fill.
class Room {
 public:
  __aicore__ inline Room() : next_(0), end_(0) {}
  __aicore__ inline Room(uint64_t next, uint64_t end) : next_(next), end_(end) {}
  // The core's share of var.
  __aicore__ inline Room(const Share& share, uint64_t capacity) {
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
  __aicore__ inline void back_to(uint32_t next) { next_ = next; }

 private:
  uint64_t next_;
  uint64_t end_;
};

}  // namespace memswap::ascend
