// The encoder's kernel: a warp codes a block into shared memory, the tile takes its position, the
// warps copy. What differs from layout to layout is a Coder.
#pragma once

#include "bitmaps.cuh"
#include "elements.cuh"
#include "encode_exponents.cuh"
#include "jobs.h"

namespace memswap::cuda {

// What the warps of a tile tell each other.
struct EncodedTile {
  BlockSummary blocks[frame::kTileBlocks];
  uint8_t centers[frame::kTileBlocks];
  uint32_t place[frame::kTileBlocks];  // of the payloads, units in `area`
  uint8_t* area;                       // null: there is no room
};

template <class Coder>
struct alignas(16) EncodeShared {
  typename Coder::Memory warps[frame::kTileBlocks];
  SymbolTables tables;
  EncodedTile tiles[Coder::kStages];
  // What this thread block has gathered for the frame's header.
  uint32_t finished_tiles;
  uint32_t mode_count[frame::kModeCounts];
  unsigned long long zeros, center_sum, overflow_used;
};

template <class Memory>
__device__ __forceinline__ EncodeStreams streams_of(Memory& memory, uint32_t stage,
                                                    const SymbolTables& tables, uint32_t lane) {
  return {memory.symbols, memory.stages[stage], memory.positions,
          &tables,        Memory::kStageBytes,  lane};
}

// The block's part of the tile's checksum, from its lanes'.
__device__ __forceinline__ void keep_checksum(const EncodeJob& job, uint64_t of_lane, uint32_t lane,
                                              BlockSummary& summary) {
  if (job.checked) {
    const uint64_t checksum = add_lanes_of_block(of_lane);
    if (lane == 0) {
      summary.checksum = checksum;
    }
  }
}

// Visits a block's rows, with the lane's words of each, and keeps the checksum. The first ones are
// there if kLoadedEarly: load_late.
template <bool kLoadedEarly, uint32_t kWidth, typename Visit>
__device__ __forceinline__ void for_rows(const EncodeJob& job, const Source<kWidth>& source,
                                         FirstRows<kWidth>& rows, uint32_t warp, uint32_t lane,
                                         BlockSummary& summary, Visit visit) {
  constexpr uint32_t kAtOnce = kRowsAtOnce<kWidth>;
  uint64_t sum = 0;
#pragma unroll
  for (uint32_t row = 0; row < kRows; ++row) {
    if (row % kAtOnce == 0) {
      load_late<kLoadedEarly>(source, row, lane, rows);
      if (job.checked) {
        sum += checksum_rows<kWidth>(rows, warp, row, lane);
      }
    }
    visit(row, rows[row % kAtOnce]);
  }
  keep_checksum(job, sum, lane, summary);
}

// Atomics on the header's 64-bit fields.
__device__ __forceinline__ unsigned long long* counter(uint64_t& field) {
  return reinterpret_cast<unsigned long long*>(&field);
}

inline constexpr uint32_t kHeaderWords = frame::kHeaderBytes / 4;
static_assert(kHeaderWords == kLanes);

// A word of a frame's header before anything has been counted.
__device__ inline uint32_t header_word(const EncodeJob& job, uint32_t word) {
  switch (word) {
    case 0:
      return frame::kMagic;
    case 1:
      return frame::kVersion | uint32_t{job.dtype} << 16 | uint32_t{job.layout} << 24;
    case 2:
      return job.checked ? frame::kChecked : 0;
    case 4:
      return static_cast<uint32_t>(job.elements);
    case 5:
      return static_cast<uint32_t>(job.elements >> 32);
    case 6:
      return job.blocks;
    case 7:
      return job.slab_bytes;
    case 8:
      return static_cast<uint32_t>(job.var_capacity);
    case 9:
      return static_cast<uint32_t>(job.var_capacity >> 32);
    default:
      return 0;  // status, and from var_used on
  }
}

template <class Coder>
__device__ void clear_gathered(EncodeShared<Coder>& shared, const Tile& tile) {
  if (tile.thread < frame::kModeCounts) {
    shared.mode_count[tile.thread] = 0;
  } else if (tile.thread == frame::kModeCounts) {
    shared.zeros = shared.center_sum = shared.overflow_used = 0;
    shared.finished_tiles = 0;
  }
}

// [Note: the last tile] Whoever finds that all tiles are finished finds the counters complete: each
// warp's atomics come before its lane 0's fence (the barrier), and that before its addition to the
// finished tiles; the last addition comes before that lane's second fence, and that before what its
// warp reads (the second barrier). That warp makes the header of the slot, and the slot 0 again.
template <class Coder>
__device__ void finish_tiles(const EncodeShared<Coder>& shared, const EncodeJob& job,
                             uint32_t lane) {
  uint32_t finished = 0;
  __syncwarp();
  if (lane == 0) {
    __threadfence();
    finished = shared.finished_tiles + atomicAdd(&job.counters->blocks, shared.finished_tiles);
    __threadfence();
  }
  finished = __shfl_sync(kAllLanes, finished, 0);
  if (finished == job.tiles) {
    __syncwarp();
    uint32_t* counted = reinterpret_cast<uint32_t*>(job.counters);
    // Not from this processor's own cache. Word 6 has counted tiles.
    const uint32_t sum = lane == 6 ? 0 : __ldcg(counted + lane);
    const uint32_t word = sum + header_word(job, lane);
    reinterpret_cast<uint32_t*>(job.frame)[lane] = word;
    if (job.report != nullptr) {
      job.report[lane] = word;
    }
    counted[lane] = 0;
  }
}

// Adds what was gathered to the header: a handful of atomics for a whole run of tiles. All of a
// tile's atomics on counters, take_position's as well, are of its first warp.
template <class Coder>
__device__ void add_gathered(const EncodeShared<Coder>& shared, const Tile& tile,
                             const EncodeJob& job) {
  if (tile.warp != 0) {
    return;
  }
  frame::Header& counters = *job.counters;
  if (tile.lane < frame::kModeCounts) {
    if (shared.mode_count[tile.lane] != 0) {
      atomicAdd(&counters.mode_count[tile.lane], shared.mode_count[tile.lane]);
    }
  } else if (tile.lane == frame::kModeCounts) {
    if (shared.zeros != 0) {
      atomicAdd(counter(counters.zeros), shared.zeros);
    }
    if (shared.center_sum != 0) {
      atomicAdd(counter(counters.center_sum), shared.center_sum);
    }
    if (shared.overflow_used != 0) {
      atomicAdd(counter(counters.overflow_used), shared.overflow_used);
    }
  }
  if (job.is_counted_apart) {
    finish_tiles(shared, job, tile.lane);
  }
}

struct Position {
  uint32_t base;  // of the record
  uint8_t* area;
};

// [Note: positions] A tile takes its position by adding to a cursor. Where the sum passes the
// limit, the position is void, and the cursor is put down to the limit, never below it: taking the
// addition back could hand out again what another tile got in between. So the tile that does not
// fit ends the area, and at most one tile's payload of room is lost.
//
// The cursor in var is the low word of var_used: it never passes 32 bits, because each thread block
// has put it down to the limit before it adds again.
inline constexpr uint32_t kMostUnitsOfTile = frame::kTileBlocks * frame::Record::kUnitsMask;
static_assert(frame::kMaxBaseUnits + uint64_t{kMostThreadBlocks} * kMostUnitsOfTile <= ~0u);
__device__ __forceinline__ uint32_t* cursor_of(const EncodeJob& job) {
  return reinterpret_cast<uint32_t*>(&job.counters->var_used);
}

// The position of a tile of `units`, from what the cursor was.
template <class Coder>
__device__ Position position_at(EncodeShared<Coder>& shared, const EncodeJob& job, uint32_t base,
                                uint32_t units) {
  const uint32_t limit = static_cast<uint32_t>(job.var_limit);
  if (units == 0) {
    return {0, job.var};
  }
  if (base + units <= limit) {
    return {base, job.var};
  }
  atomicMin(cursor_of(job), limit);
  if (job.overflow != nullptr) {
    const unsigned long long over =
        atomicAdd(job.overflow_cursor, static_cast<unsigned long long>(units));
    if (over + units <= job.overflow_capacity) {
      shared.overflow_used += units;
      return {static_cast<uint32_t>(over) | frame::kBaseInOverflow, job.overflow};
    }
    atomicMin(job.overflow_cursor, static_cast<unsigned long long>(job.overflow_capacity));
  }
  atomicOr(&job.counters->status, uint32_t{frame::kNoRoom});
  return {0, nullptr};
}

// Lane i's block of a tile; none for the lanes behind.
__device__ __forceinline__ uint32_t coded_of(const EncodedTile& encoded, uint32_t lane) {
  return lane < frame::kTileBlocks ? encoded.blocks[lane].coded : 0;
}

__device__ __forceinline__ uint32_t* record_of(const EncodeJob& job, uint32_t tile_index) {
  return reinterpret_cast<uint32_t*>(job.records + uint64_t{tile_index} * frame::kRecordBytes);
}

// The tile's first warp: adds to the cursor. Returns what it was to lane 0, for place_payloads.
__device__ __forceinline__ uint32_t ask_position(const EncodedTile& encoded, const EncodeJob& job,
                                                 uint32_t lane) {
  const uint32_t units =
      __reduce_add_sync(kAllLanes, coded_of(encoded, lane) & frame::Record::kUnitsMask);
  return add_of_first_lane(cursor_of(job), units, lane);
}

// The tile's first warp: where the payloads stand.
template <class Coder>
__device__ __forceinline__ void place_payloads(EncodeShared<Coder>& shared, EncodedTile& encoded,
                                               const EncodeJob& job, uint32_t tile_index,
                                               uint32_t before, uint32_t lane) {
  const uint32_t units = coded_of(encoded, lane) & frame::Record::kUnitsMask;
  uint32_t end = units;
#pragma unroll
  for (uint32_t distance = 1; distance < frame::kTileBlocks; distance *= 2) {
    end = add_from_below(end, distance, lane);
  }
  const uint32_t total = __shfl_sync(kAllLanes, end, frame::kTileBlocks - 1);
  Position position{};
  if (lane == 0) {
    position = position_at(shared, job, before, total);
    encoded.area = position.area;
    record_of(job, tile_index)[0] = position.base;
  }
  const uint32_t base = __shfl_sync(kAllLanes, position.base, 0);
  if (lane < frame::kTileBlocks) {
    encoded.place[lane] = (base & ~frame::kBaseInOverflow) + end - units;
  }
}

// What else the record says, and what the header will say: of a tile's second and third warp, which
// have nothing else to do for all of it.
template <class Coder>
__device__ __forceinline__ void describe_tile(EncodeShared<Coder>& shared,
                                              const EncodedTile& encoded, const EncodeJob& job,
                                              uint32_t tile_index, const Tile& tile) {
  uint32_t* record = record_of(job, tile_index);
  const uint32_t lane = tile.lane;
  const bool has_block = lane < frame::kTileBlocks;
  if (tile.warp == 1) {
    const uint32_t coded = coded_of(encoded, lane);
    const uint32_t zeros = __reduce_add_sync(kAllLanes, has_block ? encoded.blocks[lane].zeros : 0);
    const uint32_t hints = __reduce_add_sync(kAllLanes, has_block ? encoded.blocks[lane].hint : 0);
    const uint32_t mode = coded >> frame::Record::kModeShift;
    if (mode != frame::kNone) {
      atomicAdd(&shared.mode_count[mode - 1], 1u);
    }
    if (lane == 0) {
      shared.zeros += zeros;
      shared.center_sum += hints;
    }
    const uint32_t next = __shfl_down_sync(kAllLanes, coded, 1);
    if (has_block && lane % 2 == 0) {
      record[1 + lane / 2] = coded | next << 16;
    }
    if (has_block && lane % 4 == 0) {
      record[5 + lane / 4] = reinterpret_cast<const uint32_t*>(encoded.centers)[lane / 4];
    }
  } else if (tile.warp == 2) {
    const uint64_t checksum = add_blocks_of_tile(has_block ? encoded.blocks[lane].checksum : 0);
    if (lane == 0) {
      record[7] = static_cast<uint32_t>(checksum % frame::kChecksumPrime);
    }
  }
}

// [Note: fetching ahead]: the block's first rows to registers, and to the L2 what follows them, or
// 4 KB of it.
template <class Coder>
__device__ __forceinline__ void fetch_ahead(const EncodeJob& job, uint32_t block, uint32_t lane,
                                            FirstRows<Coder::kWidth>& rows) {
  constexpr uint32_t kWidth = Coder::kWidth;
  if (block >= job.blocks) {
    return;
  }
  const Source<kWidth> source(job.input, job.elements, block);
  if constexpr (Coder::kLoadsEarly) {
    load_early(source, lane, rows);
  }
  constexpr uint32_t kEarlyRows = Coder::kLoadsEarly ? kRowsAtOnce<kWidth> : 0;
  if constexpr (kEarlyRows < kRows) {
    const uint32_t element = kEarlyRows * kRowElements + lane * (kLineBytes / kWidth);
    if (element < source.count) {
      fetch_ahead(source.first + element * kWidth);
    }
  }
}

// A block as it is: what does not fit into the slab is the payload.
template <uint32_t kWidth, uint32_t kSlabBytes>
__device__ __forceinline__ Coded literal() {
  Coded coded{};
  coded.mode = frame::kLiteral;
  coded.units = (frame::kBlockElements * kWidth - kSlabBytes) / frame::kUnitBytes;
  return coded;
}

template <uint32_t kWidth, uint32_t kSlabBytes>
__device__ __forceinline__ void write_literal(const Source<kWidth>& source,
                                              [[maybe_unused]] uint8_t* slab, uint8_t* payload,
                                              uint32_t lane) {
#pragma unroll 1
  for (uint32_t row = 0; row < kRows; ++row) {
    uint32_t words[kRowWords<kWidth>];
    load_row(source, row, lane, words);
    const uint32_t begin = (row * kRowElements + lane * kLaneColumns) * kWidth;
#pragma unroll
    for (uint32_t i = 0; i < kRowWords<kWidth>; i += 2) {
      const uint32_t byte = begin + 4 * i;
      uint8_t* to = payload + byte;
      if constexpr (kSlabBytes != 0) {
        to = byte < kSlabBytes ? slab + byte : to - kSlabBytes;
      }
      store_pair(to, words[i], words[i + 1]);
    }
  }
}

// The payload from where it was staged.
__device__ __forceinline__ void write_staged(uint32_t units, const uint32_t* stage, uint8_t* to,
                                             uint32_t lane) {
  const uint2* from = reinterpret_cast<const uint2*>(stage);
#pragma unroll 1  // once or twice: the compiler would prepare for more
  for (uint32_t i = lane; i < units; i += kLanes) {
    reinterpret_cast<uint2*>(to)[i] = from[i];
  }
}

// A warp's block of a tile, which tells the others of it; then the warp's next block is on its way.
template <class Coder>
__device__ __forceinline__ Coded encode_block(EncodeShared<Coder>& shared, const EncodeJob& job,
                                              uint32_t block, uint32_t next, uint32_t stage,
                                              FirstRows<Coder::kWidth>& rows, const Tile& tile) {
  EncodedTile& encoded = shared.tiles[stage];
  BlockSummary& summary = encoded.blocks[tile.warp];
  if (tile.lane == 0) {
    summary = {};
  }
  Coded coded{};
  if (block < job.blocks) {
    const Source<Coder::kWidth> source(job.input, job.elements, block);
    uint8_t* slab = job.frame + frame::kHeaderBytes + uint64_t{block} * Coder::kSlabBytes;
    coded = Coder::encode(job, source, rows, slab, shared.warps[tile.warp], stage, shared.tables,
                          tile.warp, tile.lane, summary);
  }
  if constexpr (Coder::kFetchesNext) {
    fetch_ahead<Coder>(job, next, tile.lane, rows);
  }
  if (tile.lane == 0) {
    summary.coded = frame::Record::pack(coded.mode, coded.units, coded.packed);
    encoded.centers[tile.warp] = static_cast<uint8_t>(coded.center);
  }
  return coded;
}

// Writes the payload of a block whose tile has its position.
template <class Coder>
__device__ __forceinline__ void write_block(EncodeShared<Coder>& shared, const EncodeJob& job,
                                            uint32_t block, uint32_t stage, const Coded& coded,
                                            const Tile& tile) {
  const EncodedTile& encoded = shared.tiles[stage];
  if (encoded.area == nullptr || block >= job.blocks) {
    return;
  }
  uint8_t* to = to_global(encoded.area) + uint64_t{encoded.place[tile.warp]} * frame::kUnitBytes;
  if (Coder::kMayBeLiteral && coded.mode == frame::kLiteral) {
    write_literal<Coder::kWidth, Coder::kSlabBytes>(
        Source<Coder::kWidth>(job.input, job.elements, block),
        job.frame + frame::kHeaderBytes + uint64_t{block} * Coder::kSlabBytes, to, tile.lane);
  } else if constexpr (Coder::kStages == 2) {
    write_staged(coded.units, shared.warps[tile.warp].stages[stage], to, tile.lane);
  } else {
    Coder::write(job, block, coded, shared.warps[tile.warp], to, tile.lane);
  }
}

template <class Coder>
__global__ void __launch_bounds__(kTileThreads, Coder::kTiles)
    encode_tiles(const __grid_constant__ EncodeJob job) {
  const Tile tile = this_tile();
  auto& shared = shared_of<EncodeShared<Coder>>();
  FirstRows<Coder::kWidth> rows;
  // One number says which tile it is, too.
  uint32_t block = blockIdx.x * frame::kTileBlocks + tile.warp;
  const uint32_t stride = gridDim.x * frame::kTileBlocks;
  fetch_ahead<Coder>(job, block, tile.lane, rows);
  if (tile.thread < 16) {
    shared.tables.compact[tile.thread] = compact_move(tile.thread);
  }
  shared.tables.nibbles[tile.thread ^ 0x80u] = nibbles_of(tile.thread);
  clear_gathered(shared, tile);
  __syncthreads();
  // A frame without elements has a tile, so that its header is written, but no record.
  const bool has_records = job.blocks != 0;
  if constexpr (Coder::kStages == 1) {
    for (; block / frame::kTileBlocks < job.tiles; block += stride) {
      const uint32_t tile_index = block / frame::kTileBlocks;
      EncodedTile& encoded = shared.tiles[0];
      const Coded coded = encode_block(shared, job, block, block + stride, 0, rows, tile);
      __syncthreads();
      if (has_records) {
        if (tile.warp == 0) {
          const uint32_t before = Coder::kHasPayload ? ask_position(encoded, job, tile.lane) : 0;
          place_payloads(shared, encoded, job, tile_index, before, tile.lane);
        }
        describe_tile(shared, encoded, job, tile_index, tile);
      }
      if (tile.thread == 0) {
        ++shared.finished_tiles;
      }
      __syncthreads();
      if constexpr (Coder::kHasPayload) {
        write_block(shared, job, block, 0, coded, tile);
        __syncwarp();  // the next block overwrites what was written
      }
    }
  } else {
    // [Note: two stages] A tile's payloads are written while the next tile's are in the other
    // stage, so that no warp waits for the cursor: it is asked behind the barrier that follows the
    // blocks, and looked at when the first warp has encoded its next block. What is said of a tile
    // is read between that barrier and the next, and overwritten behind that.
    uint32_t stage = 0, before = 0;
    for (;; block += stride, stage ^= 1) {
      const bool is_first = block < stride;
      const bool is_behind = block / frame::kTileBlocks >= job.tiles;
      if (!is_behind) {
        encode_block(shared, job, block, block + stride, stage, rows, tile);
      }
      if (tile.warp == 0 && !is_first && has_records) {
        place_payloads(shared, shared.tiles[stage ^ 1], job, (block - stride) / frame::kTileBlocks,
                       before, tile.lane);
      }
      __syncthreads();
      if (!is_behind && has_records) {
        if (tile.warp == 0) {
          before = ask_position(shared.tiles[stage], job, tile.lane);
        }
        describe_tile(shared, shared.tiles[stage], job, block / frame::kTileBlocks, tile);
      }
      if (!is_first) {
        Coded coded{};
        const uint32_t said = shared.tiles[stage ^ 1].blocks[tile.warp].coded;
        coded.mode = said >> frame::Record::kModeShift;
        coded.units = said & frame::Record::kUnitsMask;
        write_block(shared, job, block - stride, stage ^ 1, coded, tile);
      }
      if (is_behind) {
        break;
      }
      if (tile.thread == 0) {
        ++shared.finished_tiles;
      }
      __syncwarp();  // the next block overwrites what was written
    }
  }
  // All that the first warp gathered: the others have passed a barrier behind the last tile.
  add_gathered(shared, tile, job);
}

template <class Coder>
EncodeKernel* encode_kernel() {
  constexpr uint32_t kSharedOfTile = sizeof(EncodeShared<Coder>);
  static_assert(kLeastTiles * (kSharedOfTile + kReservedBytes) <= kSharedBytes);
  static EncodeKernel kernel(encode_tiles<Coder>, kSharedOfTile);
  return &kernel;
}

}  // namespace memswap::cuda
