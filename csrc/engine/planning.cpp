#include "planning.h"

#include <memory>

#include "engine.h"
#include "plan.h"
#include "recorder.h"
#include "windows.h"
#include "work/ticket.h"

namespace memswap {

Planning::Planning(Engine& engine) : engine_(engine), in_use_(engine.ledger.counters) {}

void Planning::set_directed(bool directed) {
  directed_ = directed;
  if (!directed) {  // nobody looks any more which of them are gone
    in_use_.clear();
  }
}

// The peak of an iteration counts what is resident now, and so many bytes more.
void Planning::note_peak(Iteration& of, int64_t more_bytes) const {
  of.course.note_resident(engine_.ledger.counters.resident_bytes + more_bytes);
}

// Orders the caller behind the send of an iteration's storage, if it is leaving or waits to.
void Planning::release(Iteration& of, size_t index) {
  const EntryPtr entry = of.entry(index);
  if (!entry) {
    return;
  }
  if (engine_.windows) {
    engine_.windows->hurry(entry);
  }
  if (entry->state() != State::kLeaving) {
    return;
  }
  wait_ignoring_failure(entry->departure());
  if (entry->lingers()) {
    of.note_released(index);
  }
}

void Planning::make_room(Iteration& of, size_t index) {
  release(of, index);
  if (const EntryPtr entry = of.entry(index)) {
    entry->release_frame();
  }
}

void Planning::after_save(const EntryPtr& entry) {
  const IterationPtr of = entry->iteration();
  const std::shared_ptr<const Plan> plan = of->course.plan();  // alive while others run
  if (const Plan::Place* const place = of->course.place(entry->index())) {
    for (const size_t released : place->releases) {
      release(*of, released);
    }
    for (const size_t departed : place->departures) {
      if (const EntryPtr other = of->entry(departed)) {
        other->release_frame();
      }
    }
  }
  if (plan) {
    note_peak(*of);
  }
  if (of->recorder()) {
    of->recorder()->saved(entry);
    of->recorder()->recomputed(in_use_.others_nbytes());
  }
}

void Planning::begin_streak(int64_t forwards, size_t in_flight, int64_t leaving_bytes) {
  streak_.emplace(engine_.iteration(), Streak::Terms{forwards, in_flight, leaving_bytes});
}

std::optional<int64_t> Planning::extend_streak() {
  if (!streak_ || !streak_->extend(engine_.iteration())) {
    return std::nullopt;
  }
  sweep_in_use(streak_->in_flight() > 1);
  return streak_->terms.leaving_bytes;
}

std::optional<Streak::Seen> Planning::end_streak() {
  if (!streak_) {
    return std::nullopt;
  }
  const auto seen = std::make_optional(streak_->end());
  streak_.reset();
  return seen;
}

void Planning::before_demand(const EntryPtr& entry) {
  const IterationPtr& of = entry->iteration();
  backward_ = of;
  in_use_.sweep();
  if (!of->began_backward()) {
    of->course.begin_backward(of->size(), engine_.ledger.counters.away_bytes);
  }
  if (of->course.follows_plan()) {
    of->look_at_released();  // what the forward held to its end has gone by now
  }
  if (of->recorder()) {
    of->recorder()->demanding(*entry);
  }
}

bool Planning::after_demand(const EntryPtr& entry) const {
  Iteration& of = *entry->iteration();
  if (!of.course.follows_plan()) {
    return false;
  }
  note_peak(of);
  const Plan::Place* const place = of.course.place(entry->index());
  return place != nullptr && place->departs;
}

void Planning::record_demand(const EntryPtr& entry) const {
  Iteration& of = *entry->iteration();
  if (!of.recorder()) {
    return;
  }
  of.recorder()->demanded(*entry);
  if (of.returns_as_planned()) {
    of.recorder()->returning(of, of.course.place(entry->index())->fetches);
  }
  of.recorder()->recomputed(in_use_.others_nbytes());
}

void Planning::count_recomputed(const StorageRef& storage) {
  const void* const key = storage.storage.unsafeGetStorageImpl();
  if (!engine_.ledger.counts(key) && in_use_.add(storage) && backward_) {
    note_peak(*backward_);
    if (backward_->recorder()) {
      backward_->recorder()->recomputed(in_use_.others_nbytes());
    }
  }
}

void Planning::count_in_use(Entry& entry) {
  if (directed_ && entry.iteration()) {
    in_use_.add(entry);
  }
}

void Planning::sweep_in_use(bool in_flight) { in_flight ? in_use_.sweep() : in_use_.clear(); }

void Planning::count_made(int64_t nbytes) {
  engine_.ledger.counters.set_made(nbytes);
  if (backward_ && runs_backward()) {
    note_peak(*backward_);
  }
}

void Planning::note_window(double seconds) const {
  // No forward has begun since: it is the backward's.
  const bool in_backward =
      backward_ && backward_->began_backward() && engine_.iteration()->size() == 0;
  const Iteration& of = in_backward ? *backward_ : *engine_.iteration();
  if (of.recorder()) {
    of.recorder()->window(seconds);
  }
}

}  // namespace memswap
