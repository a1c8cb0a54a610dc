// What a pool and its blocks share: ranges, slabs and the ranges that wait for their tickets.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "block.h"
#include "pool.h"
#include "range_allocator.h"
#include "slab_source.h"
#include "work/process_mark.h"
#include "work/ticket.h"

namespace memswap {

// Three locks, always taken in this order and never the other way round:
//   grow_mutex_   one thread at a time asks the system for memory; held while it answers
//   mutex_        ranges, slabs, pending ranges, statistics; held for arithmetic, and while a slab
//                 forgets what is free
//   background_mutex_  what the background thread has been asked to do; alone
// A block's own lock comes before mutex_.
class PoolCore final : public std::enable_shared_from_this<PoolCore> {
 public:
  PoolCore(SlabSourcePtr source, PoolOptions options);
  // Blocks until the tickets of pending ranges are done: their slabs go now. In a forked child
  // nothing goes: a file's space and pinned memory are the parent's to give back.
  ~PoolCore();
  PoolCore(const PoolCore&) = delete;
  PoolCore& operator=(const PoolCore&) = delete;

  // Whether this process was forked from the one that made it. Nothing else may be asked then.
  bool forked() const { return maker_.forked(); }

  BlockPtr allocate(size_t nbytes);
  size_t trim();
  PoolStatistics statistics() const;
  // Bytes of a block were written to a file.
  void count_written(size_t nbytes) { written_bytes_ += nbytes; }

  // A dropped block's range, back. Called by the block's destructor.
  void give_back(const Range& range, size_t nbytes, std::vector<TicketPtr> tickets);

  // A block keeps `left` of its `nbytes` bytes. Returns what is left of its range.
  Range shrink(const Range& range, size_t nbytes, size_t left);

  // The background thread: its body, and what it can be asked.
  void run_background();
  void ask_reserve(size_t nbytes);
  void ask_stop();
  bool wait_background();

 private:
  struct Pending {
    Range range;
    std::vector<TicketPtr> tickets;
  };
  using Sequence = uint64_t;  // pending ranges in the order in which they were dropped

  BlockPtr take(size_t nbytes);
  BlockPtr take_free(size_t nbytes);
  BlockPtr take_pending(size_t nbytes);
  BlockPtr make_block(const Range& range, size_t nbytes, std::vector<TicketPtr> behind);
  void note_taken(const Range& range, size_t nbytes);

  bool reap(size_t most_ranges, size_t most_misses, Sequence* from);
  void free(const Range& range);
  void put_pending(Sequence sequence, Pending pending);

  std::string grow(size_t wanted_bytes, size_t least_bytes, bool background);
  size_t slab_bytes_for(size_t size, size_t reserved_bytes) const;
  size_t reserved_bytes() const;
  void grow_ahead_if_low();
  void refuse(const std::string& reason);

  const std::shared_ptr<CountedSlabs> source_;
  const PoolOptions options_;
  const ProcessMark maker_;

  std::mutex grow_mutex_;

  mutable std::mutex mutex_;
  RangeAllocator ranges_;
  std::map<SlabId, std::unique_ptr<Slab>> slabs_;
  std::set<SlabId> pageable_;  // of these, the ones that were to be pinned
  SlabId next_slab_ = 0;
  std::map<Sequence, Pending> pending_;
  std::set<std::pair<size_t, Sequence>> pending_by_size_;
  Sequence next_pending_ = 0;
  Sequence thorough_from_ = 0;  // where the next thorough reap begins
  std::atomic<uint64_t> written_bytes_{0};
  PoolStatistics counted_;  // in_use, peak, waste, pending, blocks, waits, refusals, ...

  std::mutex background_mutex_;
  std::condition_variable background_;
  size_t reserve_target_ = 0;           // bytes; 0: nothing asked
  bool slab_wanted_ = false;            // grow ahead by one slab
  bool growing_ahead_stopped_ = false;  // refused once: wait until memory comes back
  bool busy_ = false;
  bool stop_ = false;
  bool reserve_refused_ = false;
};

// One range of a core's slab, owned.
class PoolBlock final : public Block {
 public:
  PoolBlock(std::shared_ptr<PoolCore> core, Slab& slab, const Range& range, size_t nbytes,
            std::vector<TicketPtr> behind);
  ~PoolBlock() override;

  size_t nbytes() const override;
  void shrink(size_t nbytes) override;
  void* data() const override;
  bool pinned() const override { return slab_.pinned(); }
  size_t offset() const override { return offset_; }
  void write(const void* source) override;
  void read(void* destination) override;
  void used_by(TicketPtr ticket) override;
  std::vector<TicketPtr> uses() const override;

 private:
  const std::shared_ptr<PoolCore> core_;
  Slab& slab_;           // of core_, which returns no slab that has a block
  const size_t offset_;  // of the range, which never moves
  mutable std::mutex mutex_;
  Range range_;
  size_t nbytes_;
  std::vector<TicketPtr> tickets_;
  size_t prune_at_;
};

// Removes the tickets whose work has ended and destroys them; no lock may be held.
// Returns true if none is left.
bool drop_done(std::vector<TicketPtr>& tickets);

}  // namespace memswap
