// Where the payloads of a core's tiles go, and what the tile's record says of its blocks.
#pragma once

#include "tile_records.h"

namespace memswap::ascend {

class PayloadWriter {
 public:
  __aicore__ inline PayloadWriter(const EncodeJob& job, const Share& share)
      : area_(job.frame + share.var), room_(share, job.var_capacity) {}

  __aicore__ inline void begin_tile() { begin(0); }

  // A tile that was deferred and has a place in the arena now.
  __aicore__ inline void begin_spilled(const EncodeJob& job, uint32_t base, uint32_t units) {
    area_ = job.overflow;
    room_ = Room(base, uint64_t{base} + units);
    begin(kDeferred);
  }

  // Block i of the tile; `add` also gives its payload's place, null where there is none.
  __aicore__ inline void set(uint32_t i, uint32_t mode, uint32_t units, uint32_t center) {
    record_.set(i, mode, units, center);
  }
  __aicore__ inline GM_ADDR add(uint32_t i, uint32_t mode, uint32_t units, uint32_t center) {
    set(i, mode, units, center);
    return take(units);
  }

  // Room for payloads of the tile. Null: there is none left, and the whole tile is deferred.
  __aicore__ inline GM_ADDR take(uint32_t units) {
    const uint32_t base = room_.next();
    if (deferred_) {
      return nullptr;
    }
    if (!room_.take(units)) {
      deferred_ = true;
      room_.back_to(first_);
      PipeBarrier<PIPE_MTE3>();  // the next tile overwrites what this one has stored
      return nullptr;
    }
    return area_ + uint64_t{base} * frame::kUnitBytes;
  }

  __aicore__ inline const TileRecord& end_tile(uint32_t checksum) {
    record_.base = deferred_ ? kDeferred : area_bit_ | first_;
    record_.checksum = checksum;
    return record_;
  }

  __aicore__ inline uint32_t next() const { return room_.next(); }

  // From UB at a multiple of 32 bytes.
  __aicore__ inline static void store(GM_ADDR to, const Bytes& from, uint32_t bytes) {
    GlobalTensor<uint8_t> global;
    global.SetGlobalBuffer(reinterpret_cast<__gm__ uint8_t*>(to), bytes);
    DataCopyPad(global, from, DataCopyExtParams(1, bytes, 0, 0, 0));
  }

 private:
  __aicore__ inline void begin(uint32_t area_bit) {
    record_ = TileRecord();
    area_bit_ = area_bit;
    first_ = room_.next();
    deferred_ = false;
  }

  GM_ADDR area_;
  Room room_;
  TileRecord record_;
  uint32_t area_bit_ = 0;
  uint32_t first_ = 0;
  bool deferred_ = false;
};

// Stores elements of a step from where they were loaded. To be ended before the queue gives these
// away.
class LiteralWriter {
 public:
  __aicore__ inline explicit LiteralWriter(TPipe* pipe) : pipe_(pipe) {}

  __aicore__ inline void store(GM_ADDR to, const Bytes& from, uint32_t bytes) {
    if (!stored_) {
      hand_over<HardEvent::V_MTE3>(pipe_);  // and, by V's own wait, what MTE2 loaded
      stored_ = true;
    }
    PayloadWriter::store(to, from, bytes);
  }
  __aicore__ inline void end() {
    if (stored_) {
      hand_over<HardEvent::MTE3_V>(pipe_);
    }
  }

 private:
  TPipe* pipe_;
  bool stored_ = false;
};

}  // namespace memswap::ascend
