// The encoder's kernel: a warp codes a block into shared memory, the tile takes its position, the
// warps copy. What differs from shape to shape is a Coder.
#pragma once

#include "bitmaps.cuh"
#include "elements.cuh"
#include "encode_exponents.cuh"
#include "jobs.h"

namespace memswap::cuda {

// What a tile needs to know of the frame that it belongs to.
struct EncodeFrame {
  frame::Header* counters;  // its own header, or its slot of the workspace
  uint8_t* records;
  uint8_t* var;
  uint64_t var_limit;  // units: payloads end here or before
  uint32_t blocks;
  uint32_t first_tile;
};

// Of a block, for the warp that gathers what its tile says of it.
struct BlockSummary {
  uint32_t coded;     // Record::pack
  uint32_t hint;      // adds to center_sum
  uint32_t zeros;     // adds to zeros
  uint64_t checksum;  // adds to the tile's
};

template <class Memory>
struct alignas(16) EncodeShared {
  Memory warps[frame::kTileBlocks];
  Move compact[16];
  EncodeFrame frame;
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

// Atomics on the header's 64-bit fields.
__device__ __forceinline__ unsigned long long* counter(uint64_t& field) {
  return reinterpret_cast<unsigned long long*>(&field);
}

inline constexpr uint32_t kHeaderWords = frame::kHeaderBytes / 4;
static_assert(kHeaderWords == kLanes);

// A word of a frame's header before anything has been counted.
__device__ inline uint32_t header_word(const EncodeJob& job, uint32_t blocks, uint32_t slab_bytes,
                                       uint32_t word) {
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
      return blocks;
    case 7:
      return slab_bytes;
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
__device__ void finish_tiles(const EncodeShared<Memory>& shared, const EncodeTable& table,
                             uint32_t job_index, uint32_t slab_bytes, uint32_t lane) {
  uint32_t finished = 0;
  __syncwarp();
  if (lane == 0) {
    __threadfence();
    finished = shared.finished_tiles +
               atomicAdd(&to_global(shared.frame.counters)->blocks, shared.finished_tiles);
    __threadfence();
  }
  finished = __shfl_sync(kAllLanes, finished, 0);
  if (finished == table.end(job_index) - shared.frame.first_tile) {
    __syncwarp();
    const EncodeJob& job = table.jobs[job_index];
    uint32_t* counted = reinterpret_cast<uint32_t*>(&table.workspace[job_index]);
    // Not from this processor's own cache. The slot's word 6 has counted tiles.
    const uint32_t sum = lane == 6 ? 0 : __ldcg(counted + lane);
    reinterpret_cast<uint32_t*>(job.frame)[lane] =
        sum + header_word(job, shared.frame.blocks, slab_bytes, lane);
    counted[lane] = 0;
  }
}

// Adds what was gathered to the header: a handful of atomics for a whole run of tiles. All of a
// tile's atomics on counters, take_position's as well, are of its first warp.
template <class Memory>
__device__ void add_gathered(const EncodeShared<Memory>& shared, const Tile& tile,
                             const EncodeTable& table, uint32_t job_index, uint32_t slab_bytes) {
  if (tile.warp != 0) {
    return;
  }
  frame::Header& counters = *to_global(shared.frame.counters);
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
  if (table.workspace != nullptr) {
    finish_tiles(shared, table, job_index, slab_bytes, tile.lane);
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
  frame::Header& header = *to_global(shared.frame.counters);
  if (units == 0) {
    return {0, shared.frame.var};
  }
  const unsigned long long limit = shared.frame.var_limit;
  const unsigned long long base =
      atomicAdd(counter(header.var_used), static_cast<unsigned long long>(units));
  if (base + units <= limit) {
    return {static_cast<uint32_t>(base), shared.frame.var};
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
  uint32_t* record = reinterpret_cast<uint32_t*>(to_global(shared.frame.records) +
                                                 uint64_t{tile_index} * frame::kRecordBytes);
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

// [Note: fetching ahead]: the block, or the first 4 KB of it.
template <uint32_t kWidth>
__device__ __forceinline__ void fetch_ahead(const EncodeJob& job, uint32_t tile_index,
                                            uint32_t warp, uint32_t lane) {
  constexpr uint32_t kBlockBytes = frame::kBlockElements * kWidth;
  const uint64_t at =
      (uint64_t{tile_index} * frame::kTileBlocks + warp) * kBlockBytes + lane * kLineBytes;
  if (lane * kLineBytes < kBlockBytes && at < job.elements * kWidth) {
    fetch_ahead(job.input + at);
  }
}

template <class Coder>
__global__ void __launch_bounds__(Coder::kBounds.threads, Coder::kBounds.blocks)
    encode_tiles(const __grid_constant__ EncodeTable table) {
  using Shared = EncodeShared<typename Coder::Memory>;
  const Tile tile = this_tile();
  Shared& shared = shared_of<Shared>(tile);
  if (tile.thread < 16) {
    shared.compact[tile.thread] = compact_move(tile.thread);
  }
  clear_gathered(shared, tile);
  uint32_t job_index = 0;
  uint32_t job_end = 0;  // no job yet
  for (uint32_t t = blockIdx.x * tile.slots + tile.slot;; t += gridDim.x * tile.slots) {
    if (t >= job_end) {
      // Nobody reads what changes here after the last tile's second barrier.
      if (job_end != 0) {
        add_gathered(shared, tile, table, job_index, Coder::kSlabBytes);
        __syncwarp();  // its lanes have read what is cleared and changed now
        clear_gathered(shared, tile);
      }
      if (t >= table.tiles) {
        return;
      }
      while (t >= table.end(job_index)) {
        ++job_index;
      }
      job_end = table.end(job_index);
      fetch_ahead<Coder::kWidth>(table.jobs[job_index], t - table.jobs[job_index].first_tile,
                                 tile.warp, tile.lane);
      if (tile.thread == 0) {
        const EncodeJob& job = table.jobs[job_index];
        const frame::Layout layout =
            frame::layout_of(static_cast<frame::Dtype>(job.dtype),
                             static_cast<frame::Shape>(job.shape), job.elements);
        shared.frame.counters = table.workspace != nullptr
                                    ? &table.workspace[job_index].header
                                    : reinterpret_cast<frame::Header*>(job.frame);
        shared.frame.records = job.frame + layout.records;
        shared.frame.var = job.frame + layout.var;
        shared.frame.var_limit =
            job.var_capacity < frame::kMaxBaseUnits ? job.var_capacity : frame::kMaxBaseUnits;
        shared.frame.blocks = layout.blocks;
        shared.frame.first_tile = job.first_tile;
      }
      sync_tile(tile);
    }
    const EncodeJob& job = table.jobs[job_index];
    const uint32_t tile_index = t - shared.frame.first_tile;
    const uint32_t block = tile_index * frame::kTileBlocks + tile.warp;
    typename Coder::Memory& memory = shared.warps[tile.warp];
    BlockSummary summary{};
    uint32_t center = 0;
    if (block < shared.frame.blocks) {
      const Source<Coder::kWidth> source(job.input, job.elements, block);
      uint8_t* slab = job.frame + frame::kHeaderBytes + uint64_t{block} * Coder::kSlabBytes;
      const Coded coded = Coder::encode(job, source, slab, memory, shared.compact, tile.warp,
                                        tile.lane, summary.checksum);
      summary.coded = frame::Record::pack(coded.mode, coded.units, coded.packed);
      summary.hint = coded.hint;
      summary.zeros = coded.zeros;
      center = coded.center;
      if (job.checked) {
        summary.checksum = add_lanes_of_block(summary.checksum);
      }
    }
    if (tile.lane == 0) {
      shared.blocks[tile.warp] = summary;
      shared.centers[tile.warp] = static_cast<uint8_t>(center);
    }
    sync_tile(tile);
    // A frame without elements has a tile, so that its header is written, but no record.
    if (tile.warp == 0 && shared.frame.blocks != 0) {
      finish_tile(shared, job, tile_index, tile.lane);
    }
    if (tile.thread == 0) {
      ++shared.finished_tiles;
    }
    sync_tile(tile);
    if constexpr (Coder::kHasPayload) {
      if (shared.area != nullptr) {
        uint2* to = reinterpret_cast<uint2*>(to_global(shared.area)) + shared.place[tile.warp];
        const uint2* from = reinterpret_cast<const uint2*>(memory.stage);
        for (uint32_t i = tile.lane; i < (summary.coded & frame::Record::kUnitsMask); i += kLanes) {
          to[i] = from[i];
        }
      }
      __syncwarp();  // the next block overwrites the stage
    }
  }
}

template <class Coder>
EncodeKernel encode_kernel() {
  static_assert(sizeof(EncodeShared<typename Coder::Memory>) <= kLeastSharedBytes);
  return {encode_tiles<Coder>, sizeof(EncodeShared<typename Coder::Memory>)};
}

// A block as it is: what does not fit into the slab is the payload.
template <uint32_t kWidth, uint32_t kSlabBytes>
__device__ __forceinline__ Coded encode_literal(const Source<kWidth>& source,
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
  Coded coded{};
  coded.mode = frame::kLiteral;
  coded.units = (frame::kBlockElements * kWidth - kSlabBytes) / frame::kUnitBytes;
  return coded;
}

}  // namespace memswap::cuda
