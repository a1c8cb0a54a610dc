// What the host tells the kernels, and how the cores share a frame.
//
// Note [positions without talking]
// Cores of this generation cannot take a ticket: atomic addition to memory returns nothing, and a
// barrier over all cores is not safe beside other streams. So each core owns a contiguous range of
// tiles, and positions follow from the tiles' sizes, in three launches:
//
// 1. The encoder measures (Pass::kMeasure): statistics, and from these each block's mode, centre
//    and length. Records say so, with the tile's length for a base; checksums and counters are made
//    here.
// 2. One core walks over the records in order (TilePlaces): a tile goes to var if it fits what is
//    left there, else to the overflow arena.
// 3. The encoder codes (Pass::kStore): every block as its record says, to where it says.
//
// So each element is measured once and coded once, frames are dense and ordered, and the same bytes
// on any number of cores. Slices of var that cores own would spare the second reading of the
// elements, and are ruled out by the canonical frame, which is ordered and has no gaps;
// docs/ascend.md ("Why an encode reads a tensor twice") has the other reasons. Only the last tile's
// room of var can stay unused while a tile goes to the arena. Layout raw has no payloads and takes
// the first launch alone, which then stores its slabs.
//
// The arena's cursor is read and written by that one core, without atomics: encodes that share an
// arena have to be in the order of one stream, as those of an encode lane are.
//
// Counters of the header are added up by the memory (SetAtomicAdd on int32, hence below 2^32
// elements); a launch before the encoder clears them.
#pragma once

#include "moves.h"

namespace memswap::ascend {

enum class Pass : uint32_t { kMeasure = 0, kStore = 1 };

struct EncodeJob {
  GM_ADDR input;
  GM_ADDR frame;
  GM_ADDR overflow;         // or null
  GM_ADDR overflow_cursor;  // u64
  uint64_t elements;
  uint64_t var_capacity;       // units
  uint64_t overflow_capacity;  // units
  uint32_t dtype;
  uint32_t layout;
  uint32_t slab_bytes;
  uint32_t checksum;  // 1: write checksums
  uint32_t fast;      // 1: the fast profile, with `center`
  uint32_t center;
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

constexpr uint32_t kHeaderWords = frame::kHeaderBytes / 4;

// Indices of u32 words in the header.
struct HeaderWord {
  static constexpr uint32_t kMagic = 0;
  static constexpr uint32_t kVersion = 1;  // | dtype << 16 | layout << 24
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

// The header in `buffer`, for the scalar unit.
__aicore__ inline LocalTensor<uint32_t> load_header(TPipe* pipe, TBuf<TPosition::VECCALC>* buffer,
                                                    GM_ADDR frame) {
  pipe->InitBuffer(*buffer, frame::kHeaderBytes);
  const LocalTensor<uint32_t> words = buffer->Get<uint32_t>();
  DataCopy(words, global_at<uint32_t>(frame, kHeaderWords), kHeaderWords);
  hand_over<HardEvent::MTE2_S>(pipe);
  return words;
}

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

  // Elements of the frame from block `block` on, at most `most`.
  __aicore__ inline static uint32_t elements_from(uint64_t elements, uint32_t block,
                                                  uint32_t most) {
    const uint64_t left = elements - uint64_t{block} * frame::kBlockElements;
    return left < most ? static_cast<uint32_t>(left) : most;
  }
};

// Blocks that are coded together: 16 KiB, or a tile where that is less.
constexpr uint32_t step_blocks(uint32_t width) { return width <= 2 ? 8 : 16 / width; }
// Steps whose elements one move brings: shorter moves waste bandwidth, longer ones leave no room in
// UB for what codes them (docs/ascend.md has the table). Of one-byte elements these are two tiles.
constexpr uint32_t move_steps(uint32_t width) { return width == 1 ? 2 : 1; }
constexpr uint32_t kMoveBytes = 16 * 1024;
constexpr uint32_t move_bytes(uint32_t width) {
  return move_steps(width) * step_blocks(width) * kBlockLanes * width;
}
static_assert(move_bytes(1) == kMoveBytes && move_bytes(2) == kMoveBytes &&
              move_bytes(4) == kMoveBytes && move_bytes(8) == kMoveBytes);

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
  __aicore__ inline static Room of_var(const EncodeJob& job) {
    const bool all = job.var_capacity < frame::kMaxBaseUnits;
    return Room(0, all ? job.var_capacity : uint64_t{frame::kMaxBaseUnits});
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
