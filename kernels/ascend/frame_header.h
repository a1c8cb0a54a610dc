// The launches around an encoder, each on one core: the header before it, and places for deferred
// tiles after it (job.h, Note [positions without talking]).
#pragma once

#include "tile_records.h"

namespace memswap::ascend {

// The header with all counters at 0.
__aicore__ inline void begin_frame(const EncodeJob& job) {
  TPipe pipe;
  TBuf<TPosition::VECCALC> buffer;
  pipe.InitBuffer(buffer, frame::kHeaderBytes);
  const LocalTensor<uint32_t> words = buffer.Get<uint32_t>();
  GlobalTensor<uint32_t> global;
  global.SetGlobalBuffer(reinterpret_cast<__gm__ uint32_t*>(job.frame), kHeaderWords);
  for (uint32_t i = 0; i < kHeaderWords; ++i) {
    words.SetValue(i, 0u);
  }
  words.SetValue(HeaderWord::kMagic, frame::kMagic);
  words.SetValue(HeaderWord::kVersion,
                 uint32_t{frame::kVersion} | job.dtype << 16 | job.shape << 24);
  words.SetValue(HeaderWord::kFlags, job.checksum != 0 ? uint32_t{frame::kChecked} : 0u);
  words.SetValue(HeaderWord::kElements, static_cast<uint32_t>(job.elements));
  words.SetValue(HeaderWord::kElements + 1, static_cast<uint32_t>(job.elements >> 32));
  words.SetValue(HeaderWord::kBlocks, Share(job.elements, job.slab_bytes).blocks);
  words.SetValue(HeaderWord::kSlabBytes, job.slab_bytes);
  words.SetValue(HeaderWord::kVarCapacity, static_cast<uint32_t>(job.var_capacity));
  words.SetValue(HeaderWord::kVarCapacity + 1, static_cast<uint32_t>(job.var_capacity >> 32));
  hand_over<HardEvent::S_MTE3>(&pipe);
  DataCopy(global, words, kHeaderWords);
}

// Gives the deferred tiles their places in the arena, or says in the status that there is no room.
class DeferredTiles {
 public:
  __aicore__ inline DeferredTiles(TPipe* pipe, const EncodeJob& job)
      : pipe_(pipe), job_(job), share_(job.elements, job.slab_bytes) {}

  __aicore__ inline void place() {
    TBuf<TPosition::VECCALC> header, cursor, records;
    pipe_->InitBuffer(header, frame::kHeaderBytes);
    pipe_->InitBuffer(cursor, kUnifiedBlockBytes);
    pipe_->InitBuffer(records, kTiles * frame::kRecordBytes);
    const LocalTensor<uint32_t> words = header.Get<uint32_t>();
    GlobalTensor<uint32_t> global;
    global.SetGlobalBuffer(reinterpret_cast<__gm__ uint32_t*>(job_.frame), kHeaderWords);
    DataCopy(words, global, kHeaderWords);
    hand_over<HardEvent::MTE2_S>(pipe_);
    const uint32_t needed = words.GetValue(HeaderWord::kOverflowUsed);
    if (needed == 0) {
      return;
    }
    if (!take(cursor.Get<uint32_t>(), needed)) {
      words.SetValue(HeaderWord::kStatus, uint32_t{frame::kNoRoom});
      words.SetValue(HeaderWord::kOverflowUsed, 0u);
      hand_over<HardEvent::S_MTE3>(pipe_);
      DataCopy(global, words, kHeaderWords);
      return;
    }
    for (uint32_t tile = 0; tile < share_.tiles; tile += kTiles) {
      const uint32_t left = share_.tiles - tile;
      place(records.Get<uint32_t>(), tile, left < kTiles ? left : kTiles);
    }
  }

 private:
  static constexpr uint32_t kTiles = 512;  // 16 KiB of records
  static constexpr uint32_t kWords = frame::kRecordBytes / 4;

  // Moves the arena's cursor by `units`.
  __aicore__ inline bool take(const LocalTensor<uint32_t>& words, uint32_t units) {
    if (job_.overflow == nullptr) {
      return false;
    }
    GlobalTensor<uint32_t> global;
    global.SetGlobalBuffer(reinterpret_cast<__gm__ uint32_t*>(job_.overflow_cursor), 2);
    DataCopyPad(words, global, DataCopyExtParams(1, 8, 0, 0, 0),
                DataCopyPadExtParams<uint32_t>(false, 0, 0, 0u));
    hand_over<HardEvent::MTE2_S>(pipe_);
    const uint64_t used = uint64_t{words.GetValue(0)} | uint64_t{words.GetValue(1)} << 32;
    if (used > job_.overflow_capacity || units > job_.overflow_capacity - used) {
      return false;
    }
    next_ = static_cast<uint32_t>(used);
    words.SetValue(0, static_cast<uint32_t>(used + units));
    words.SetValue(1, static_cast<uint32_t>((used + units) >> 32));
    hand_over<HardEvent::S_MTE3>(pipe_);
    DataCopyPad(global, words, DataCopyExtParams(1, 8, 0, 0, 0));
    return true;
  }

  __aicore__ inline void place(const LocalTensor<uint32_t>& words, uint32_t tile, uint32_t count) {
    GlobalTensor<uint32_t> global;
    global.SetGlobalBuffer(reinterpret_cast<__gm__ uint32_t*>(
        job_.frame + share_.records + uint64_t{tile} * frame::kRecordBytes));
    DataCopy(words, global, count * kWords);
    hand_over<HardEvent::MTE2_S>(pipe_);
    for (uint32_t i = 0; i < count; ++i) {
      if (words.GetValue(i * kWords) != kDeferred) {
        continue;
      }
      words.SetValue(i * kWords, kDeferred | next_);
      for (uint32_t pair = 1; pair <= frame::kTileBlocks / 2; ++pair) {
        const uint32_t blocks = words.GetValue(i * kWords + pair);
        next_ += (blocks & 0xfffu) + (blocks >> 16 & 0xfffu);
      }
    }
    hand_over<HardEvent::S_MTE3>(pipe_);
    DataCopy(global, words, count * kWords);
    hand_over<HardEvent::MTE3_MTE2>(pipe_);  // before the buffer is loaded again
  }

  TPipe* pipe_;
  EncodeJob job_;
  Share share_;
  uint32_t next_ = 0;
};

}  // namespace memswap::ascend
