#include "window_queue.h"

#include <algorithm>
#include <limits>
#include <tuple>
#include <utility>

#include "iteration.h"
#include "work/without_gil.h"

namespace memswap {

namespace {

constexpr double kNoEnd = std::numeric_limits<double>::infinity();

// Of the wanted decodes, those that may wait: a part of the bytes that are prefetched.
constexpr int64_t kWantedPart = 2;

// Encodes that one window looks at in vain before it gives up.
constexpr size_t kMostLooks = 16;

bool is_one_of(const std::weak_ptr<Entry>& entry, const std::vector<EntryPtr>& entries) {
  return std::any_of(entries.begin(), entries.end(), [&](const EntryPtr& one) {
    return !entry.owner_before(one) && !one.owner_before(entry);
  });
}

}  // namespace

bool WindowQueue::sooner(const Waiting& one, const Waiting& other) {
  return std::tuple(-one.pending.gain, one.number) < std::tuple(-other.pending.gain, other.number);
}

// --- what waits ---

void WindowQueue::begin_iteration() {
  if (deferred_bytes_ != 0) {
    auto_pending_bytes_ = std::max(kLeastPendingBytes, deferred_bytes_ / kPendingPart);
    deferred_bytes_ = 0;
  }
}

void WindowQueue::defer(PendingEncode pending) {
  const int64_t nbytes = pending.nbytes;
  Waiting waiting{++number_, std::move(pending), now_};
  const auto place = std::upper_bound(pending_.begin(), pending_.end(), waiting, sooner);
  pending_.insert(place, std::move(waiting));
  pending_bytes_ += nbytes;
  deferred_bytes_ += nbytes;
  const int64_t bound = max_pending_bytes.value_or(auto_pending_bytes_);
  if (pending_bytes_ > bound) {
    forget();
    counts.started_at_bound += run({.end = kNoEnd, .most_left = bound});
  }
}

void WindowQueue::want(const std::vector<EntryPtr>& entries, int64_t prefetch_bytes) {
  for (const EntryPtr& entry : entries) {
    wanted_.push_back({entry, entry->nbytes(), now_});
    wanted_bytes_ += entry->nbytes();
  }
  while (!wanted_.empty() && wanted_bytes_ * kWantedPart > prefetch_bytes &&
         fetch_next(counts.decoded_ahead)) {
  }
}

void WindowQueue::clear() {
  pending_.clear();
  wanted_.clear();
  started_.clear();
  pending_bytes_ = wanted_bytes_ = 0;
}

std::vector<EntryPtr> WindowQueue::pending() const {
  std::vector<EntryPtr> alive;
  for (const Waiting& waiting : pending_) {
    if (EntryPtr entry = waiting.pending.entry.lock()) {
      alive.push_back(std::move(entry));
    }
  }
  return alive;
}

void WindowQueue::start_now(const std::vector<EntryPtr>& entries) {
  run({.end = kNoEnd, .only = &entries});
}

// --- windows ---

void WindowQueue::open(double seconds) {
  close();
  end_ = now_ + seconds;
  ++counts.windows;
  counts.window_s += seconds;
  while (!wanted_.empty()) {
    const Wanted& next = wanted_.front();
    if (!fits(static_cast<double>(next.nbytes) / decode_rate, next.since, end_) ||
        !fetch_next(counts.decoded_in_windows)) {
      break;
    }
  }
  counts.encoded_in_windows += run({.end = end_, .looks = kMostLooks});
}

void WindowQueue::close() {
  now_ = end_ = std::max(now_, end_);
  join(now_);
}

void WindowQueue::end_forward() {
  close();
  if (leftovers_start) {
    counts.started_at_end += run({.end = kNoEnd});
  }
}

void WindowQueue::begin_backward() {
  now_ = end_ = std::max({now_, end_, busy_until_});
  join(kNoEnd);
  forget();
}

// --- the clock ---

bool WindowQueue::fits(double cost, double since, double end) const {
  const double begin = std::max(now_, busy_until_);
  if (begin + cost <= end) {
    return true;
  }
  // Longer than the window: once it has waited as long as it takes, where nothing else runs.
  return now_ - since >= cost && begin <= now_ && now_ < end;
}

// Starts, in their order, those that belong on this stream and end in time. How many.
int64_t WindowQueue::run(const Bounds& bounds) {
  int64_t started = 0;
  std::vector<Waiting> passed;
  std::vector<Waiting> candidates = std::exchange(pending_, {});
  size_t at = 0;
  // Whatever happens, what was not started goes on waiting; and what was deferred meanwhile.
  const auto put_back = [&] {
    std::move(candidates.begin() + static_cast<std::ptrdiff_t>(at), candidates.end(),
              std::back_inserter(passed));
    std::move(pending_.begin(), pending_.end(), std::back_inserter(passed));
    pending_ = std::move(passed);
  };
  try {
    while (at < candidates.size() && pending_bytes_ > bounds.most_left &&
           passed.size() != bounds.looks && std::max(now_, busy_until_) < bounds.end) {
      Waiting& waiting = candidates[at++];
      const PendingEncode& pending = waiting.pending;
      if (bounds.only != nullptr && !is_one_of(pending.entry, *bounds.only)) {
        passed.push_back(std::move(waiting));
        continue;
      }
      if (too_late(pending)) {
        continue;
      }
      const double cost = static_cast<double>(pending.nbytes) / encode_rate;
      if (!fits(cost, waiting.since, bounds.end) || !work_.on_stream(pending.stream)) {
        passed.push_back(std::move(waiting));
        continue;
      }
      pending_bytes_ -= pending.nbytes;
      TicketPtr ticket = work_.start(pending);
      if (!ticket) {
        keep(pending);
        continue;
      }
      busy_until_ = std::max(now_, busy_until_) + cost;
      started_.push_back({std::move(ticket), busy_until_, pending.stream});
      counts.encoded_bytes += pending.nbytes;
      ++started;
    }
  } catch (...) {
    put_back();
    throw;
  }
  put_back();
  return started;
}

// Accounts for what must not start any more: a dead entry, or one of rule 2.
bool WindowQueue::too_late(const PendingEncode& pending) {
  const EntryPtr entry = pending.entry.lock();
  if (entry && !(entry->iteration() && entry->iteration()->began_backward())) {
    return false;
  }
  pending_bytes_ -= pending.nbytes;
  if (entry) {
    keep(pending);
  }
  return true;
}

void WindowQueue::forget() {
  std::erase_if(pending_, [this](const Waiting& one) { return too_late(one.pending); });
}

void WindowQueue::keep(const PendingEncode& pending) {
  ++counts.kept_storages;
  counts.kept_bytes += pending.nbytes;
}

// Brings back the entry that is wanted first, and counts it. False: there is no memory for it, and
// it goes on being wanted.
bool WindowQueue::fetch_next(int64_t& fetched) {
  const Wanted next = wanted_.front();
  const EntryPtr entry = next.entry.lock();
  // Nobody may wait for it any more, and it may even be away again.
  const bool is_wanted =
      entry && !(entry->iteration() && entry->iteration()->order().was_demanded(entry->index()));
  const Ahead came = is_wanted ? work_.fetch(entry) : Ahead::kNothing;
  if (came == Ahead::kNoMemory) {
    return false;
  }
  wanted_.pop_front();
  wanted_bytes_ -= next.nbytes;
  if (came == Ahead::kFetches) {
    busy_until_ = std::max(now_, busy_until_) + static_cast<double>(next.nbytes) / decode_rate;
    ++fetched;
  }
  return true;
}

// Orders this stream after encodes that should have ended by then.
void WindowQueue::join(double until) {
  std::vector<Started> elsewhere;
  while (!started_.empty() && started_.front().end <= until) {
    Started one = std::move(started_.front());
    started_.pop_front();
    if (work_.on_stream(one.stream)) {
      const WithoutGil without_gil;
      one.ticket->wait();
    } else {
      elsewhere.push_back(std::move(one));
    }
  }
  started_.insert(started_.begin(), std::make_move_iterator(elsewhere.begin()),
                  std::make_move_iterator(elsewhere.end()));
}

}  // namespace memswap
