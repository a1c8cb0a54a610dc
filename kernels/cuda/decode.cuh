// The decoder's kernel: a warp decodes a block. What differs from dtype to dtype is a Decoder.
//
// [Note: layouts] Floats have two kernels, because layout sparse needs half as many registers again
// as the others. Where the caller has no idea of a frame's layout, which is known on the device
// alone, both are launched, and each takes the frames that are its own; the other one costs some 2
// microseconds. With a hint one is launched, and reports a frame that is not its own.
#pragma once

#include "decode_exponents.cuh"
#include "elements.cuh"
#include "jobs.h"

namespace memswap::cuda {

// What a tile needs to know of the frame that it belongs to, all of it checked against the buffers.
struct DecodeFrame {
  const uint8_t* records;
  const uint8_t* var;
  uint64_t var_capacity;  // units
  uint32_t blocks;
  uint32_t slab_bytes;
  uint32_t longest;  // payload, units
  uint32_t modes;    // bit m: mode m fits the layout
  frame::Layout layout;
  bool usable;
  bool verify;
};

struct alignas(16) DecodeShared {
  DecodeMemory warps[frame::kTileBlocks];
  Move expand[16];
  DecodeFrame frame;
  uint64_t checksums[2][frame::kTileBlocks];  // of this tile and the one before
};

// A block's payload and what its record says.
struct BlockRecord {
  const uint8_t* payload;
  uint32_t mode, units, center;
  uint32_t checksum;  // of the tile
  bool packed;        // its bitmap
  bool damaged;       // any block of the tile
};

// Leaves `usable` false where the frame is not what the job says, or cannot be.
__device__ inline void read_frame(const DecodeJob& job, DecodeFrame& frame) {
  frame.usable = false;
  frame::Sections sections{};
  if (job.frame_bytes < frame::kHeaderBytes) {
    return;
  }
  const frame::Header& header = *reinterpret_cast<const frame::Header*>(job.frame);
  if (!frame::validate(header, job.frame_bytes, job.overflow_capacity, &sections) ||
      header.elements != job.elements || header.dtype != job.dtype) {
    return;
  }
  const frame::Dtype dtype = static_cast<frame::Dtype>(header.dtype);
  const frame::Layout layout = static_cast<frame::Layout>(header.layout);
  uint32_t modes = 0;
  for (uint32_t mode = 1; mode < frame::kModes; ++mode) {
    modes |= uint32_t{frame::mode_fits(dtype, layout, mode)} << mode;
  }
  frame.records = job.frame + sections.records;
  frame.var = job.frame + sections.var;
  frame.var_capacity = header.var_capacity;
  frame.blocks = sections.blocks;
  frame.slab_bytes = sections.slab_bytes;
  frame.longest = sections.max_payload_units;
  frame.modes = modes;
  frame.layout = layout;
  frame.verify = job.verify && (header.flags & frame::kChecked) != 0;
  frame.usable = true;
}

// [Note: fetching ahead]: the record and the slab. Nothing is read that is not the caller's.
__device__ __forceinline__ void fetch_ahead(const DecodeJob& job, uint32_t tile_index,
                                            uint32_t warp, uint32_t lane) {
  const uint64_t blocks = (job.elements + frame::kBlockElements - 1) / frame::kBlockElements;
  const uint64_t block = uint64_t{tile_index} * frame::kTileBlocks + warp;
  uint64_t at = frame::kHeaderBytes + block * job.slab_bytes + lane * kLineBytes;
  bool is_wanted = block < blocks && lane * kLineBytes < job.slab_bytes;
  if (lane == kLanes - 1) {
    at = frame::kHeaderBytes + blocks * job.slab_bytes + uint64_t{tile_index} * frame::kRecordBytes;
    is_wanted = true;
  }
  if (job.is_alone && is_wanted && at < job.frame_bytes) {
    fetch_ahead(job.frame + at);
  }
}

// Reads the record of a tile, all of it, before anything is read through it. Lane i < 8 looks at
// block i.
__device__ __forceinline__ BlockRecord read_record(const DecodeFrame& frame, const DecodeJob& job,
                                                   uint32_t tile_index, uint32_t warp,
                                                   uint32_t lane) {
  const frame::Record& said = *reinterpret_cast<const frame::Record*>(
      to_global(frame.records) + uint64_t{tile_index} * frame::kRecordBytes);
  const uint32_t base = said.base;
  const uint32_t mine = said.block[warp];
  const uint32_t coded = lane < frame::kTileBlocks ? said.block[lane] : 0;
  BlockRecord record;
  record.center = said.center[warp];
  record.checksum = frame.verify ? said.checksum : 0;
  using frame::Record;
  const uint32_t units = coded & Record::kUnitsMask;
  const uint32_t mode = coded >> Record::kModeShift;
  const bool packed = (coded >> Record::kPackedBit & 1) != 0;
  // Of all blocks, and of those before this one: sums below 2^15.
  const uint32_t both = __reduce_add_sync(kAllLanes, units << 16 | (lane < warp ? units : 0));
  const uint32_t present = frame.blocks - tile_index * frame::kTileBlocks;
  const bool there = lane < min(present, frame::kTileBlocks);
  const bool wrong = there ? (frame.modes >> mode & 1) == 0 || units > frame.longest ||
                                 (packed && !frame::has_bitmap(mode))
                           : coded != 0;
  const bool in_overflow = (base & frame::kBaseInOverflow) != 0;
  const uint32_t position = base & ~frame::kBaseInOverflow;
  const uint64_t limit = in_overflow ? job.overflow_capacity : frame.var_capacity;
  record.damaged = __any_sync(kAllLanes, wrong) || uint64_t{position} + (both >> 16) > limit;
  record.payload = to_global(in_overflow ? job.overflow : frame.var) +
                   (uint64_t{position} + (both & 0xffffu)) * frame::kUnitBytes;
  record.mode = mine >> Record::kModeShift;
  record.units = mine & Record::kUnitsMask;
  record.packed = (mine >> Record::kPackedBit & 1) != 0;
  return record;
}

__device__ __forceinline__ void stage_payload(DecodeMemory& memory, const uint8_t* payload,
                                              uint32_t units, uint32_t lane) {
  const uint2* from = reinterpret_cast<const uint2*>(payload);
#pragma unroll 1
  for (uint32_t i = lane; i < units; i += kLanes) {
    reinterpret_cast<uint2*>(memory.stage)[i] = from[i];
  }
}

template <class Decoder>
__global__ void __launch_bounds__(kTileThreads, Decoder::kTiles)
    decode_tiles(const __grid_constant__ DecodeJob job) {
  const Tile tile = this_tile();
  DecodeShared& shared = shared_of<DecodeShared>();
  const DecodeFrame& found = shared.frame;
  fetch_ahead(job, blockIdx.x, tile.warp, tile.lane);
  if (tile.thread < 16) {
    shared.expand[tile.thread] = expand_move(tile.thread);
  }
  if (tile.thread == 0) {
    read_frame(job, shared.frame);
  }
  __syncthreads();
  const bool is_own = found.usable && Decoder::takes(found.layout);
  const bool is_reported = job.is_alone ? !is_own : !found.usable && Decoder::kReportsHeaders;
  if (is_reported && tile.thread == 0) {
    atomicOr(job.status, uint32_t{frame::kBadHeader});
  }
  // A frame without elements has a tile, so that its header is looked at.
  if (!is_own || found.blocks == 0) {
    return;
  }
  uint32_t parity = 0;
  for (uint32_t tile_index = blockIdx.x; tile_index < job.tiles; tile_index += gridDim.x) {
    const BlockRecord record = read_record(found, job, tile_index, tile.warp, tile.lane);
    const uint32_t block = tile_index * frame::kTileBlocks + tile.warp;
    uint64_t checksum = 0;
    uint32_t wrong = record.damaged ? frame::kBadRecord : frame::kOk;
    if (block < found.blocks && !record.damaged) {
      const Sink<Decoder::kWidth> sink(job.output, job.elements, block);
      const uint8_t* slab = job.frame + frame::kHeaderBytes + uint64_t{block} * found.slab_bytes;
      if (!Decoder::decode(record, found, sink, slab, shared.warps[tile.warp], shared.expand,
                           tile.warp, tile.lane, checksum)) {
        wrong = frame::kBadPayload;
      }
    }
    if (found.verify) {
      checksum = add_lanes_of_block(checksum);
      if (tile.lane == 0) {
        shared.checksums[parity][tile.warp] = checksum;
      }
      __syncthreads();
      if (tile.thread == 0 && wrong == frame::kOk) {
        uint64_t sum = 0;
        for (uint32_t warp = 0; warp < frame::kTileBlocks; ++warp) {
          sum += shared.checksums[parity][warp];
        }
        if (sum % frame::kChecksumPrime != record.checksum) {
          wrong = frame::kBadChecksum;
        }
      }
      parity ^= 1;
    }
    if (wrong != frame::kOk && tile.lane == 0) {
      atomicOr(job.status, wrong);
    }
  }
}

template <class Decoder>
DecodeKernel* decode_kernel() {
  static_assert(kLeastTiles * (sizeof(DecodeShared) + kReservedBytes) <= kSharedBytes);
  static DecodeKernel kernel(decode_tiles<Decoder>, sizeof(DecodeShared));
  return &kernel;
}

// What every Decoder does with rows: it writes them, and adds them to the checksum.
template <uint32_t kWidth, uint32_t kCount>
__device__ __forceinline__ void finish_rows(const Sink<kWidth>& sink, bool verify, uint32_t warp,
                                            uint32_t row, uint32_t lane,
                                            uint32_t (&words)[kCount][kRowWords<kWidth>],
                                            uint64_t& checksum) {
  store_rows(sink, row, lane, words);
  if (verify) {
    checksum += checksum_rows<kWidth>(words, warp, row, lane);
  }
}
template <uint32_t kWidth>
__device__ __forceinline__ void finish_row(const Sink<kWidth>& sink, bool verify, uint32_t warp,
                                           uint32_t row, uint32_t lane,
                                           uint32_t (&words)[kRowWords<kWidth>],
                                           uint64_t& checksum) {
  finish_rows(sink, verify, warp, row, lane,
              reinterpret_cast<uint32_t (&)[1][kRowWords<kWidth>]>(words), checksum);
}

template <uint32_t kWidth>
__device__ __forceinline__ bool decode_literal(const BlockRecord& record, const DecodeFrame& frame,
                                               const Sink<kWidth>& sink, const uint8_t* slab,
                                               uint32_t warp, uint32_t lane, uint64_t& checksum) {
  if (record.units * frame::kUnitBytes != frame::kBlockElements * kWidth - frame.slab_bytes) {
    return false;
  }
#pragma unroll 1
  for (uint32_t row = 0; row < kRows; ++row) {
    uint32_t words[kRowWords<kWidth>];
    const uint32_t begin = (row * kRowElements + lane * kLaneColumns) * kWidth;
#pragma unroll
    for (uint32_t i = 0; i < kRowWords<kWidth>; i += 2) {
      const uint32_t byte = begin + 4 * i;
      const uint2 pair = *reinterpret_cast<const uint2*>(
          byte < frame.slab_bytes ? slab + byte : record.payload + (byte - frame.slab_bytes));
      words[i] = pair.x;
      words[i + 1] = pair.y;
    }
    finish_row(sink, frame.verify, warp, row, lane, words, checksum);
  }
  return true;
}

// Layout ints: distances above a minimum, in planes.
template <uint32_t kWidth>
__device__ __forceinline__ bool decode_ints(const BlockRecord& record, const DecodeFrame& frame,
                                            const Sink<kWidth>& sink, uint32_t warp, uint32_t lane,
                                            uint64_t& checksum) {
  const uint32_t bits = record.center;
  if (bits >= 8 * kWidth || record.units != 1 + 16 * bits) {
    return false;
  }
  using Word = typename WordOf<kWidth>::type;
  const Word minimum = static_cast<Word>(*reinterpret_cast<const uint64_t*>(record.payload));
  const uint8_t* planes = record.payload + frame::kUnitBytes;
  uint32_t top[8];
  load_planes(planes + bits / 8 * frame::kBlockElements, top, bits % 8, lane);
#pragma unroll
  for (uint32_t row = 0; row < kRows; ++row) {
    Word value[kLaneColumns];
#pragma unroll
    for (uint32_t i = 0; i < kLaneColumns; ++i) {
      value[i] = minimum;
    }
#pragma unroll
    for (uint32_t plane = 0; plane < kWidth; ++plane) {
      if (plane > bits / 8) {
        break;
      }
      uint2 pair = make_uint2(top[2 * row], top[2 * row + 1]);
      if (plane < bits / 8) {
        pair = load_bytes(planes + plane * frame::kBlockElements, row, lane);
      }
#pragma unroll
      for (uint32_t i = 0; i < kLaneColumns; ++i) {
        const uint32_t byte = (i < 4 ? pair.x : pair.y) >> (8 * (i % 4)) & 0xffu;
        value[i] = static_cast<Word>(value[i] + (Word{static_cast<uint8_t>(byte)} << (8 * plane)));
      }
    }
    uint32_t words[kRowWords<kWidth>];
#pragma unroll
    for (uint32_t i = 0; i < kRowWords<kWidth>; ++i) {
      words[i] = 0;
    }
#pragma unroll
    for (uint32_t i = 0; i < kLaneColumns; ++i) {
      if constexpr (kWidth == 8) {
        words[2 * i] = static_cast<uint32_t>(value[i]);
        words[2 * i + 1] = static_cast<uint32_t>(value[i] >> 32);
      } else {
        words[i * kWidth / 4] |= uint32_t{value[i]} << (8 * (i * kWidth % 4));
      }
    }
    finish_row(sink, frame.verify, warp, row, lane, words, checksum);
  }
  return true;
}

// Layout bits: the bitmap alone.
__device__ __forceinline__ bool decode_bitmap(const BlockRecord& record, const DecodeFrame& frame,
                                              const Sink<1>& sink, uint32_t warp, uint32_t lane,
                                              uint64_t& checksum) {
  uint32_t masks;
  const uint32_t behind =
      read_bitmap(record.payload, record.units * frame::kUnitBytes, record.packed, lane, masks);
  if (behind == kDamaged || (behind + 7) / frame::kUnitBytes != record.units) {
    return false;
  }
#pragma unroll
  for (uint32_t row = 0; row < kRows; ++row) {
    const uint32_t bits = masks >> (8 * row);
    uint32_t words[2] = {spread_bits(bits), spread_bits(bits >> 4)};
    finish_row(sink, frame.verify, warp, row, lane, words, checksum);
  }
  return true;
}

}  // namespace memswap::cuda
