// The launches around an encoder, each on one core: the header before it, and the places of the
// tiles that it has measured (job.h, Note [positions without talking]).
#pragma once

#include "tile_records.h"

namespace memswap::ascend {

// The header with all counters at 0.
__aicore__ inline void begin_frame(const EncodeJob& job) {
  TPipe pipe;
  TBuf<TPosition::VECCALC> buffer;
  pipe.InitBuffer(buffer, frame::kHeaderBytes);
  const LocalTensor<uint32_t> words = buffer.Get<uint32_t>();
  for (uint32_t i = 0; i < kHeaderWords; ++i) {
    words.SetValue(i, 0u);
  }
  words.SetValue(HeaderWord::kMagic, frame::kMagic);
  words.SetValue(HeaderWord::kVersion,
                 uint32_t{frame::kVersion} | job.dtype << 16 | job.layout << 24);
  words.SetValue(HeaderWord::kFlags,
                 uint32_t{frame::kOrdered} | (job.checksum != 0 ? uint32_t{frame::kChecked} : 0u));
  words.SetValue(HeaderWord::kElements, static_cast<uint32_t>(job.elements));
  words.SetValue(HeaderWord::kElements + 1, static_cast<uint32_t>(job.elements >> 32));
  words.SetValue(HeaderWord::kBlocks, Share(job.elements, job.slab_bytes).blocks);
  words.SetValue(HeaderWord::kSlabBytes, job.slab_bytes);
  words.SetValue(HeaderWord::kVarCapacity, static_cast<uint32_t>(job.var_capacity));
  words.SetValue(HeaderWord::kVarCapacity + 1, static_cast<uint32_t>(job.var_capacity >> 32));
  hand_over<HardEvent::S_MTE3>(&pipe);
  DataCopy(global_at<uint32_t>(job.frame, kHeaderWords), words, kHeaderWords);
}

// Gives the tiles their places in var and the arena, or says in the status that there is no room.
class TilePlaces {
 public:
  __aicore__ inline TilePlaces(TPipe* pipe, const EncodeJob& job)
      : pipe_(pipe), job_(job), share_(job.elements, job.slab_bytes) {}

  __aicore__ inline void place() {
    TBuf<TPosition::VECCALC> header, cursor, records;
    pipe_->InitBuffer(cursor, kUnifiedBlockBytes);
    pipe_->InitBuffer(records, kTiles * frame::kRecordBytes);
    const LocalTensor<uint32_t> words = load_header(pipe_, &header, job_.frame);
    var_ = Room::of_var(job_);
    const uint64_t used = job_.overflow != nullptr ? read(cursor.Get<uint32_t>()) : 0;
    next_ = used;
    for (uint32_t tile = 0; tile < share_.tiles; tile += kTiles) {
      const uint32_t left = share_.tiles - tile;
      place(records.Get<uint32_t>(), tile, left < kTiles ? left : kTiles);
    }
    words.SetValue(HeaderWord::kVarUsed, var_.next());
    if (next_ != used) {
      words.SetValue(HeaderWord::kFlags,
                     words.GetValue(HeaderWord::kFlags) & ~uint32_t{frame::kOrdered});
      if (job_.overflow == nullptr || next_ > job_.overflow_capacity) {
        words.SetValue(HeaderWord::kStatus, uint32_t{frame::kNoRoom});
      } else {
        words.SetValue(HeaderWord::kOverflowUsed, static_cast<uint32_t>(next_ - used));
        write(cursor.Get<uint32_t>());
      }
    }
    hand_over<HardEvent::S_MTE3>(pipe_);
    DataCopy(global_at<uint32_t>(job_.frame, kHeaderWords), words, kHeaderWords);
  }

 private:
  static constexpr uint32_t kTiles = 512;  // 16 KiB of records
  static constexpr uint32_t kWords = frame::kRecordBytes / 4;

  // The arena's cursor.
  __aicore__ inline uint64_t read(const LocalTensor<uint32_t>& words) {
    load_bytes(words.ReinterpretCast<uint8_t>(), job_.overflow_cursor, 8);
    hand_over<HardEvent::MTE2_S>(pipe_);
    return uint64_t{words.GetValue(0)} | uint64_t{words.GetValue(1)} << 32;
  }
  __aicore__ inline void write(const LocalTensor<uint32_t>& words) {
    words.SetValue(0, static_cast<uint32_t>(next_));
    words.SetValue(1, static_cast<uint32_t>(next_ >> 32));
    hand_over<HardEvent::S_MTE3>(pipe_);
    store_bytes(job_.overflow_cursor, words.ReinterpretCast<uint8_t>(), 8);
  }

  __aicore__ inline void place(const LocalTensor<uint32_t>& words, uint32_t tile, uint32_t count) {
    const GlobalTensor<uint32_t> global = global_at<uint32_t>(
        job_.frame + share_.records + uint64_t{tile} * frame::kRecordBytes, count * kWords);
    DataCopy(words, global, count * kWords);
    hand_over<HardEvent::MTE2_S>(pipe_);
    for (uint32_t i = 0; i < count; ++i) {
      const uint32_t units = words.GetValue(i * kWords);
      const uint32_t in_var = var_.next();
      if (var_.take(units)) {
        words.SetValue(i * kWords, in_var);
        continue;
      }
      words.SetValue(i * kWords, frame::kBaseInOverflow |
                                     (static_cast<uint32_t>(next_) & ~frame::kBaseInOverflow));
      next_ += units;
    }
    hand_over<HardEvent::S_MTE3>(pipe_);
    DataCopy(global, words, count * kWords);
    hand_over<HardEvent::MTE3_MTE2>(pipe_);  // before the buffer is loaded again
  }

  TPipe* pipe_;
  EncodeJob job_;
  Share share_;
  Room var_;
  uint64_t next_ = 0;  // in the arena
};

}  // namespace memswap::ascend
