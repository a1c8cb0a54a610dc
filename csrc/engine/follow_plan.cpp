// How an engine saves under a plan: for as long as what is saved is what the plan expects, nobody
// is asked.

#include "engine.h"
#include "lowest_peak.h"
#include "recipes.h"
#include "recorder.h"

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
  planning.sweep_in_use();
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

}  // namespace memswap
