// How an engine follows a plan: for as long as what is saved is what the plan expects, nobody is
// asked.
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

#include "engine.h"
#include "windows.h"

namespace memswap {

namespace {

// A plan serves storages that are smaller by a quarter at most.
bool fits(int64_t nbytes, int64_t planned) {
  return nbytes <= planned && 4 * nbytes >= 3 * planned;
}

// The place of a storage in a plan, if it is the one that is expected now.
const Plan::Place* place_of(const Plan& plan, size_t index, const Offer& offer) {
  if (index >= plan.places.size()) {
    return nullptr;
  }
  const Plan::Place& place = plan.places[index];
  const SavedView& look = offer.look;
  const auto nbytes = static_cast<int64_t>(look.storage_nbytes());
  if (place.action == Plan::Action::kAsk || !fits(nbytes, place.nbytes) ||
      place.ordinal != offer.ordinal + 1 || nbytes < plan.least_bytes ||
      look.device() != plan.device || look.edited_part() || look.part_of_data() ||
      place.dtype != offer.tensor.scalar_type() || place.unit != offer.unit) {
    return nullptr;
  }
  return &place;
}

// What comes next comes after the end of a send. One that failed gives the storage back, which its
// entry notices.
void wait_for_departure(const TicketPtr departure) {
  try {
    departure->wait();
  } catch (const TransferError&) {
  }
}

}  // namespace

void Engine::note_peak(Iteration& of, int64_t more_bytes) const {
  of.peak_bytes = std::max(of.peak_bytes, ledger.counters.resident_bytes + more_bytes);
}

void Engine::look_at_released(Iteration& of) {
  if (of.released.empty()) {
    return;
  }
  std::vector<size_t> looked_at;
  looked_at.swap(of.released);
  for (const size_t index : looked_at) {
    const EntryPtr entry = of.entry(index);
    if (entry && entry->lingers()) {
      of.released.push_back(index);
    }
  }
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
  wait_for_departure(entry->departure());
  if (entry->lingers()) {
    of.released.push_back(index);
  }
}

void Engine::saved(const EntryPtr& entry) {
  const IterationPtr of = entry->iteration;
  const std::shared_ptr<const Plan> plan = of->plan;
  if (plan && entry->index < plan->places.size()) {
    const Plan::Place& place = plan->places[entry->index];
    for (const size_t released : place.releases) {
      release(*of, released);
    }
    for (const size_t departed : place.departures) {
      if (const EntryPtr other = of->entry(departed)) {
        other->release_frame();
      }
    }
  }
  note_peak(*of);
}

Saved Engine::follow_plan(const Offer& offer) {
  if (!directed || watched) {
    return {};
  }
  const IterationPtr of = iteration;
  const std::shared_ptr<const Plan> plan = of->plan;
  if (!plan || !of->follows_alone || of->began_backward()) {
    return {};
  }
  const Plan::Place* const place = place_of(*plan, of->size(), offer);
  const auto nbytes = static_cast<int64_t>(offer.look.storage_nbytes());
  const bool room =
      of->limit_bytes == 0 || ledger.counters.resident_bytes + nbytes <= of->limit_bytes;
  if (place == nullptr || !room || ledger.knows(offer.look.storage_key()) ||
      torch::autograd::get_current_graph_task_id() != -1 || (plan->refrains && plan->refrains())) {
    return {};
  }
  departing.notice_some();
  learn();
  look_at_released(*of);
  ++offer.ordinal;
  const char* const why = of->admit(nbytes, false, offer.group);
  const bool never_freed = why == Iteration::kNeverFreed;
  StorageRefPtr storage;
  const EntryPtr entry = make_entry(offer.tensor, offer.look, storage);
  Saved made{Saved::As::kKept, entry};
  if (place->action == Plan::Action::kSwap && !never_freed) {
    if (entry->swap(*plan->sender, storage)) {
      departing.add(entry.get());
      made.as = Saved::As::kMoved;
    } else {
      host->no_room();
      ledger.keep(refused(BlockForm::kShortOf, plan->sender->why_refused(), *entry), nbytes);
    }
  } else {
    ledger.keep(place->action == Plan::Action::kSwap ? why : kPlanned, nbytes);
  }
  storage.reset();
  saved(entry);
  return made;
}

bool Engine::director_hears(const Entry& entry) const {
  const IterationPtr& of = entry.iteration;
  return watched || !of || of != backward || !of->follows_alone || !of->plan;
}

// What follows a demand that was served, where there is a plan.
void Engine::served(Entry& entry) {
  if (!entry.iteration || !entry.iteration->plan) {
    return;
  }
  Iteration& of = *entry.iteration;
  // What every save has seen is counted as away, while its last consumer still holds it.
  note_peak(of, entry.state() == State::kAway ? entry.nbytes() : 0);
  const std::shared_ptr<const Plan> plan = of.plan;
  if (entry.index < plan->places.size() && plan->places[entry.index].departs) {
    entry.release_frame();
  }
}

}  // namespace memswap
