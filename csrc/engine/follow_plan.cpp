// How an engine follows a plan: for as long as what is saved is what the plan expects, nobody is
// asked.

#include <algorithm>
#include <utility>

#include "engine.h"
#include "lowest_peak.h"
#include "recipes.h"
#include "recorder.h"
#include "windows.h"

namespace memswap {

namespace {

// A plan serves storages that are smaller by a quarter at most.
bool fits(int64_t nbytes, int64_t planned) {
  return nbytes <= planned && 4 * nbytes >= 3 * planned;
}

// The place of a storage in a plan, if the plan expects it now: `index` is the place of the next
// save. The sources that its recipe is to save have the places before its own.
const Plan::Place* place_of(const Plan& plan, size_t index, const Offer& offer) {
  while (!offer.for_recipe && index < plan.places.size() && plan.places[index].for_recipe) {
    ++index;
  }
  if (index >= plan.places.size()) {
    return nullptr;
  }
  const Plan::Place& place = plan.places[index];
  const SavedView& view = offer.view;
  const auto nbytes = static_cast<int64_t>(view.storage_nbytes());
  if (!place.action || !fits(nbytes, place.nbytes) || place.ordinal != offer.scope.ordinal + 1 ||
      nbytes < plan.least_bytes || view.device() != plan.device || view.edited_part() ||
      view.part_of_data() || place.dtype != offer.tensor.scalar_type() ||
      place.for_recipe != offer.for_recipe || place.unit != offer.scope.unit) {
    return nullptr;
  }
  return &place;
}

}  // namespace

void Engine::note_peak(Iteration& of, int64_t more_bytes) const {
  of.course.note_resident(ledger.counters.resident_bytes + more_bytes);
}

void Engine::release(Iteration& of, size_t index) {
  const EntryPtr entry = of.entry(index);
  if (!entry) {
    return;
  }
  if (windows) {
    windows->hurry(entry);
  }
  if (entry->state() != State::kLeaving) {
    return;
  }
  wait_ignoring_failure(entry->departure());
  if (entry->lingers()) {
    of.note_released(index);
  }
}

void Engine::make_room(Iteration& of, size_t index) {
  release(of, index);
  if (const EntryPtr entry = of.entry(index)) {
    entry->release_frame();
  }
}

void Engine::after_save(const EntryPtr& entry) {
  const IterationPtr of = entry->iteration();
  const std::shared_ptr<const Plan> plan = of->course.plan();  // alive while users are warned
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
    of->recorder()->recomputed(recomputed_.nbytes());
  }
}

std::optional<SaveResult> Engine::follow_plan(const Offer& offer, FoundRecipe& recipe) {
  if (!offer.scope.covered || offer.scope.action) {
    return std::nullopt;
  }
  const IterationPtr of = iteration_;
  const std::shared_ptr<const Plan> plan = of->course.plan();
  if (!plan || policy_.asks || of->began_backward()) {
    return std::nullopt;
  }
  const Plan::Place* const place = place_of(*plan, of->size(), offer);
  const auto nbytes = static_cast<int64_t>(offer.view.storage_nbytes());
  // The sources of its recipe come first, and look for their own room.
  const bool is_next = place != nullptr && place == plan->places.data() + of->size();
  const bool room = !is_next || of->course.limit_bytes() == 0 ||
                    ledger.counters.resident_bytes + nbytes <= of->course.limit_bytes();
  // The first storage says what kind of iteration it is: another size may have its own plan.
  const bool is_known = place != nullptr && (of->size() > 0 || nbytes == place->nbytes);
  if (!is_known || !room || ledger.knows(offer.view.storage_key()) || runs_backward()) {
    return std::nullopt;
  }
  const TransfersPtr& by = transfers_from(plan->device);
  if (!by || by->captures()) {
    return std::nullopt;
  }
  departing.notice_some();
  learn();
  recomputed_.sweep();
  of->look_at_released();
  ++offer.scope.ordinal;
  if (*place->action == Action::kRecompute) {
    recipe = recipe_of(offer, is_next ? 0 : kMostExtra, /*leaves=*/true);
  }
  // Its recipe may not have saved the sources that it was to save: then whoever plans is asked.
  if (of->course.plan() != plan || place != plan->places.data() + of->size()) {
    --offer.scope.ordinal;
    return std::nullopt;
  }
  if (of->recorder()) {
    of->recorder()->choose(
        {offer.scope.unit, offer.scope.ordinal, nbytes, place->dtype, *place->action});
  }
  return admit(offer, by, {.action = *place->action, .directed = true, .recipe = recipe});
}

void Engine::begin_streak(int64_t forwards, size_t in_flight, int64_t leaving_bytes) {
  streak_.emplace(iteration_, Streak::Terms{forwards, in_flight, leaving_bytes});
}

std::optional<int64_t> Engine::extend_streak() {
  if (!streak_ || !streak_->extend(iteration_)) {
    return std::nullopt;
  }
  sweep_recomputed(streak_->in_flight() > 1);
  return streak_->terms.leaving_bytes;
}

std::optional<Streak::Seen> Engine::end_streak() {
  if (!streak_) {
    return std::nullopt;
  }
  const auto seen = std::make_optional(streak_->end());
  streak_.reset();
  return seen;
}

// Backward asks for a storage of an iteration that is directed, and has not waited for it yet.
void Engine::before_demand(const EntryPtr& entry) {
  const IterationPtr& of = entry->iteration();
  if (backward_ != of) {
    backward_ = of;
  }
  recomputed_.sweep();
  if (!of->began_backward()) {
    of->course.begin_backward(of->size(), ledger.counters.away_bytes);
  }
  if (of->course.follows_plan()) {
    of->look_at_released();  // what the forward held to its end has gone by now
  }
  if (of->recorder()) {
    of->recorder()->demanding(*entry);
  }
}

// Backward has the storage, in stream order.
void Engine::after_demand(const EntryPtr& entry) {
  Iteration& of = *entry->iteration();
  bool departs = false, recorded = false;
  {
    const Locked locked(lock);
    recorded = of.recorder() != nullptr;
    if (of.course.follows_plan()) {
      // A storage that every save has seen counts as away, but its last consumer still holds it.
      note_peak(of, entry->state() == State::kAway ? entry->nbytes() : 0);
      const Plan::Place* const place = of.course.place(entry->index());
      departs = place != nullptr && place->departs;
    }
  }
  if (departs) {
    entry->release_frame();
  }
  if (!recorded) {
    return;
  }
  const Locked locked(lock);
  if (of.recorder()) {
    of.recorder()->demanded(*entry);
    if (of.returns_as_planned()) {
      of.recorder()->returning(of, of.course.place(entry->index())->fetches);
    }
    of.recorder()->recomputed(recomputed_.nbytes());
  }
}

void Engine::count_recomputed(const StorageRef& storage) {
  if (recomputed_.add(storage) && backward_) {
    note_peak(*backward_);
    if (backward_->recorder()) {
      backward_->recorder()->recomputed(recomputed_.nbytes());
    }
  }
}

void Engine::sweep_recomputed(bool in_flight) {
  in_flight ? recomputed_.sweep() : recomputed_.clear();
}

void Engine::count_made(int64_t nbytes) {
  ledger.counters.set_made(nbytes);
  if (backward_ && runs_backward()) {
    note_peak(*backward_);
  }
}

void Engine::note_window(double seconds) const {
  // No forward has begun since: it is the backward's.
  const bool in_backward = backward_ && backward_->began_backward() && iteration_->size() == 0;
  const Iteration& of = in_backward ? *backward_ : *iteration_;
  if (of.recorder()) {
    of.recorder()->window(seconds);
  }
}

}  // namespace memswap
