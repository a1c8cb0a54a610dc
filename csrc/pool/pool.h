// Reused memory: slabs cut into blocks of exact size, each gated by the tickets of its last uses.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "block.h"
#include "slab_source.h"

namespace memswap {

class PoolCore;

struct PoolOptions {
  // Bytes of the first slabs. Longer blocks and a growing pool get longer slabs; what is left of a
  // budget, shorter ones. A power of two (rounded up): torch's pinned allocator would round anyway,
  // and keep the difference to itself.
  size_t slab_bytes = size_t{64} << 20;
  // Bytes; blocks start and end at multiples of it.
  size_t alignment = 512;
  // When fewer bytes than this are neither in use nor refused, the background thread gets the next
  // slab before somebody has to wait for it. 0: grow only when there is no other way.
  size_t grow_ahead_bytes = 0;
};

struct PoolStatistics {
  size_t in_use_bytes = 0;        // asked for by live blocks
  size_t peak_bytes = 0;          // highest in_use_bytes
  size_t waste_bytes = 0;         // rounded minus asked, of live blocks
  size_t pending_bytes = 0;       // dropped blocks whose tickets are still running
  size_t free_bytes = 0;          // can be handed out at once, in pieces
  size_t largest_free_bytes = 0;  // the longest of these pieces
  size_t reserved_bytes = 0;      // in_use + waste + pending + free
  size_t slabs = 0;
  size_t blocks = 0;    // live
  size_t pending = 0;   // dropped blocks whose tickets are still running
  size_t waits = 0;     // blocks handed out behind tickets of the previous owner
  size_t refusals = 0;  // allocations that got nullptr
  std::string last_refusal;
  size_t slabs_acquired = 0;       // so far; stands still in a steady state
  size_t grown_in_background = 0;  // slabs, of slabs_acquired
  double acquire_s = 0;            // seconds spent in the system's allocator
  size_t pageable_bytes = 0;       // of reserved_bytes, what was to be pinned and is not
  std::string why_pageable;        // what the last pinning that failed was refused with
  uint64_t written_bytes = 0;      // to slabs without an address in memory: to a file
};

// [Note: Gating]
// A block may be dropped while a device still copies to or from it. Its range then stays taken
// until every ticket of the block is done, or is given, with those tickets in Block::uses(), to a
// request of exactly the same size: the new owner's lane orders its work behind them on the device
// and the host never waits. Exactly the same size, because a shorter request would leave a rest
// that is gated too, and pieces of gated ranges could not be joined again.
// A ticket's destructor may drop device storage, take the GIL or block, and done() may call the
// driver; both happen only where no lock of the pool is held.

// Thread-safe. Blocks and pending ranges keep what they need alive: a pool may be dropped first.
// The lock is never held during a transfer, an allocation of the system or a call of a ticket.
//
// After fork() parent and child would give the same ranges of a file to different tensors, and a
// lock may be held for ever: in the child every request is refused. Dropping such a pool there, or
// a block of one, is safe and leaks what it shared with the parent.
class Pool {
 public:
  explicit Pool(SlabSourcePtr source, PoolOptions options = {});
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Whether this process was forked from the one that made the pool.
  bool forked() const;

  // A block of exactly `nbytes` bytes, or nullptr (counted, with its reason in the statistics) when
  // the source has refused. In this order: free range, pending range of the same size (waits),
  // growth; then the overflow. Never throws for want of memory in slabs.
  BlockPtr allocate(size_t nbytes);

  // Where requests go that this pool cannot serve; nullptr: nowhere. Set before the pool is used.
  void set_overflow(std::shared_ptr<Pool> overflow) { overflow_ = std::move(overflow); }
  const std::shared_ptr<Pool>& overflow() const { return overflow_; }

  // Asks the background thread to grow until `nbytes` bytes are in slabs, in all (to within 1 MiB,
  // so that a budget that is no multiple of a slab can be reserved whole). Returns at once; a
  // refusal is in the statistics.
  void reserve(size_t nbytes);

  // Blocks until the background thread has nothing to do. False if it was refused something since
  // the last call of reserve.
  bool wait_reserved();

  // Returns slabs without blocks and pending ranges to the source. Returns the bytes.
  size_t trim();

  PoolStatistics statistics() const;

  // Ends the background thread; what is reserved stays. Called by the destructor, and before the
  // interpreter ends, when a driver may no longer be called from other threads.
  void stop_background();

 private:
  void start_background();

  const std::shared_ptr<PoolCore> core_;
  std::shared_ptr<Pool> overflow_;
  std::mutex grower_mutex_;
  std::thread grower_;
  bool stopped_ = false;
};

}  // namespace memswap
