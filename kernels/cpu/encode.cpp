// Tiles of elements to frames.
//
// [Note: positions in one pass]
// A payload's size is known only once it is coded, and ordered positions need the sizes of all
// tiles before. So a task codes a chunk of tiles into its own staging, then waits until the chunks
// before it have taken their positions, takes its own (some additions), lets the next one go on,
// and only then copies the payloads. Chunks are taken in order, so the one waited for is always
// running.
#include <string.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <new>

#include "codec.h"
#include "streaming.h"
#include "tasks.h"
#include "turns.h"

namespace memswap::cpu {

namespace {

using frame::Dtype;
using frame::Header;
using frame::Layout;
using frame::Record;
using frame::Sections;

// A task's staging holds the payloads of one chunk at their longest. Where that is short beside the
// elements, a chunk of a large job has more of them: payloads then leave in longer copies, which
// share fewer lines at their ends.
constexpr uint32_t kStagingBytes = 96 * 1024;
constexpr uint32_t kLargeChunkBytes = 256 * 1024;
constexpr uint32_t kMaxTilesPerChunk = kLargeChunkBytes / frame::kTileElements;
static_assert(kChunkBytes <= kStagingBytes);

constexpr uint32_t tiles_per_large_chunk(const Sections& sections, uint32_t width) {
  const uint32_t tiles = kLargeChunkBytes / (frame::kTileElements * width);
  const uint32_t payload_bytes =
      frame::kTileBlocks * sections.max_payload_units * frame::kUnitBytes;
  return payload_bytes == 0 ? tiles : std::min(tiles, kStagingBytes / payload_bytes);
}

struct Tile {
  Record record;
  uint32_t units;
  uint8_t* destination;  // NULL: no room
};

// One task's memory. Payloads stand one behind another; none is longer than its elements.
struct alignas(64) Workspace {
  uint8_t payloads[kStagingBytes + kEncoderSlackBytes];
  uint8_t last_block[kMaxBlockBytes];
  Tile tiles[kMaxTilesPerChunk];
};

class FrameEncoder {
 public:
  FrameEncoder(const BlockCodec& blocks, const memswap_encode_job& job)
      : job_(job),
        params_{static_cast<Dtype>(job.dtype),
                static_cast<Layout>(job.layout),
                job.profile == MEMSWAP_FAST,
                job.center,
                false,
                asks_near()},
        sections_(frame::sections_of(params_.dtype, params_.layout, job.elements)),
        width_(frame::width_of(params_.dtype)) {
    params_.streaming = job.elements * width_ >= streaming_bytes();
    params_.asks_pages = params_.streaming && asks_pages();
    params_.touches_pages = params_.streaming && touches_pages();
    tiles_per_chunk_ =
        params_.streaming ? tiles_per_large_chunk(sections_, width_) : tiles_per_chunk(width_);
    encode_blocks_ = blocks.encoder(params_);
    checksum_ = job.checksum != 0 ? blocks.checksum : nullptr;
    copy_ = params_.streaming ? blocks.copy_around_caches : scalar_blocks().copy_around_caches;
  }

  uint32_t chunks() const { return chunks_of(sections_.tiles, tiles_per_chunk_); }

  void encode_chunk(uint32_t chunk, Workspace& workspace) {
    const uint32_t first = chunk * tiles_per_chunk_;
    const uint32_t count = std::min(tiles_per_chunk_, sections_.tiles - first);
    Header counted{};
    uint8_t* payload = workspace.payloads;
    for (uint32_t i = 0; i < count; ++i) {
      encode_tile(first + i, workspace.tiles[i], payload, workspace.last_block, counted);
      payload += uint64_t{workspace.tiles[i].units} * frame::kUnitBytes;
    }

    turns_.wait_for(chunk);
    for (uint32_t i = 0; i < count; ++i) {
      place(workspace.tiles[i]);
    }
    add_counters(counted);
    turns_.pass_to(chunk + 1);

    payload = workspace.payloads;
    for (uint32_t i = 0; i < count;) {
      // Tiles that follow each other there as they do here are copied at once.
      uint8_t* const destination = workspace.tiles[i].destination;
      uint64_t bytes = 0;
      do {
        const Tile& tile = workspace.tiles[i];
        memcpy(frame() + sections_.records + uint64_t{first + i} * frame::kRecordBytes,
               &tile.record, sizeof(Record));
        bytes += uint64_t{tile.units} * frame::kUnitBytes;
        ++i;
      } while (i < count && destination != nullptr &&
               workspace.tiles[i].destination == destination + bytes);
      if (destination != nullptr && bytes != 0) {
        if (params_.touches_pages) {
          touch_pages_ahead(destination, bytes);
        }
        copy_(destination, payload, bytes);
      }
      payload += bytes;
    }
  }

  // After all chunks.
  void finish() {
    header_.magic = frame::kMagic;
    header_.version = frame::kVersion;
    header_.dtype = job_.dtype;
    header_.layout = job_.layout;
    const bool ordered = header_.overflow_used == 0 && header_.status == frame::kOk;
    header_.flags = static_cast<uint8_t>((ordered ? frame::kOrdered : 0) |
                                         (checksum_ != nullptr ? frame::kChecked : 0));
    header_.elements = sections_.elements;
    header_.blocks = sections_.blocks;
    header_.slab_bytes = sections_.slab_bytes;
    header_.var_capacity = job_.var_capacity;
    memcpy(frame(), &header_, sizeof(header_));
  }

 private:
  uint8_t* frame() const { return static_cast<uint8_t*>(job_.frame); }

  void encode_tile(uint32_t index, Tile& tile, uint8_t* payloads, uint8_t* last_block,
                   Header& counted) const {
    tile = {};
    const uint64_t first_element = uint64_t{index} * frame::kTileElements;
    const auto tile_elements = static_cast<uint32_t>(
        std::min<uint64_t>(frame::kTileElements, sections_.elements - first_element));
    const auto* input = static_cast<const uint8_t*>(job_.input) + first_element * width_;
    uint8_t* slabs =
        frame() + sections_.slabs + uint64_t{index} * frame::kTileBlocks * sections_.slab_bytes;
    if (checksum_ != nullptr) {
      tile.record.checksum = checksum_(input, uint64_t{tile_elements} * width_);
    }
    const uint32_t whole_blocks = tile_elements / frame::kBlockElements;
    const uint32_t rest = tile_elements % frame::kBlockElements;
    EncodedBlock blocks[frame::kTileBlocks];
    if (whole_blocks != 0) {
      encode_blocks_(params_, input, tile_elements - rest, slabs, payloads, blocks);
      add_blocks(blocks, 0, whole_blocks, tile, counted);
    }
    if (rest != 0) {
      memset(last_block, 0, frame::kBlockElements * width_);
      memcpy(last_block, input + uint64_t{tile_elements - rest} * width_, rest * width_);
      encode_blocks_(params_, last_block, rest, slabs + whole_blocks * sections_.slab_bytes,
                     payloads + tile.units * frame::kUnitBytes, blocks);
      add_blocks(blocks, whole_blocks, 1, tile, counted);
    }
  }

  static void add_blocks(const EncodedBlock* blocks, uint32_t first, uint32_t count, Tile& tile,
                         Header& counted) {
    for (uint32_t i = 0; i < count; ++i) {
      const EncodedBlock& block = blocks[i];
      tile.record.block[first + i] = Record::pack(block.mode, block.units, block.packed);
      tile.record.center[first + i] = block.center;
      tile.units += block.units;
      counted.zeros += block.zeros;
      counted.center_sum += block.center2;
      ++counted.mode_count[block.mode - 1];
    }
  }

  void place(Tile& tile) {
    const uint64_t limit = std::min<uint64_t>(job_.var_capacity, frame::kMaxBaseUnits);
    if (tile.units <= limit - header_.var_used) {
      tile.record.base = static_cast<uint32_t>(header_.var_used);
      tile.destination = frame() + sections_.var + header_.var_used * frame::kUnitBytes;
      header_.var_used += tile.units;
      return;
    }
    uint64_t position;
    if (!take_overflow(tile.units, &position)) {
      header_.status = frame::kNoRoom;
      return;
    }
    tile.record.base = static_cast<uint32_t>(position) | frame::kBaseInOverflow;
    tile.destination = static_cast<uint8_t*>(job_.overflow) + position * frame::kUnitBytes;
    header_.overflow_used += tile.units;
  }

  // The arena belongs to other frames' encoders, too. A failed attempt leaves its cursor alone.
  bool take_overflow(uint32_t units, uint64_t* position) const {
    if (job_.overflow == nullptr) {
      return false;
    }
    const std::atomic_ref<uint64_t> cursor(*job_.overflow_cursor);
    uint64_t used = cursor.load(std::memory_order_relaxed);
    do {
      if (used > job_.overflow_capacity || units > job_.overflow_capacity - used) {
        return false;
      }
    } while (!cursor.compare_exchange_weak(used, used + units, std::memory_order_relaxed));
    *position = used;
    return true;
  }

  void add_counters(const Header& counted) {
    header_.zeros += counted.zeros;
    header_.center_sum += counted.center_sum;
    for (uint32_t mode = 0; mode < frame::kModeCounts; ++mode) {
      header_.mode_count[mode] += counted.mode_count[mode];
    }
  }

  const memswap_encode_job& job_;
  EncodeParams params_;
  const Sections sections_;
  const uint32_t width_;
  uint32_t tiles_per_chunk_ = 1;
  EncodeBlocks encode_blocks_ = nullptr;
  Checksum checksum_ = nullptr;
  Copy copy_ = nullptr;
  Turns turns_;      // of chunks, to take positions
  Header header_{};  // var_used, overflow_used, status, counters: by who has the turn
};

}  // namespace

int encode_frame(const BlockCodec& blocks, const memswap_encode_job& job,
                 const memswap_launch& launch) {
  FrameEncoder frame(blocks, job);
  if (!run_chunks<Workspace>(
          blocks, frame.chunks(), launch,
          [&](uint32_t chunk, Workspace& workspace) { frame.encode_chunk(chunk, workspace); })) {
    return kOutOfMemory;
  }
  frame.finish();
  return MEMSWAP_CODEC_OK;
}

}  // namespace memswap::cpu
