#include "iteration.h"

#include <algorithm>
#include <iterator>
#include <span>
#include <stdexcept>

namespace memswap {

// [Note: Prefetched bytes]
// Backward demands the storages that were saved last first, so whatever leaves last would have to
// be back at once: at the moment of the peak it frees nothing. What is demanded first, up to so
// many bytes, therefore stays, and from then on whatever lies within so many bytes ahead of the
// latest demand is on its way back. One number bounds both, so a peak holds it once and not twice.
// Decoding takes a fraction of the time of a transfer, and what is encoded on the device frees only
// a part of its bytes, so for those the number is smaller. Where decodes wait for operators to run
// beside, it is as large as these would have needed it in the last backward ([Note: Bytes ahead]),
// within a share of what is encoded.

namespace {

// A share of an iteration's bytes, and never less than its largest storage.
constexpr double kPrefetchShare = 1.0 / 8;
// The same for bytes that are encoded where they are; and the largest storage comes with the small
// ones around it (the weight beside the input of a matrix product).
constexpr double kDecodeShare = 1.0 / 32, kDecodeSlack = 1.25;
// Of the bytes that are encoded where they are, those that may be decoded at a time for operators
// to hide it: what frames free of them is given up.
constexpr double kMostDecodedShare = 1.0 / 4;

}  // namespace

// --- saving --------------------------------------------------------------------------------------

Reason Iteration::admit(int64_t nbytes, bool decoded, int64_t group) {
  const size_t index = size();
  groups_.push_back(group);
  entries_.emplace_back();
  order_.save(nbytes, decoded);
  return verdict(index, nbytes);
}

// An iteration whose storages are other ones is predicted by nobody from there on.
Reason Iteration::verdict(size_t index, int64_t nbytes) {
  if (!forecast_) {
    return nullptr;
  }
  if (!forecast_->expects(index, nbytes)) {
    forecast_.reset();
    return nullptr;
  }
  switch (forecast_->verdicts[index]) {
    case Forecast::Verdict::kNone:
      break;
    case Forecast::Verdict::kNeededAtOnce:
      return reasons::kNeededAtOnce;
    case Forecast::Verdict::kNeverFreed:
      never_freed_.insert(index);
      return reasons::kNeverFreed;
  }
  return nullptr;
}

std::optional<int64_t> Iteration::frame_held_at_peak(size_t index) const {
  // A user who has nothing brought back ahead wants nothing to stay when the forward ends.
  const bool none_stays = given_prefetch_bytes_ == 0;
  if (none_stays || !forecast_) {
    return std::nullopt;
  }
  const auto found = forecast_->held_at_peak.find(index);
  return found == forecast_->held_at_peak.end() ? std::nullopt : std::optional(found->second);
}

void Iteration::look_at_released() {
  if (released_.empty()) {
    return;
  }
  std::vector<size_t> looked_at;
  looked_at.swap(released_);
  for (const size_t index : looked_at) {
    const EntryPtr of = entry(index);
    if (of && of->lingers()) {
      released_.push_back(index);
    }
  }
}

void Iteration::look_at_never_freed(const Entry& entry) {
  if (!order_.was_demanded(entry.index()) && never_freed_.contains(entry.index()) &&
      entry.held_by_handles_only()) {
    never_freed_.erase(entry.index());
  }
}

void Iteration::look_at_held() {
  const std::vector<size_t> held = at_peak.held();
  for (const size_t index : held) {
    const EntryPtr entry = this->entry(index);
    if (!entry || entry->held_by_handles_only()) {
      at_peak.let_go(index);
    }
  }
}

void Iteration::place(const EntryPtr& entry) {
  if (entry->iteration() || entries_.empty() || !entries_.back().expired()) {
    throw std::invalid_argument(
        "place needs an entry without an iteration, for what was admitted last");
  }
  entries_.back() = entry;
  entry->place_in(shared_from_this(), entries_.size() - 1);
}

// --- demanding -----------------------------------------------------------------------------------

std::vector<EntryPtr> Iteration::demand(size_t index) {
  std::vector<EntryPtr> entries;
  if (!order_.demand(index)) {
    return entries;
  }
  const std::shared_ptr<const Plan> plan = course.plan();  // which `coming` is a part of
  const auto coming =
      returns_as_planned() ? std::span(course.place(index)->fetches) : next_to_prefetch(index);
  postponed_.insert(postponed_.end(), coming.begin(), coming.end());
  int64_t nbytes = 0;
  auto next = postponed_.begin();
  for (; next != postponed_.end(); ++next) {
    EntryPtr entry = to_bring(*next);
    if (!entry) {
      continue;
    }
    if (course.limit_bytes() != 0) {  // a plan has room for its own sizes; these may be larger
      nbytes += entry->returning_nbytes();
      if (entry->counters().resident_bytes + nbytes > course.limit_bytes()) {
        break;
      }
    }
    entries.push_back(std::move(entry));
  }
  postponed_.erase(postponed_.begin(), next);
  return entries;
}

void Iteration::postpone(std::span<const EntryPtr> entries) {
  std::vector<size_t> places;
  for (const EntryPtr& entry : entries) {
    places.push_back(entry->index());
  }
  postponed_.insert(postponed_.begin(), places.begin(), places.end());
}

// The places that come back next, where no plan says which.
std::span<const size_t> Iteration::next_to_prefetch(size_t index) {
  if (!order_.expects_all()) {
    if (forecast_ && forecast_->sizes.size() == size()) {
      order_.expect(forecast_->order, forecast_->prefetch_bytes);
    } else {
      order_.expect(first_guess(groups_), prefetch_bytes());
    }
  }
  return order_.advance(index);
}

// The entry at a place that has not been demanded yet; or nullptr.
EntryPtr Iteration::to_bring(size_t index) const {
  return order_.was_demanded(index) ? nullptr : entry(index);
}

// --- under a plan --------------------------------------------------------------------------------

std::optional<int64_t> Iteration::frame_nbytes(size_t index) const {
  const Plan::Place* const place = course.place(index);
  return place != nullptr ? place->frame_nbytes : std::nullopt;
}

// --- what is known of it -------------------------------------------------------------------------

int64_t Iteration::present_bytes(int64_t granularity) const {
  const auto rounded = [granularity](int64_t one) {
    return (one + granularity - 1) / granularity * granularity;
  };
  int64_t nbytes = 0;
  for (const std::weak_ptr<Entry>& weak : entries_) {
    const EntryPtr entry = weak.lock();
    if (!entry) {
      continue;
    }
    if (!entry->identity().expired()) {
      nbytes += rounded(entry->nbytes());
    }
    if (const AwayFormPtr& away = entry->away()) {
      nbytes += rounded(static_cast<int64_t>(away->device_nbytes()));
    }
  }
  return nbytes;
}

bool Iteration::mostly_alive() const {
  int64_t alive_bytes = 0;
  for (size_t index = 0; index < size(); ++index) {
    alive_bytes += entries_[index].expired() ? 0 : order_.nbytes(index);
  }
  return 2 * alive_bytes > nbytes();
}

std::vector<StorageRefPtr> Iteration::present() const {
  std::vector<StorageRefPtr> found;
  for (const std::weak_ptr<Entry>& weak : entries_) {
    if (const EntryPtr entry = weak.lock()) {
      if (auto held = entry->identity().lock()) {
        found.push_back(std::move(held));
      }
    }
  }
  return found;
}

std::vector<StorageRefPtr> Iteration::returning() const {
  std::vector<StorageRefPtr> found;
  for (const std::weak_ptr<Entry>& weak : entries_) {
    const EntryPtr entry = weak.lock();
    if (entry && entry->state() == State::kReturning) {
      found.push_back(entry->storage());
    }
  }
  return found;
}

bool Iteration::over() const {
  return std::all_of(entries_.begin(), entries_.end(),
                     [](const std::weak_ptr<Entry>& entry) { return entry.expired(); });
}

int64_t Iteration::prefetch_bytes() const {
  return forecast_ ? forecast_->prefetch_bytes : own_prefetch_bytes();
}

int64_t Iteration::own_prefetch_bytes() const {
  if (given_prefetch_bytes_) {
    return *given_prefetch_bytes_;
  }
  const double most = static_cast<double>(order_.decoded().nbytes) * kMostDecodedShare;
  const double hidden = std::min(static_cast<double>(order_.bytes_ahead()), most);
  return std::max(least_prefetch_bytes(), static_cast<int64_t>(hidden));
}

int64_t Iteration::least_prefetch_bytes() const {
  if (given_prefetch_bytes_) {
    return *given_prefetch_bytes_;
  }
  const DemandOrder::Share &raw = order_.raw(), &decoded = order_.decoded();
  const double shares = static_cast<double>(raw.nbytes) * kPrefetchShare +
                        static_cast<double>(decoded.nbytes) * kDecodeShare;
  return static_cast<int64_t>(std::max(
      {static_cast<double>(raw.most), static_cast<double>(decoded.most) * kDecodeSlack, shares}));
}

int64_t Iteration::leaving_bytes() const {
  return std::max({prefetch_bytes(), order_.raw().most, order_.decoded().most});
}

Forecast Iteration::predicts(int64_t prefetch_bytes) const {
  const std::vector<size_t> places(never_freed_.begin(), never_freed_.end());
  Forecast made(order_, places, prefetch_bytes);
  made.held_at_peak = at_peak.best();
  return made;
}

// --- timeline ------------------------------------------------------------------------------------

IterationPtr Timeline::begin() {
  const auto latest = std::find_if(recent_.rbegin(), recent_.rend(),
                                   [](const IterationPtr& one) { return one->began_backward(); });
  if (latest != recent_.rend() && *latest != forecast_of_.lock()) {
    forecast_ = std::make_shared<Forecast>((*latest)->predicts((*latest)->own_prefetch_bytes()));
    forecast_of_ = *latest;
  }
  auto made = std::make_shared<Iteration>(forecast_, prefetch_bytes);
  recent_.push_back(made);
  if (recent_.size() > kRecent) {
    recent_.pop_front();
  }
  return made;
}

std::vector<size_t> first_guess(const std::vector<int64_t>& groups) {
  std::vector<size_t> order;
  for (size_t end = groups.size(); end > 0;) {
    size_t begin = end - 1;
    while (begin > 0 && groups[begin] != Iteration::kNoGroup &&
           groups[begin - 1] == groups[begin]) {
      --begin;
    }
    for (size_t index = begin; index < end; ++index) {
      order.push_back(index);
    }
    end = begin;
  }
  return order;
}

}  // namespace memswap
