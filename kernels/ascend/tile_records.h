// Records of a core's tiles, and its part of the header's counters.
#pragma once

#include "job.h"

namespace memswap::ascend {

// One tile's record while it is put together, or taken apart, by the scalar unit.
struct TileRecord {
  uint32_t base = 0;
  uint32_t units = 0;  // of the blocks so far
  uint16_t block[frame::kTileBlocks] = {};
  uint8_t center[frame::kTileBlocks] = {};
  uint32_t checksum = 0;

  // `packed`: the payload's bitmap.
  __aicore__ inline void set(uint32_t i, uint32_t mode, uint32_t block_units, uint32_t c,
                             bool packed = false) {
    block[i] = static_cast<uint16_t>(mode << frame::Record::kModeShift |
                                     uint32_t{packed} << frame::Record::kPackedBit | block_units);
    center[i] = static_cast<uint8_t>(c);
    units += block_units;
  }
  __aicore__ inline uint32_t mode_of(uint32_t i) const {
    return block[i] >> frame::Record::kModeShift;
  }
  __aicore__ inline uint32_t units_of(uint32_t i) const {
    return block[i] & frame::Record::kUnitsMask;
  }
  __aicore__ inline bool is_packed(uint32_t i) const {
    return (block[i] >> frame::Record::kPackedBit & 1) != 0;
  }
};

// Collects records and stores 1 KiB of them at a time.
class RecordWriter {
  static constexpr uint32_t kTiles = 32;
  static constexpr uint32_t kWords = frame::kRecordBytes / 4;

 public:
  static constexpr uint32_t kUnifiedBytes = unified(kTiles * frame::kRecordBytes);

  __aicore__ inline void init(TPipe* pipe, GM_ADDR records, uint32_t first_tile) {
    pipe_ = pipe;
    pipe->InitBuffer(buffer_, kTiles * frame::kRecordBytes);
    words_ = buffer_.Get<uint32_t>();
    next_ = records + uint64_t{first_tile} * frame::kRecordBytes;
  }

  __aicore__ inline void add(const TileRecord& record) {
    const uint32_t at = held_ * kWords;
    words_.SetValue(at, record.base);
    for (uint32_t i = 0; i < frame::kTileBlocks; i += 2) {
      words_.SetValue(at + 1 + i / 2, static_cast<uint32_t>(record.block[i]) |
                                          static_cast<uint32_t>(record.block[i + 1]) << 16);
    }
    for (uint32_t i = 0; i < frame::kTileBlocks; i += 4) {
      words_.SetValue(at + 5 + i / 4, static_cast<uint32_t>(record.center[i]) |
                                          static_cast<uint32_t>(record.center[i + 1]) << 8 |
                                          static_cast<uint32_t>(record.center[i + 2]) << 16 |
                                          static_cast<uint32_t>(record.center[i + 3]) << 24);
    }
    words_.SetValue(at + 7, record.checksum);
    if (++held_ == kTiles) {
      flush();
    }
  }

  __aicore__ inline void flush() {
    if (held_ == 0) {
      return;
    }
    hand_over<HardEvent::S_MTE3>(pipe_);
    DataCopy(global_at<uint32_t>(next_, held_ * kWords), words_, held_ * kWords);
    hand_over<HardEvent::MTE3_S>(pipe_);
    next_ += held_ * frame::kRecordBytes;
    held_ = 0;
  }

 private:
  TPipe* pipe_;
  TBuf<TPosition::VECCALC> buffer_;
  LocalTensor<uint32_t> words_;
  GM_ADDR next_ = nullptr;
  uint32_t held_ = 0;
};

// Counts on the scalar unit; one atomic store at the end.
class HeaderCounters {
 public:
  static constexpr uint32_t kUnifiedBytes = unified(frame::kHeaderBytes);

  __aicore__ inline void init(TPipe* pipe, GM_ADDR frame) {
    pipe_ = pipe;
    pipe->InitBuffer(buffer_, frame::kHeaderBytes);
    frame_ = frame;
  }
  __aicore__ inline void count(const TileRecord& record) {
    for (uint32_t i = 0; i < frame::kTileBlocks; ++i) {
      const uint32_t mode = record.mode_of(i);
      if (mode != 0) {
        ++modes_[mode - 1];
      }
    }
  }
  __aicore__ inline void add_zeros(uint32_t zeros) { zeros_ += zeros; }
  __aicore__ inline void add_center(uint32_t center) { center_sum_ += center; }

  __aicore__ inline void store() {
    const LocalTensor<int32_t> words = buffer_.Get<int32_t>();
    for (uint32_t i = 0; i < kHeaderWords; ++i) {
      words.SetValue(i, 0);
    }
    words.SetValue(HeaderWord::kZeros, static_cast<int32_t>(zeros_));
    words.SetValue(HeaderWord::kCenterSum, static_cast<int32_t>(center_sum_));
    for (uint32_t i = 0; i < frame::kModeCounts; ++i) {
      words.SetValue(HeaderWord::kModeCount + i, static_cast<int32_t>(modes_[i]));
    }
    hand_over<HardEvent::S_MTE3>(pipe_);
    SetAtomicAdd<int32_t>();
    DataCopy(global_at<int32_t>(frame_, kHeaderWords), words, kHeaderWords);
    SetAtomicNone();
  }

 private:
  TPipe* pipe_;
  TBuf<TPosition::VECCALC> buffer_;
  GM_ADDR frame_ = nullptr;
  uint32_t modes_[frame::kModeCounts] = {};
  uint32_t zeros_ = 0;
  uint32_t center_sum_ = 0;
};

}  // namespace memswap::ascend
