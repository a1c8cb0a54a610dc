// Frames to tiles of elements. Whatever a frame says, nothing outside the job's buffers is read or
// written (docs/format.md section 6).
#include <string.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <new>

#include "codec.h"
#include "payloads.h"
#include "streaming.h"
#include "tasks.h"

namespace memswap::cpu {

namespace {

using frame::Dtype;
using frame::Header;
using frame::Layout;
using frame::Record;
using frame::Sections;

// One task's memory.
struct alignas(kLineBytes) Workspace {
  uint8_t last_block[kMaxBlockBytes];
  // Of a tile, where the buffer ends less than kSlackBytes on.
  uint8_t payloads[frame::kTileBlocks * kMaxBlockBytes + kSlackBytes];
};

class FrameDecoder {
 public:
  FrameDecoder(const BlockCodec& blocks, const memswap_decode_job& job) : job_(job) {
    Header header{};
    memcpy(&header, job.frame, std::min<uint64_t>(job.frame_bytes, sizeof(header)));
    if (!frame::validate(header, job.frame_bytes, overflow_units(job), &sections_) ||
        header.dtype != job.dtype || header.elements != job.elements) {
      report(frame::kBadHeader);
      sections_ = {};
      return;
    }
    params_ = {static_cast<Dtype>(header.dtype), static_cast<Layout>(header.layout), false};
    width_ = frame::width_of(params_.dtype);
    areas_ = payload_areas(header, sections_, job.frame, job.frame_bytes, job.overflow,
                           overflow_units(job));
    checksum_ =
        job.verify != 0 && (header.flags & frame::kChecked) != 0 ? blocks.checksum : nullptr;
    // A checksum reads each tile again while it is still in the caches.
    const bool is_large = job.elements * width_ >= streaming_bytes();
    params_.asks_pages = is_large && asks_pages();
    params_.streaming = checksum_ == nullptr && is_large &&
                        reinterpret_cast<uintptr_t>(job.output) % kLineBytes == 0;
    params_.touches_pages = params_.streaming && touches_pages();
    decode_blocks_ = blocks.decoder(params_);
  }

  uint32_t chunks() const {
    return sections_.tiles == 0 ? 0 : chunks_of(sections_.tiles, tiles_per_chunk(width_));
  }

  void decode_chunk(uint32_t chunk, Workspace& workspace) const {
    const uint32_t first = chunk * tiles_per_chunk(width_);
    const uint32_t count = std::min(tiles_per_chunk(width_), sections_.tiles - first);
    uint32_t status = frame::kOk;
    for (uint32_t tile = first; tile < first + count; ++tile) {
      status |= decode_tile(tile, workspace);
    }
    if (status != frame::kOk) {
      report(status);
    }
  }

 private:
  static uint64_t overflow_units(const memswap_decode_job& job) {
    return job.overflow == nullptr ? 0 : job.overflow_capacity;
  }

  void report(uint32_t status) const {
    std::atomic_ref<uint32_t>(*job_.status).fetch_or(status, std::memory_order_relaxed);
  }

  uint32_t decode_tile(uint32_t index, Workspace& workspace) const {
    const auto* frame = static_cast<const uint8_t*>(job_.frame);
    const Record record = record_at(frame, sections_, index);
    const PayloadArea* area =
        find_payloads(record, sections_, params_.dtype, params_.layout, index, areas_);
    if (area == nullptr) {
      return frame::kBadRecord;
    }
    const uint8_t* payload =
        area->begin + uint64_t{record.base & ~frame::kBaseInOverflow} * frame::kUnitBytes;
    const uint8_t* slab =
        frame + sections_.slabs + uint64_t{index} * frame::kTileBlocks * sections_.slab_bytes;
    const uint64_t first_element = uint64_t{index} * frame::kTileElements;
    const auto tile_elements = static_cast<uint32_t>(
        std::min<uint64_t>(frame::kTileElements, sections_.elements - first_element));
    auto* output = static_cast<uint8_t*>(job_.output) + first_element * width_;
    const uint64_t payload_bytes = uint64_t{payload_units(record)} * frame::kUnitBytes;
    if (static_cast<uint64_t>(area->readable_end - payload) < payload_bytes + kSlackBytes) {
      std::copy_n(payload, payload_bytes, workspace.payloads);  // nothing of NULL without an arena
      payload = workspace.payloads;
    }
    const uint32_t whole_blocks = tile_elements / frame::kBlockElements;
    const uint32_t rest = tile_elements % frame::kBlockElements;
    if (!decode_blocks_(params_, output, slab, payload, record, 0, whole_blocks)) {
      return frame::kBadPayload;
    }
    if (rest != 0) {
      const uint32_t last_units = Record::units(record.block[whole_blocks]);
      if (!decode_blocks_(params_, workspace.last_block, slab + whole_blocks * sections_.slab_bytes,
                          payload + payload_bytes - last_units * frame::kUnitBytes, record,
                          whole_blocks, 1)) {
        return frame::kBadPayload;
      }
      memcpy(output + uint64_t{tile_elements - rest} * width_, workspace.last_block, rest * width_);
    }
    if (checksum_ != nullptr &&
        checksum_(output, uint64_t{tile_elements} * width_) != record.checksum) {
      return frame::kBadChecksum;
    }
    return frame::kOk;
  }

  const memswap_decode_job& job_;
  Sections sections_{};
  DecodeParams params_{};
  uint32_t width_ = 0;
  PayloadAreas areas_{};
  DecodeBlocks decode_blocks_ = nullptr;
  Checksum checksum_ = nullptr;
};

}  // namespace

int decode_frame(const BlockCodec& blocks, const memswap_decode_job& job,
                 const memswap_launch& launch) {
  const FrameDecoder frame(blocks, job);
  const bool has_run = run_chunks<Workspace>(
      blocks, frame.chunks(), launch,
      [&](uint32_t chunk, Workspace& workspace) { frame.decode_chunk(chunk, workspace); });
  return has_run ? MEMSWAP_CODEC_OK : kOutOfMemory;
}

}  // namespace memswap::cpu
