#include "batch.h"

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <variant>

#include "bucket.h"
#include "iteration.h"
#include "reasons.h"
#include "work/without_gil.h"

namespace memswap {

namespace {

// The part of a batch that one device sends.
struct Share {
  int64_t nbytes = 0;
  std::vector<EntryPtr> small;  // which travel together
};

// What stays for a reason goes on holding its storage, and is counted.
void count_if_refused(Engine& engine, Entry& entry, Reason refused) {
  if (refused != nullptr) {
    engine.ledger.keep(refused, entry.nbytes());
  }
}

// Storages that are small enough, in order, by the bucket that they travel in.
std::vector<std::vector<EntryPtr>> packed(const std::vector<EntryPtr>& small,
                                          int64_t bucket_bytes) {
  std::vector<std::vector<EntryPtr>> buckets;
  int64_t filled = 0;
  for (const EntryPtr& entry : small) {
    if (buckets.empty() || filled + entry->nbytes() > bucket_bytes) {
      buckets.emplace_back();
      filled = 0;
    }
    buckets.back().push_back(entry);
    filled += entry->nbytes();
  }
  return buckets;
}

bool send_bucket(Engine& engine, Transfers& by, const std::vector<EntryPtr>& entries) {
  std::vector<StorageRefPtr> storages;
  storages.reserve(entries.size());
  for (const EntryPtr& entry : entries) {
    storages.push_back(entry->storage());
  }
  std::optional<std::vector<Leaving>> parts = send_together(*by.blocks(), storages);
  storages.clear();  // or they would not be gone yet when they are looked at
  if (!parts) {
    return false;
  }
  for (size_t index = 0; index < entries.size(); ++index) {
    entries[index]->take_order();
    engine.depart(*entries[index], std::move((*parts)[index]));
  }
  return true;
}

// Sends entries that were not told to leave before. Each has its order until it is sent. The lock
// is held.
void send(Engine& engine, const std::vector<EntryPtr>& entries) {
  std::unordered_map<TransfersPtr, Share> shares;
  std::vector<TransfersPtr> devices;  // in the order in which they were met
  std::vector<EntryPtr> alone;
  for (const EntryPtr& entry : entries) {
    if (!entry->order() || !entry->storage()) {
      continue;
    }
    if (entry->lost_memory()) {
      entry->take_order();
      engine.ledger.keep(reasons::kResized, entry->nbytes());
      continue;
    }
    if (std::holds_alternative<Leaving>(*entry->order())) {
      engine.depart(*entry, std::get<Leaving>(entry->take_order()));
      continue;
    }
    const auto& order = std::get<LeaveOrder>(*entry->order());
    const auto [share, is_new] = shares.try_emplace(order.transfers);
    if (is_new) {
      devices.push_back(order.transfers);
    }
    share->second.nbytes += entry->nbytes();
    if (order.form == Form::kBlock && entry->nbytes() <= engine.batch_limits.small_bytes) {
      share->second.small.push_back(entry);
    } else {
      alone.push_back(entry);
    }
  }
  for (const TransfersPtr& by : devices) {
    // How much may be on its way at once is the caller's affair: no send waits for another.
    by->begin(0, shares.at(by).nbytes);
  }
  for (const TransfersPtr& by : devices) {
    for (const auto& bucket : packed(shares.at(by).small, engine.batch_limits.bucket_bytes)) {
      if (bucket.size() > 1 && send_bucket(engine, *by, bucket)) {
        continue;
      }
      for (const EntryPtr& entry : bucket) {
        entry->take_order();
        count_if_refused(engine, *entry, engine.send_raw(entry, entry->storage(), *by));
      }
    }
  }
  for (const EntryPtr& entry : alone) {
    const auto order = std::get<LeaveOrder>(entry->take_order());
    count_if_refused(engine, *entry, engine.send(entry, entry->storage(), order));
  }
}

}  // namespace

const char* word_of(Batch::Phase phase) {
  switch (phase) {
    case Batch::Phase::kCollected:
      return "collected";
    case Batch::Phase::kOffloading:
      return "offloading";
    case Batch::Phase::kOffloaded:
      return "offloaded";
    case Batch::Phase::kLoading:
      return "loading";
    case Batch::Phase::kLoaded:
      return "loaded";
  }
  return "nowhere";
}

std::string Batch::described() const {
  return "<batch of group '" + name + "', " + word_of(phase_) + ">";
}

std::vector<EntryPtr> Batch::living() const {
  std::vector<EntryPtr> found;
  for (const std::weak_ptr<Entry>& reference : entries_) {
    if (EntryPtr entry = reference.lock()) {
      found.push_back(std::move(entry));
    }
  }
  return found;
}

bool Batch::alive() const {
  const Locked locked(engine_->lock);
  return std::any_of(entries_.begin(), entries_.end(),
                     [](const std::weak_ptr<Entry>& one) { return !one.expired(); });
}

int64_t Batch::nbytes() const {
  const Locked locked(engine_->lock);
  int64_t sum = 0;
  for (const EntryPtr& entry : living()) {
    sum += entry->nbytes();
  }
  return sum;
}

void Batch::launch_offload() {
  send_all();
  engine_->tell();
}

void Batch::send_all() {
  const Locked locked(engine_->lock);
  check_open("launch_offload");
  if (phase_ == Phase::kLoading || phase_ == Phase::kLoaded) {
    for (const EntryPtr& entry : living()) {
      entry->let_go();
    }
    phase_ = Phase::kCollected;
  }
  send(*engine_, living());
  if (phase_ == Phase::kCollected) {
    phase_ = Phase::kOffloading;
  }
  read_by_.reset();
}

void Batch::wait_offload() {
  std::unique_lock locked(engine_->lock);
  check_open("wait_offload");
  if (phase_ == Phase::kCollected) {
    refuse("wait_offload", "nothing was launched", "launch_offload() first");
  }
  for (const EntryPtr& entry : living()) {
    const TicketPtr departure = entry->departure();
    if (!departure || entry->state() != State::kLeaving) {
      continue;
    }
    locked.unlock();
    {
      const WithoutGil without_gil;
      wait_ignoring_failure(departure);
    }
    locked.lock();
    if (!entry->notice_gone(true) && entry->is_away()) {
      entry->notice_sent();  // if it failed: takes the storage back and tells about it once
    }
  }
  if (phase_ == Phase::kOffloading) {
    phase_ = Phase::kOffloaded;
  }
  locked.unlock();
  engine_->tell();
}

void Batch::launch_load(int64_t readings) {
  fetch_all(readings);
  engine_->tell();
}

void Batch::fetch_all(int64_t readings) {
  const Locked locked(engine_->lock);
  check_open("launch_load");
  if (phase_ == Phase::kCollected) {
    refuse("launch_load", "nothing was offloaded", "launch_offload() first");
  }
  const bool loads = phase_ == Phase::kLoading || phase_ == Phase::kLoaded;
  if (loads && !read_by_ && !lacks_memory_) {
    return;
  }
  phase_ = Phase::kLoading;
  lacks_memory_ = false;
  for (const EntryPtr& entry : living()) {
    const Ahead came = entry->load(readings);
    if (came == Ahead::kNoMemory) {
      lacks_memory_ = true;
      break;
    }
    if (came == Ahead::kFetches && !entry->away()->can_fetch_ahead()) {
      const WithoutGil without_gil;
      wait_ignoring_failure(entry->arrival());  // nobody else would do the work
    }
  }
}

void Batch::wait_load() {
  std::unique_lock locked(engine_->lock);
  check_open("wait_load");
  if (phase_ != Phase::kLoading && phase_ != Phase::kLoaded) {
    refuse("wait_load", "no load was launched", "launch_load() first");
  }
  for (const EntryPtr& entry : living()) {
    const TicketPtr arrival = entry->arrival();
    if (!arrival || !entry->storage()) {
      continue;
    }
    locked.unlock();
    try {
      const WithoutGil without_gil;
      arrival->wait();
    } catch (const TransferError& error) {
      throw LostBytes("group '" + name +
                      "': a saved tensor cannot be brought back: " + error.what());
    }
    locked.lock();
  }
  phase_ = Phase::kLoaded;
}

void Batch::join(const EntryPtr& entry) {
  if (joined_.insert(entry).second) {
    entries_.push_back(entry);
  }
}

void Batch::notice_demand(const EntryPtr& entry) {
  bool missing = false;
  {
    const Locked locked(engine_->lock);
    if (!first_in_backward(*entry)) {
      return;
    }
    missing = !entry->storage() && entry->identity().expired();
  }
  if (on_demand) {
    on_demand();
  }
  const Locked locked(engine_->lock);
  if (missing && entry->storage()) {
    ++engine_->ledger.counters.stalls;  // it was asked for only now, together with others
  }
}

// Whether a backward pass demands something of the batch for the first time.
bool Batch::first_in_backward(const Entry& entry) {
  const int number = number_of_backward();
  if (read_by_ == number) {
    return false;
  }
  read_by_ = number;
  if (entry.state() == State::kAway && entry.fetched() && !entry.away()->recomputes()) {
    phase_ = Phase::kOffloaded;  // every save has seen it: it has been let go of
  }
  return true;
}

void Batch::check_open(const char* call) const {
  if (closed_) {
    refuse(call, "the group was closed", "a new Group");
  }
}

void Batch::refuse(const char* call, const char* found, const char* expected) const {
  throw BatchError("group '" + name + "': " + call + "() is not possible now: " + found +
                   "; call " + expected + ". (The batch is " + word_of(phase_) + ".)");
}

}  // namespace memswap
