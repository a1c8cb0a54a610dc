// What every decoder does before and around its tiles: the header, records, payloads' places,
// status. A frame may be damaged or hostile: nothing is read through a field that has not been
// checked.
#pragma once

#include "tile_records.h"

namespace memswap::ascend {

// The fields of a checked header.
struct FrameHeader {
  uint32_t status = frame::kBadHeader;  // kOk: the rest is valid
  uint32_t layout = 0;
  bool checked = false;  // the records have checksums
  uint64_t var_capacity = 0;
};

// frame::validate on the scalar unit. `slab_bytes_of(layout)`: 0xffffffff where the layout does not
// fit the dtype.
template <class SlabBytes>
__aicore__ inline FrameHeader read_header(TPipe* pipe, const DecodeJob& job,
                                          SlabBytes slab_bytes_of) {
  TBuf<TPosition::VECCALC> buffer;
  const LocalTensor<uint32_t> words = load_header(pipe, &buffer, job.frame);
  const auto wide = [&](uint32_t index) __aicore__ {
    return uint64_t{words.GetValue(index)} | uint64_t{words.GetValue(index + 1)} << 32;
  };
  FrameHeader header;
  const uint32_t version = words.GetValue(HeaderWord::kVersion);
  const uint32_t flags = words.GetValue(HeaderWord::kFlags);
  header.layout = version >> 24;
  if (words.GetValue(HeaderWord::kMagic) != frame::kMagic ||
      (version & 0xffffu) != frame::kVersion || (version >> 16 & 0xffu) != job.dtype ||
      header.layout > frame::kLastLayout ||
      (flags & ~uint32_t{frame::kOrdered | frame::kChecked}) != 0 ||
      words.GetValue(HeaderWord::kStatus) != frame::kOk ||
      wide(HeaderWord::kElements) != job.elements) {
    return header;
  }
  const uint32_t slab_bytes = slab_bytes_of(header.layout);
  if (slab_bytes == 0xffffffffu || words.GetValue(HeaderWord::kSlabBytes) != slab_bytes) {
    return header;
  }
  const Share share(job.elements, slab_bytes);
  header.var_capacity = wide(HeaderWord::kVarCapacity);
  header.checked = (flags & frame::kChecked) != 0;
  if (words.GetValue(HeaderWord::kBlocks) == share.blocks && share.var <= job.frame_bytes &&
      header.var_capacity <= (job.frame_bytes - share.var) / frame::kUnitBytes &&
      wide(HeaderWord::kVarUsed) <= header.var_capacity &&
      wide(HeaderWord::kOverflowUsed) <= job.overflow_capacity) {
    header.status = frame::kOk;
  }
  return header;
}

constexpr uint32_t kReportBytes = kUnifiedBlockBytes;

// Puts a core's error bits into the job's status. Memory can add and maximize, but not OR: of all
// cores' bits the largest number stays, which is 0 exactly where no core has found an error.
__aicore__ inline void report(TPipe* pipe, const DecodeJob& job, uint32_t errors) {
  if (errors == 0) {
    return;
  }
  TBuf<TPosition::VECCALC> buffer;
  pipe->InitBuffer(buffer, kReportBytes);
  const LocalTensor<int32_t> word = buffer.Get<int32_t>();
  word.SetValue(0, static_cast<int32_t>(errors));
  for (uint32_t i = 1; i < kReportBytes / 4; ++i) {
    word.SetValue(i, 0);
  }
  hand_over<HardEvent::S_MTE3>(pipe);
  SetAtomicMax<int32_t>();
  DataCopyPad(global_at<int32_t>(job.status, 1), word, DataCopyExtParams(1, 4, 0, 0, 0));
  SetAtomicNone();
}

// Loads 1 KiB of records at a time.
class RecordReader {
  static constexpr uint32_t kTiles = 32;
  static constexpr uint32_t kWords = frame::kRecordBytes / 4;

 public:
  static constexpr uint32_t kUnifiedBytes = unified(kTiles * frame::kRecordBytes);

  __aicore__ inline void init(TPipe* pipe, GM_ADDR records, uint32_t tiles) {
    pipe_ = pipe;
    pipe->InitBuffer(buffer_, kTiles * frame::kRecordBytes);
    global_ = global_at<uint32_t>(records, uint64_t{tiles} * kWords);
    tiles_ = tiles;
  }

  __aicore__ inline TileRecord read(uint32_t tile) {
    const LocalTensor<uint32_t> words = buffer_.Get<uint32_t>();
    if (tile < first_ || tile >= first_ + held_) {
      first_ = tile;
      held_ = tiles_ - tile < kTiles ? tiles_ - tile : kTiles;
      hand_over<HardEvent::S_MTE2>(pipe_);
      PipeBarrier<PIPE_MTE2>();
      DataCopy(words, global_[uint64_t{tile} * kWords], held_ * kWords);
      hand_over<HardEvent::MTE2_S>(pipe_);
    }
    const uint32_t at = (tile - first_) * kWords;
    TileRecord record;
    record.base = words.GetValue(at);
    uint32_t blocks = 0;
    uint32_t centers = 0;
    for (uint32_t i = 0; i < frame::kTileBlocks; ++i) {
      blocks = i % 2 == 0 ? words.GetValue(at + 1 + i / 2) : blocks >> 16;
      centers = i % 4 == 0 ? words.GetValue(at + 5 + i / 4) : centers >> 8;
      record.block[i] = static_cast<uint16_t>(blocks);
      record.center[i] = static_cast<uint8_t>(centers);
      record.units += record.units_of(i);
    }
    record.checksum = words.GetValue(at + 7);
    return record;
  }

 private:
  TPipe* pipe_;
  TBuf<TPosition::VECCALC> buffer_;
  GlobalTensor<uint32_t> global_;
  uint32_t tiles_ = 0;
  uint32_t first_ = 0;
  uint32_t held_ = 0;
};

// Where the tile's payloads begin, or null if they would leave var or the arena.
__aicore__ inline GM_ADDR payloads_of(const DecodeJob& job, const FrameHeader& header,
                                      const Share& share, const TileRecord& record) {
  const bool in_overflow = (record.base & frame::kBaseInOverflow) != 0;
  const uint64_t base = record.base & ~frame::kBaseInOverflow;
  const uint64_t capacity = in_overflow ? job.overflow_capacity : header.var_capacity;
  if (base + record.units > capacity) {
    return nullptr;
  }
  return (in_overflow ? job.overflow : job.frame + share.var) + base * frame::kUnitBytes;
}

}  // namespace memswap::ascend
