#include "pool_core.h"

#include <algorithm>
#include <bit>
#include <exception>
#include <limits>
#include <utility>

#include "work/leak.h"

namespace memswap {

namespace {

// Nothing longer exists on any machine, and everything up to it can be rounded without overflow.
constexpr size_t kLongestBlock = size_t{1} << 60;

// A slab holds two of the block that asked for it, and as a pool grows its slabs do, to this share
// of what it has; both up to this size. Of 64 MiB slabs the activations of 32 Llama blocks at 5000
// tokens leave 23 % in holes, of these 1 % (pool_waste_test.cpp).
constexpr size_t kBlocksPerSlab = 2;
constexpr size_t kGrowthShare = 8;
constexpr size_t kLargestUsualSlab = size_t{1} << 30;

// The background thread fills a budget with ever smaller slabs down to this; what is left then is
// too little to matter.
constexpr size_t kSmallestReserve = size_t{1} << 20;

// Ranges asked about per allocation: a few always, more when the alternative is to grow.
constexpr size_t kCheapReap = 8;
constexpr size_t kCheapMisses = 2;  // one per direction of transfer
constexpr size_t kThoroughReap = 64;

SlabSourcePtr never_throwing(SlabSourcePtr source) {
  return std::make_shared<FallbackSlabs>(std::move(source));
}

PoolOptions checked(PoolOptions options) {
  options.slab_bytes =
      std::bit_ceil(std::clamp(options.slab_bytes, options.alignment, kLongestBlock));
  return options;
}

}  // namespace

PoolCore::PoolCore(SlabSourcePtr source, PoolOptions options)
    : source_(std::make_shared<CountedSlabs>(never_throwing(std::move(source)))),
      options_(checked(options)),
      ranges_(options_.alignment) {}

PoolCore::~PoolCore() {
  if (forked()) {
    for (auto& [id, slab] : slabs_) {
      (void)slab.release();
    }
    leak(std::move(pending_));
    return;
  }
  for (auto& [sequence, pending] : pending_) {
    for (const TicketPtr& ticket : pending.tickets) {
      try {
        if (!ticket->done()) {
          ticket->synchronize();
        }
      } catch (const std::exception&) {
        // Whoever holds the ticket hears of it; here it only matters that the work has ended.
      }
    }
  }
}

BlockPtr PoolCore::allocate(size_t nbytes) {
  if (nbytes > kLongestBlock) {
    refuse("a block of " + std::to_string(nbytes) + " bytes is longer than any memory");
    return nullptr;
  }
  reap(kCheapReap, kCheapMisses, nullptr);
  BlockPtr block = take(nbytes);
  if (!block && reap(kThoroughReap, kThoroughReap, &thorough_from_)) {
    block = take(nbytes);
  }
  if (!block) {
    const std::lock_guard growing(grow_mutex_);
    // Somebody else may have grown meanwhile, or taken what was grown here: hence the loop.
    while (!(block = take(nbytes))) {
      const size_t size = ranges_.rounded(nbytes);
      const std::string reason = grow(slab_bytes_for(size, reserved_bytes()), size, false);
      if (!reason.empty()) {
        refuse(reason);
        return nullptr;
      }
    }
  }
  grow_ahead_if_low();
  return block;
}

BlockPtr PoolCore::take(size_t nbytes) {
  BlockPtr block = take_free(nbytes);
  return block ? block : take_pending(nbytes);
}

BlockPtr PoolCore::take_free(size_t nbytes) {
  std::optional<Range> range;
  {
    const std::lock_guard lock(mutex_);
    range = ranges_.allocate(nbytes);
    if (!range) {
      return nullptr;
    }
    note_taken(*range, nbytes);
  }
  return make_block(*range, nbytes, {});
}

BlockPtr PoolCore::take_pending(size_t nbytes) {
  Pending found;
  {
    const std::lock_guard lock(mutex_);
    const size_t size = ranges_.rounded(nbytes);
    const auto oldest = pending_by_size_.lower_bound({size, 0});
    if (oldest == pending_by_size_.end() || oldest->first != size) {
      return nullptr;
    }
    auto node = pending_.extract(oldest->second);
    pending_by_size_.erase(oldest);
    found = std::move(node.mapped());
    --counted_.pending;
    counted_.pending_bytes -= size;
    note_taken(found.range, nbytes);
  }
  if (!drop_done(found.tickets)) {
    const std::lock_guard lock(mutex_);
    ++counted_.waits;
  }
  return make_block(found.range, nbytes, std::move(found.tickets));
}

void PoolCore::note_taken(const Range& range, size_t nbytes) {
  ++counted_.blocks;
  counted_.in_use_bytes += nbytes;
  counted_.waste_bytes += range.size - nbytes;
  counted_.peak_bytes = std::max(counted_.peak_bytes, counted_.in_use_bytes);
}

BlockPtr PoolCore::make_block(const Range& range, size_t nbytes, std::vector<TicketPtr> behind) {
  Slab* slab = nullptr;
  {
    const std::lock_guard lock(mutex_);
    slab = slabs_.at(range.slab).get();
  }
  return std::make_shared<PoolBlock>(shared_from_this(), *slab, range, nbytes, std::move(behind));
}

void PoolCore::give_back(const Range& range, size_t nbytes, std::vector<TicketPtr> tickets) {
  const std::lock_guard lock(mutex_);
  --counted_.blocks;
  counted_.in_use_bytes -= nbytes;
  counted_.waste_bytes -= range.size - nbytes;
  if (tickets.empty()) {
    free(range);
    return;
  }
  ++counted_.pending;
  counted_.pending_bytes += range.size;
  put_pending(next_pending_++, Pending{.range = range, .tickets = std::move(tickets)});
}

// A huge page reaches beyond a block: what is free around it is forgotten with it. Under the lock,
// so that nobody is given it meanwhile.
void PoolCore::free(const Range& range) {
  const Range whole = ranges_.free(range);
  slabs_.at(whole.slab)->forget(whole.offset, whole.size);
}

Range PoolCore::shrink(const Range& range, size_t nbytes, size_t left) {
  const std::lock_guard lock(mutex_);
  Range kept = range;
  kept.size = ranges_.rounded(left);
  counted_.in_use_bytes -= nbytes - left;
  counted_.waste_bytes -= range.size - nbytes;
  counted_.waste_bytes += kept.size - left;
  if (kept.size < range.size) {
    ranges_.free(Range{
        .slab = range.slab, .offset = range.offset + kept.size, .size = range.size - kept.size});
  }
  return kept;
}

void PoolCore::put_pending(Sequence sequence, Pending pending) {
  pending_by_size_.emplace(pending.range.size, sequence);
  pending_.emplace(sequence, std::move(pending));
}

// Frees pending ranges whose tickets are done, beginning with the oldest, or at `from`, which then
// moves on and wraps around. Asks at most `most_ranges` and stops after `most_misses` that are
// still running. Says whether anything was freed.
bool PoolCore::reap(size_t most_ranges, size_t most_misses, Sequence* from) {
  bool freed = false;
  Sequence next = 0;
  if (from != nullptr) {
    const std::lock_guard lock(mutex_);
    next = *from;
  }
  while (most_ranges-- > 0 && most_misses > 0) {
    Sequence sequence = 0;
    Pending asked;
    {
      const std::lock_guard lock(mutex_);
      const auto oldest = pending_.lower_bound(next);
      if (oldest == pending_.end()) {
        next = 0;
        break;
      }
      sequence = oldest->first;
      pending_by_size_.erase({oldest->second.range.size, sequence});
      asked = std::move(oldest->second);
      pending_.erase(oldest);
    }
    next = sequence + 1;
    const bool done = drop_done(asked.tickets);
    const std::lock_guard lock(mutex_);
    if (done) {
      --counted_.pending;
      counted_.pending_bytes -= asked.range.size;
      free(asked.range);
      freed = true;
    } else {
      put_pending(sequence, std::move(asked));
      --most_misses;
    }
  }
  if (from != nullptr) {
    const std::lock_guard lock(mutex_);
    *from = next;
  }
  return freed;
}

size_t PoolCore::slab_bytes_for(size_t size, size_t reserved) const {
  const size_t several = std::bit_ceil(kBlocksPerSlab * size);
  const size_t share = std::bit_floor(reserved / kGrowthShare);
  const size_t usual = std::min(std::max(several, share), kLargestUsualSlab);
  return std::max({options_.slab_bytes, std::bit_ceil(size), usual});
}

size_t PoolCore::reserved_bytes() const {
  const std::lock_guard lock(mutex_);
  return ranges_.total_bytes();
}

// Gets one slab: of `wanted_bytes`, or where the system or the budget has less, of a plain slab's
// size, or of exactly `least_bytes` if that is longer. Shorter slabs only fill up a budget: a
// system that has no plain slab left should be left alone. Returns the reason of a refusal, or
// nothing. Called with grow_mutex_ held.
std::string PoolCore::grow(size_t wanted_bytes, size_t least_bytes, bool background) {
  const size_t room = source_->room();
  size_t tried = std::numeric_limits<size_t>::max();
  std::string reason;
  for (size_t size : {wanted_bytes, std::max(options_.slab_bytes, std::bit_ceil(least_bytes)),
                      std::max(options_.slab_bytes, least_bytes)}) {
    if (source_->granted(size) > room) {
      size = std::max(least_bytes, std::bit_floor(room));
    }
    if (source_->granted(size) > room) {
      size = least_bytes;  // in vain; but the source has the words for it
    }
    if (size >= tried) {
      continue;
    }
    tried = size;
    SlabResult result = source_->acquire(size);
    const std::lock_guard lock(mutex_);
    if (result.slab) {
      const SlabId id = next_slab_++;
      ranges_.add_slab(id, result.slab->size());
      if (!result.why_pageable.empty()) {
        pageable_.insert(id);
        counted_.pageable_bytes += result.slab->size();
        counted_.why_pageable = std::move(result.why_pageable);
      }
      slabs_.emplace(id, std::move(result.slab));
      counted_.grown_in_background += background ? 1 : 0;
      return {};
    }
    reason = result.refusal.empty() ? "the source of slabs gave no reason" : result.refusal;
  }
  const std::lock_guard lock(mutex_);
  counted_.last_refusal = reason;
  return reason;
}

void PoolCore::refuse(const std::string& reason) {
  const std::lock_guard lock(mutex_);
  ++counted_.refusals;
  counted_.last_refusal = reason;
}

size_t PoolCore::trim() {
  reap(std::numeric_limits<size_t>::max(), std::numeric_limits<size_t>::max(), nullptr);
  std::vector<std::unique_ptr<Slab>> returned;  // destroyed without the lock: the driver may block
  size_t bytes = 0;
  {
    const std::lock_guard lock(mutex_);
    for (const SlabId id : ranges_.free_slabs()) {
      ranges_.remove_slab(id);
      const auto slab = slabs_.find(id);
      bytes += slab->second->size();
      counted_.pageable_bytes -= pageable_.erase(id) != 0 ? slab->second->size() : 0;
      returned.push_back(std::move(slab->second));
      slabs_.erase(slab);
    }
  }
  returned.clear();
  source_->trim();
  const std::lock_guard lock(background_mutex_);
  growing_ahead_stopped_ = false;
  return bytes;
}

PoolStatistics PoolCore::statistics() const {
  PoolStatistics statistics;
  {
    const std::lock_guard lock(mutex_);
    statistics = counted_;
    statistics.free_bytes = ranges_.free_bytes();
    statistics.largest_free_bytes = ranges_.largest_free_range();
    statistics.reserved_bytes = ranges_.total_bytes();
    statistics.slabs = slabs_.size();
  }
  const CountedSlabs::Counts counts = source_->counts();
  statistics.slabs_acquired = counts.acquired;
  statistics.acquire_s = counts.acquire_s;
  statistics.written_bytes = written_bytes_;
  return statistics;
}

void PoolCore::grow_ahead_if_low() {
  if (options_.grow_ahead_bytes == 0) {
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    if (ranges_.free_bytes() + counted_.pending_bytes >= options_.grow_ahead_bytes) {
      return;
    }
  }
  const std::lock_guard lock(background_mutex_);
  if (!growing_ahead_stopped_ && !slab_wanted_ && !busy_) {
    slab_wanted_ = true;
    background_.notify_all();
  }
}

void PoolCore::ask_reserve(size_t nbytes) {
  const std::lock_guard lock(background_mutex_);
  reserve_target_ = std::max(reserve_target_, std::min(nbytes, kLongestBlock));
  reserve_refused_ = false;
  growing_ahead_stopped_ = false;
  background_.notify_all();
}

void PoolCore::ask_stop() {
  const std::lock_guard lock(background_mutex_);
  stop_ = true;
  background_.notify_all();
}

bool PoolCore::wait_background() {
  std::unique_lock lock(background_mutex_);
  background_.wait(lock,
                   [&] { return stop_ || (reserve_target_ == 0 && !slab_wanted_ && !busy_); });
  return !reserve_refused_ && reserve_target_ == 0;
}

void PoolCore::run_background() {
  std::unique_lock lock(background_mutex_);
  while (true) {
    background_.wait(lock, [&] { return stop_ || reserve_target_ > 0 || slab_wanted_; });
    if (stop_) {
      return;
    }
    const size_t target = reserve_target_;
    const bool one_slab = std::exchange(slab_wanted_, false);
    busy_ = true;
    lock.unlock();

    std::string reason;
    bool reached = false;
    {
      const std::lock_guard growing(grow_mutex_);
      const size_t least = std::min(options_.slab_bytes, kSmallestReserve);
      const size_t reserved = reserved_bytes();
      reached = reserved + least > target;
      size_t wanted = slab_bytes_for(0, reserved);
      if (!reached) {
        wanted = std::max(options_.slab_bytes,
                          std::min(std::bit_floor(target - reserved), kLargestUsualSlab));
      }
      if (!reached || one_slab) {
        reason = grow(wanted, least, true);
        reached = reserved_bytes() + least > target;
      }
    }

    lock.lock();
    busy_ = false;
    if (!reason.empty()) {
      growing_ahead_stopped_ = true;
      reserve_refused_ = reserve_refused_ || target > 0;
    }
    if ((reached || !reason.empty()) && reserve_target_ == target) {
      reserve_target_ = 0;
    }
    background_.notify_all();
  }
}

}  // namespace memswap
