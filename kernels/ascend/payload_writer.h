// Where the payloads of a core's tiles go, and what the tile's record says of its blocks.
#pragma once

#include "tile_records.h"

namespace memswap::ascend {

class PayloadWriter {
 public:
  __aicore__ inline PayloadWriter(const EncodeJob& job, const Share& share)
      : var_(job.frame + share.var),
        overflow_(job.overflow),
        area_(var_),
        room_(Room::of_var(job, 0)),
        defers_(share.first_tile != 0 && job.shape != static_cast<uint32_t>(frame::Shape::kRaw)) {}

  __aicore__ inline void begin_tile() { begin(defers_); }

  // A tile that was deferred and has its place now.
  __aicore__ inline void begin_placed(const TileRecord& placed) {
    const uint64_t base = placed.base & frame::kMaxBaseUnits;
    area_ = (placed.base & frame::kBaseInOverflow) != 0 ? overflow_ : var_;
    room_ = Room(base, base + placed.units);
    begin(false);
  }

  // Block i of the tile; `add` also gives its payload's place, null where there is none. `packed`:
  // the payload's bitmap.
  __aicore__ inline void set(uint32_t i, uint32_t mode, uint32_t units, uint32_t center,
                             bool packed = false) {
    record_.set(i, mode, units, center, packed);
  }
  __aicore__ inline GM_ADDR add(uint32_t i, uint32_t mode, uint32_t units, uint32_t center,
                                bool packed = false) {
    set(i, mode, units, center, packed);
    return take(units);
  }

  // Room for payloads of the tile. Null: the whole tile is deferred.
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
    record_.base = deferred_ ? kDeferred | record_.units : first_;
    record_.checksum = checksum;
    return record_;
  }

  __aicore__ inline uint32_t next() const { return room_.next(); }

 private:
  __aicore__ inline void begin(bool deferred) {
    record_ = TileRecord();
    first_ = room_.next();
    deferred_ = deferred;
  }

  GM_ADDR var_;
  GM_ADDR overflow_;
  GM_ADDR area_;
  Room room_;
  bool defers_;  // every tile: those before them are other cores'
  TileRecord record_;
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
    store_bytes(to, from, bytes);
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
