// The encoder's kernel: a warp codes a block into shared memory, the tile takes its position, the
// warps copy. What differs from shape to shape is a Coder.
#pragma once

#include "bitmaps.cuh"
#include "elements.cuh"
#include "encode_exponents.cuh"
#include "jobs.h"

namespace memswap::cuda {

template <class Memory>
struct alignas(16) EncodeShared {
  Memory warps[frame::kTileBlocks];
  Move compact[16];
  BlockSummary blocks[frame::kTileBlocks];
  uint8_t centers[frame::kTileBlocks];
  uint32_t place[frame::kTileBlocks];  // of the payloads, units in `area`
  uint8_t* area;                       // null: there is no room
  // What this tile's threads have gathered for the frame's header.
  uint32_t finished_tiles;
  uint32_t mode_count[frame::kModeCounts];
  unsigned long long zeros, center_sum, overflow_used;
};

template <uint32_t kBytes>
__device__ __forceinline__ EncodeStreams streams_of(EncodeMemory<kBytes>& memory,
                                                    const Move* compact, uint32_t lane) {
  return {memory.symbols, memory.stage, memory.positions, compact, kBytes, lane};
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
      return frame::kVersion | uint32_t{job.dtype} << 16 | uint32_t{job.shape} << 24;
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

template <class Memory>
__device__ void clear_gathered(EncodeShared<Memory>& shared, const Tile& tile) {
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
template <class Memory>
__device__ void finish_tiles(const EncodeShared<Memory>& shared, const EncodeJob& job,
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
template <class Memory>
__device__ void add_gathered(const EncodeShared<Memory>& shared, const Tile& tile,
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
template <class Memory>
__device__ Position take_position(EncodeShared<Memory>& shared, const EncodeJob& job,
                                  uint32_t units) {
  frame::Header& header = *job.counters;
  if (units == 0) {
    return {0, job.var};
  }
  const unsigned long long limit = job.var_limit;
  const unsigned long long base =
      atomicAdd(counter(header.var_used), static_cast<unsigned long long>(units));
  if (base + units <= limit) {
    return {static_cast<uint32_t>(base), job.var};
  }
  atomicMin(counter(header.var_used), limit);
  if (job.overflow != nullptr) {
    const unsigned long long over =
        atomicAdd(job.overflow_cursor, static_cast<unsigned long long>(units));
    if (over + units <= job.overflow_capacity) {
      shared.overflow_used += units;
      return {static_cast<uint32_t>(over) | frame::kBaseInOverflow, job.overflow};
    }
    atomicMin(job.overflow_cursor, static_cast<unsigned long long>(job.overflow_capacity));
  }
  atomicOr(&header.status, uint32_t{frame::kNoRoom});
  return {0, nullptr};
}

// The first warp of the tile: positions, the record, and what the header will say.
template <class Memory>
__device__ void finish_tile(EncodeShared<Memory>& shared, const EncodeJob& job, uint32_t tile_index,
                            uint32_t lane) {
  const BlockSummary mine = lane < frame::kTileBlocks ? shared.blocks[lane] : BlockSummary{};
  const uint32_t units = mine.coded & frame::Record::kUnitsMask;
  const uint32_t mode = mine.coded >> frame::Record::kModeShift;
  uint32_t end = units;
#pragma unroll
  for (uint32_t distance = 1; distance < frame::kTileBlocks; distance *= 2) {
    const uint32_t other = __shfl_up_sync(kAllLanes, end, distance);
    end += lane >= distance ? other : 0;
  }
  const uint32_t total = __shfl_sync(kAllLanes, end, frame::kTileBlocks - 1);
  Position position{};
  if (lane == 0) {
    position = take_position(shared, job, total);
    shared.area = position.area;
  }
  const uint32_t base = __shfl_sync(kAllLanes, position.base, 0);
  const uint32_t zeros = __reduce_add_sync(kAllLanes, mine.zeros);
  const uint32_t hints = __reduce_add_sync(kAllLanes, mine.hint);
  const uint64_t checksum = add_blocks_of_tile(mine.checksum);
  if (mode != frame::kNone) {
    atomicAdd(&shared.mode_count[mode - 1], 1u);
  }
  const uint32_t next = __shfl_down_sync(kAllLanes, mine.coded, 1);
  uint32_t* record =
      reinterpret_cast<uint32_t*>(job.records + uint64_t{tile_index} * frame::kRecordBytes);
  if (lane == 0) {
    shared.zeros += zeros;
    shared.center_sum += hints;
    record[0] = base;
    record[7] = static_cast<uint32_t>(checksum % frame::kChecksumPrime);
  }
  if (lane < frame::kTileBlocks) {
    shared.place[lane] = (base & ~frame::kBaseInOverflow) + end - units;
    if (lane % 2 == 0) {
      record[1 + lane / 2] = mine.coded | next << 16;
    }
    if (lane % 4 == 0) {
      record[5 + lane / 4] = reinterpret_cast<const uint32_t*>(shared.centers)[lane / 4];
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

template <class Coder>
__global__ void __launch_bounds__(kTileThreads, Coder::kTiles)
    encode_tiles(const __grid_constant__ EncodeJob job) {
  using Shared = EncodeShared<typename Coder::Memory>;
  const Tile tile = this_tile();
  Shared& shared = shared_of<Shared>();
  FirstRows<Coder::kWidth> rows;
  uint32_t block = blockIdx.x * frame::kTileBlocks + tile.warp;
  fetch_ahead<Coder>(job, block, tile.lane, rows);
  if (tile.thread < 16) {
    shared.compact[tile.thread] = compact_move(tile.thread);
  }
  clear_gathered(shared, tile);
  __syncthreads();
  // One number says which tile it is, too.
  const uint32_t stride = gridDim.x * frame::kTileBlocks;
  for (; block / frame::kTileBlocks < job.tiles; block += stride) {
    typename Coder::Memory& memory = shared.warps[tile.warp];
    BlockSummary& summary = shared.blocks[tile.warp];
    if (tile.lane == 0) {
      summary = {};
    }
    Coded coded{};
    if (block < job.blocks) {
      const Source<Coder::kWidth> source(job.input, job.elements, block);
      uint8_t* slab = job.frame + frame::kHeaderBytes + uint64_t{block} * Coder::kSlabBytes;
      coded = Coder::encode(job, source, rows, slab, memory, shared.compact, tile.warp, tile.lane,
                            summary);
    }
    fetch_ahead<Coder>(job, block + stride, tile.lane, rows);
    if (tile.lane == 0) {
      summary.coded = frame::Record::pack(coded.mode, coded.units, coded.packed);
      shared.centers[tile.warp] = static_cast<uint8_t>(coded.center);
    }
    __syncthreads();
    // A frame without elements has a tile, so that its header is written, but no record.
    if (tile.warp == 0 && job.blocks != 0) {
      finish_tile(shared, job, block / frame::kTileBlocks, tile.lane);
    }
    if (tile.thread == 0) {
      ++shared.finished_tiles;
    }
    __syncthreads();
    if constexpr (Coder::kHasPayload) {
      if (shared.area != nullptr && block < job.blocks) {
        uint8_t* to =
            to_global(shared.area) + uint64_t{shared.place[tile.warp]} * frame::kUnitBytes;
        if (Coder::kMayBeLiteral && coded.mode == frame::kLiteral) {
          write_literal<Coder::kWidth, Coder::kSlabBytes>(
              Source<Coder::kWidth>(job.input, job.elements, block),
              job.frame + frame::kHeaderBytes + uint64_t{block} * Coder::kSlabBytes, to, tile.lane);
        } else {
          Coder::write(job, block, coded, memory, to, tile.lane);
        }
      }
      __syncwarp();  // the next block overwrites what was written
    }
  }
  // All that the first warp gathered: the others have passed the last tile's second barrier.
  add_gathered(shared, tile, job);
}

// The payload from where it was staged.
template <class Memory>
__device__ __forceinline__ void write_staged(const Coded& coded, const Memory& memory, uint8_t* to,
                                             uint32_t lane) {
  const uint2* from = reinterpret_cast<const uint2*>(memory.stage);
#pragma unroll 1  // once or twice: the compiler would prepare for more
  for (uint32_t i = lane; i < coded.units; i += kLanes) {
    reinterpret_cast<uint2*>(to)[i] = from[i];
  }
}

template <class Coder>
EncodeKernel* encode_kernel() {
  constexpr uint32_t kSharedOfTile = sizeof(EncodeShared<typename Coder::Memory>);
  static_assert(kLeastTiles * (kSharedOfTile + kReservedBytes) <= kSharedBytes);
  static EncodeKernel kernel(encode_tiles<Coder>, kSharedOfTile);
  return &kernel;
}

}  // namespace memswap::cuda
