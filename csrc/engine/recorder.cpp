#include "recorder.h"

#include <algorithm>

#include "engine.h"

namespace memswap {

namespace {

// Storages that one operator asks for in a row.
constexpr int32_t kMostAsked = 8;

// Whether operators are seen to hold a storage that backward was given. What its entry holds, or a
// send, may be held for that alone.
bool is_in_use(const Entry& entry) {
  return !entry.storage() && entry.state() != State::kLeaving && !entry.identity().expired() &&
         !entry.held_by_handles_only();
}

// What was taken down of the first `saves` storages when they were chosen: the save of one that
// came after them broke off.
void cut(IterationRecord& columns, size_t saves) {
  columns.units.resize(saves);
  columns.ordinals.resize(saves);
  columns.nbytes.resize(saves);
  columns.dtypes.resize(saves);
  columns.actions.resize(saves);
}

int32_t or_never(const std::optional<int32_t>& mark, int32_t final) {
  return mark ? std::min(*mark, final) : kNever;
}

}  // namespace

void Recorder::Seen::look_at_use(const Entry& of) {
  used_up = used_up || (!of.storage() && of.identity().expired());
}

Recorder::Recorder(Clock clock) : clock_(std::move(clock)) {
  opening_ = now();
  began_ = opening_;
}

// --- marks ---------------------------------------------------------------------------------------

void Recorder::choose(const Chosen& chosen) {
  arrive();
  look();
  cut(columns_, seen_.size());
  columns_.units.push_back(unit_number(chosen.unit));
  columns_.ordinals.push_back(chosen.ordinal);
  columns_.nbytes.push_back(chosen.nbytes);
  columns_.dtypes.push_back(chosen.dtype);
  columns_.actions.push_back(chosen.action);
  chose_ = true;
  began_ = now();
}

void Recorder::saved(const EntryPtr& entry) {
  if (!std::exchange(chose_, false) || entry->index() != seen_.size() ||
      seen_.size() != moments_.size()) {
    broken_ = true;
  }
  if (broken_) {
    return;
  }
  const size_t index = entry->index();
  add_mark(began_);
  Seen seen;
  seen.entry = entry;
  seen_.push_back(std::move(seen));
  columns_.moved.push_back(entry->away() ? 1 : 0);
  columns_.for_recipe.push_back(entry->for_recipe() ? 1 : 0);
  columns_.others.emplace_back();
  held_.push_back(index);
  sent_.push_back(index);
  note_bytes(*entry);
  note_lane(*entry);
  regions_.saved(*entry);
  links_.sent(*entry);
  depart();
}

void Recorder::demanding(const Entry& entry) {
  if (demand_of_this_thread() != demands_.end()) {
    return;
  }
  demands_.push_back({std::this_thread::get_id(), entry.index(), nullptr});
  arrive();
  if (entry.index() < seen_.size() && seen_[entry.index()].demanded) {
    seen_[entry.index()].look_at_use(entry);
    return;
  }
  if (columns_.order.empty()) {
    look();
  }
  demands_.back().began = now();
  look_at_served();
}

void Recorder::demanded(const Entry& entry) {
  const size_t index = entry.index();
  const auto demand = demand_of_this_thread();
  if (demand == demands_.end() || demand->index != index) {
    return;
  }
  const MomentPtr began = std::move(demand->began);
  demands_.erase(demand);
  if (broken_ || index >= seen_.size()) {
    broken_ = true;
    return;
  }
  if (workspace) {
    workspace->count_returning();
  }
  Seen& seen = seen_[index];
  if (!seen.demanded) {
    seen.demanded = true;
    columns_.order.push_back(index);
    add_mark(began);
  }
  seen.kept_until = next_mark() - 1;
  if (!seen.used_up) {
    seen.last_demand = seen.kept_until;
  }
  seen.marks_since = 0;
  if (!seen.served) {
    seen.served = true;
    served_.push_back(index);
  }
  note_bytes(entry);
  depart();
}

void Recorder::arrive() {
  if (workspace) {
    workspace->arrive();
  }
}

void Recorder::depart() {
  if (workspace && marks() > 0) {
    workspace->depart(marks() - 1);
  }
}

MomentPtr Recorder::now() {
  MomentPtr moment = clock_.now();
  broken_ = broken_ || moment == nullptr;
  return moment;
}

void Recorder::add_mark(const MomentPtr& began) { moments_.emplace_back(began, now()); }

std::vector<Recorder::Demand>::iterator Recorder::demand_of_this_thread() {
  return std::ranges::find(demands_, std::this_thread::get_id(), &Demand::thread);
}

void Recorder::note_bytes(const Entry& entry) {
  columns_.peak_bytes =
      std::max(columns_.peak_bytes, entry.engine()->ledger.counters.resident_bytes);
}

// --- what happens at them ------------------------------------------------------------------------

void Recorder::again(const Entry& entry, std::string_view unit) {
  if (entry.index() >= seen_.size()) {
    return;
  }
  const size_t number = unit_number(unit);
  std::vector<size_t>& others = columns_.others[entry.index()];
  if (number != columns_.units[entry.index()] &&
      std::ranges::find(others, number) == others.end()) {
    others.push_back(number);
  }
}

void Recorder::window(double seconds) {
  columns_.windows_s.resize(std::max(columns_.windows_s.size(), marks() + 1));
  columns_.windows_s[marks()] += seconds;
}

void Recorder::recomputed(int64_t nbytes) {
  if (marks() == 0 || nbytes == 0) {
    return;
  }
  columns_.extra_nbytes.resize(marks());
  columns_.extra_nbytes.back() = std::max(columns_.extra_nbytes.back(), nbytes);
}

size_t Recorder::unit_number(std::string_view unit) {
  const auto [found, added] =
      unit_numbers_.try_emplace(std::string(unit), columns_.unit_names.size());
  if (added) {
    columns_.unit_names.emplace_back(unit);
  }
  return found->second;
}

// Notices which storages the graph has let go of since the last mark. An operator that saved
// several storages asks for one after another and uses them together; the recomputation of a
// checkpoint region may hold what it was given for longer ([Note: In use] in in_use.h). A graph
// that is retained, or the frame of a region, has storages for longer than anybody uses them.
void Recorder::look_at_served() {
  const int32_t mark = next_mark();
  std::erase_if(served_, [&](size_t index) {
    Seen& seen = seen_[index];
    const EntryPtr entry = seen.entry.lock();
    if (!entry) {
      seen.served = false;
      return true;
    }
    seen.kept_until = mark;
    seen.look_at_use(*entry);
    if (!seen.used_up && (seen.marks_since < kMostAsked || is_in_use(*entry))) {
      seen.last_demand = mark;
    }
    ++seen.marks_since;
    return false;
  });
}

// Notices which storages the forward has let go of since the last mark.
void Recorder::look() {
  const int32_t mark = next_mark();
  const std::unordered_set<size_t> owned = owned_by_sends();
  std::erase_if(held_, [&](size_t index) {
    Seen& seen = seen_[index];
    const EntryPtr entry = seen.entry.lock();
    const StorageRefPtr storage = entry ? entry->identity().lock() : nullptr;
    if (!storage) {
      seen.held_until = seen.let_go.value_or(mark);
      return true;
    }
    const bool sends = owned.contains(index);
    // Ours are: the reference just taken, handles of a tensor that stayed, the storage's send, and
    // an encode that waits for a window.
    const int64_t ours = 1 + entry->keeps() + (sends ? 1 : 0) + (entry->storage() ? 1 : 0);
    const bool held = static_cast<int64_t>(storage->storage.use_count()) > ours;
    if (held) {
      seen.let_go.reset();
    } else if (!seen.let_go) {
      // A worker may have let go of it since we asked, and somebody else hold it: what is seen now
      // counts if it is still so when the send has ended.
      seen.let_go = mark;
    }
    if (held || sends) {
      return false;
    }
    seen.held_until = seen.let_go;
    return true;
  });
}

// The storages that sends under way hold. A lane lets go of its sends in their order, whether the
// host knows that they ended or not.
std::unordered_set<size_t> Recorder::owned_by_sends() {
  std::unordered_set<size_t> owned;
  std::vector<size_t> still;
  int64_t room = leaving_bytes();
  for (auto latest = sent_.rbegin(); latest != sent_.rend(); ++latest) {
    const EntryPtr entry = seen_[*latest].entry.lock();
    if (!entry || entry->state() != State::kLeaving) {
      continue;
    }
    const TicketPtr departure = entry->departure();
    if (!departure || departure->done()) {
      continue;
    }
    still.push_back(*latest);
    room -= entry->nbytes();
    if (room >= 0) {
      owned.insert(*latest);
    }
  }
  sent_.assign(still.rbegin(), still.rend());
  return owned;
}

// By which lane a storage is sent.
void Recorder::note_lane(const Entry& entry) {
  if (AnyLanePtr lane = entry.away() ? entry.away()->sent_by() : nullptr) {
    lanes_.insert(std::move(lane));
  }
}

int64_t Recorder::leaving_bytes() const {
  size_t nbytes = 0;
  for (const auto& lane : lanes_) {
    nbytes += lane->leaving_bytes();
  }
  return static_cast<int64_t>(nbytes);
}

// --- its end -------------------------------------------------------------------------------------

void Recorder::close() {
  if (closed_) {
    return;
  }
  closed_ = true;
  end_ = now();
  lanes_.clear();  // whoever reads the record holds no lane
}

void Recorder::wait() const {
  if (end_) {
    end_->wait();
  }
}

std::optional<IterationRecord> Recorder::take() const {
  if (broken_ || !closed_ || !demands_.empty() ||
      seen_.size() + columns_.order.size() != moments_.size()) {
    return std::nullopt;
  }
  IterationRecord record = columns_;
  cut(record, seen_.size());
  if (!record.windows_s.empty()) {
    record.windows_s.resize(marks());
  }
  if (!record.extra_nbytes.empty()) {
    record.extra_nbytes.resize(marks());
  }
  // A mark that was begun may not have come to be.
  const int32_t final = next_mark() - 1;
  for (const Seen& seen : seen_) {
    const std::optional<int32_t>& held_until = seen.let_go ? seen.let_go : seen.held_until;
    record.held_until.push_back(held_until.value_or(kNever));
    record.last_demand.push_back(or_never(seen.last_demand, final));
    record.kept_until.push_back(or_never(seen.kept_until, final));
  }
  fill_times(record);
  record.regions = regions_.found();
  record.sends = links_.sends();
  record.fetches = links_.fetches();
  return record;
}

void Recorder::fill_times(IterationRecord& record) const {
  const Moment* before = opening_.get();
  for (const auto& [begin, end] : moments_) {
    record.gaps_s.push_back(seconds_between(*before, *begin));
    record.costs_s.push_back(seconds_between(*begin, *end));
    before = end.get();
  }
  record.tail_s = seconds_between(*before, *end_);
}

}  // namespace memswap
