// What becomes of a tensor that autograd saves: its storage is known already, or too small, or new;
// then a plan, the policy or who directs says what is done with it, and it leaves.

#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <optional>
#include <string>
#include <utility>

#include "batch.h"
#include "engine.h"
#include "lowest_peak.h"
#include "reasons.h"
#include "recipe_host.h"
#include "recipes.h"
#include "recorder.h"

namespace memswap {

namespace {

Form form_of(Action action) {
  switch (action) {
    case Action::kEncode:
      return Form::kFrame;
    case Action::kEncodeSwap:
      return Form::kPooledFrame;
    default:
      return Form::kBlock;
  }
}

// Whether make_fx records operators now. It knows tensors by who they are: what came back in their
// place would be a constant of the recording, with the bytes of now.
bool is_traced() {
  using c10::impl::TorchDispatchModeKey;
  return c10::impl::TorchDispatchModeTLS::get_mode(TorchDispatchModeKey::PROXY).has_value();
}

}  // namespace

Reason why_fixed(const SavedView& view) {
  if (view.private_format()) {
    return reasons::kPrivateFormat;
  }
  return is_traced() ? reasons::kTraced : nullptr;
}

SaveResult Engine::keep(const SavedView& view, std::string_view reason) {
  ledger.keep(reason, static_cast<int64_t>(view.storage_nbytes()));
  return {false, nullptr};
}

SaveResult Engine::stay(const SavedView& view, std::string_view reason) {
  ledger.keep(reason, static_cast<int64_t>(view.storage_nbytes()));
  return {false, Stay::make({shared_from_this(), &ledger}, view)};
}

EntryPtr Engine::make_entry(const SavedView& view, const StorageRef& storage, bool for_recipe) {
  EntryPtr made = Entry::make(shared_from_this(), view, storage, for_recipe);
  iteration_->place(made);
  return made;
}

Reason Engine::refused(Reason short_of, const std::string& why, const Entry& entry) {
  if (entry.iteration() && short_of == reasons::kPool) {
    entry.iteration()->course.note_refused(ledger.counters.away_bytes);
  }
  ledger.tell_once(short_of, "a storage of " + std::to_string(entry.nbytes()) + " bytes stays on " +
                                 entry.device().str() + ": " + why +
                                 ". Training goes on with less memory saved.");
  return short_of;
}

// Whether memory that no operator made may hold something else than in an earlier forward. A buffer
// that numpy fills for each batch counts no edits; what left took along the bytes of then, and a
// graph that nobody runs any more may keep them. (What shares tables and masks between its batches
// moves them once.)
bool Engine::refilled(const KnownPtr& known, const SavedView& view) const {
  if (schedule == Schedule::kBatches || view.computed()) {
    return false;
  }
  const EntryPtr entry = as_entry(known);
  return entry && entry->away() && entry->iteration() != iteration_;
}

// One more save of a storage that is known.
SaveResult Engine::save_again(const Offer& offer, const KnownPtr& known) {
  ++ledger.counters.deduplicated_tensors;
  ledger.counters.deduplicated_bytes += static_cast<int64_t>(offer.view.nbytes());
  const EntryPtr entry = as_entry(known);
  if (!entry) {
    return {false, known};
  }
  if (recipes_ && !offer.for_recipe) {
    recipes_->saved_again(offer.view);
  }
  if (const IterationPtr& of = entry->iteration(); of && of->recorder()) {
    of->recorder()->again(*entry, offer.scope.unit);
  }
  return {entry->moves(), known};
}

// A storage without a plan: the entry that stands for it already, or why it stays.
std::optional<SaveResult> Engine::look_up(const Offer& offer) {
  const SavedView& view = offer.view;
  const Ledger::Found found = ledger.find(view);
  if (found.conflicts) {
    return keep(view, reasons::kEditedInParts);
  }
  if (found.known && !refilled(found.known, view)) {
    return save_again(offer, found.known);
  }
  if (is_small(view)) {
    return keep(view, reasons::kSmall);
  }
  if (view.edited_part()) {
    return stay(view, reasons::kEditedInParts);
  }
  if (view.part_of_data()) {
    return keep(view, reasons::kPartOfData);
  }
  if (!offer.scope.covered) {
    return keep(view, reasons::kPolicy);
  }
  if (runs_backward()) {
    return keep(view, reasons::kSavedInBackward);
  }
  return std::nullopt;
}

// What the user's function says of a storage.
std::optional<Action> Engine::ask(const Offer& offer) {
  const Unlocked unlocked(lock);
  return host_->decide(*this, offer);
}

// A batch is an iteration, and its group has begun it.
SaveResult Engine::save(const Offer& offer) {
  const auto enter_batch = [&] {
    if (offer.batch != nullptr) {
      iteration_ = offer.batch->iteration;
    }
  };
  enter_batch();
  FoundRecipe recipe;
  std::optional<SaveResult> result =
      planning.directed() ? follow_plan(offer, recipe) : std::nullopt;
  if (!result) {
    result = look_up(offer);
  }
  if (!result) {
    std::optional<Action> action = offer.scope.action ? offer.scope.action : policy_.action;
    if (policy_.asks && !offer.scope.action) {
      action = ask(offer);
      enter_batch();
      result = look_up(offer);  // others may have saved it meanwhile
    }
    if (!result) {
      result = decide(offer, action, std::move(recipe));
    }
  }
  if (offer.batch != nullptr && result->moves) {
    offer.batch->join(as_entry(result->known));
  }
  return *std::move(result);
}

const TransfersPtr& Engine::transfers_from(c10::Device device) {
  for (const auto& [seen, transfers] : devices_) {
    if (seen == device) {
      return transfers;
    }
  }
  TransfersPtr opened = host_->open(*this, device, std::nullopt);
  if (opened) {
    // Transfers may outlive their engine, whose storages alone open senders.
    opened->set_opens([engine = weak_from_this(), device](Form form) {
      if (const EnginePtr alive = engine.lock()) {
        alive->host_->open(*alive, device, form);
      }
    });
  }
  return devices_.emplace_back(device, std::move(opened)).second;
}

// The action of a policy that names none: the one that suits the device.
Action Engine::default_action(const Transfers& by) {
  if (by.traits.action != Action::kRecompute) {
    return by.traits.action;
  }
  if (!policy_.recipes) {
    return by.traits.without_recipe;
  }
  open_recipes();
  return Action::kRecompute;
}

// `action`: of who saves or of the policy; nothing: what suits the device.
SaveResult Engine::decide(const Offer& offer, std::optional<Action> action, FoundRecipe recipe) {
  if (planning.directed()) {
    planning.sweep_in_use();
  }
  if (action == Action::kKeep && !planning.directed()) {
    return stay(offer.view, offer.scope.why_kept);
  }
  const TransfersPtr& by = transfers_from(offer.view.device());
  if (!by) {
    return keep(offer.view, reasons::kHostMemory);  // none of the device's bytes
  }
  if (by->captures()) {
    return keep(offer.view, reasons::kStreamCapture);
  }
  if (iteration_->began_backward()) {
    host_->begin_iteration(*this);
  }
  departing.notice_some();
  iteration_->look_at_held();
  iteration_->look_at_released();
  learn();
  ++offer.scope.ordinal;
  Action wanted = action ? *action : default_action(*by);
  if (!planning.directed()) {
    return admit(offer, by, {.action = wanted});
  }
  const bool may_learn =
      recipes_ && (wanted == Action::kRecompute || (!policy_.action && !policy_.asks));
  if (wanted == Action::kRecompute) {
    wanted = by->traits.without_recipe;
  }
  // The sources that a recipe saves come before its result, and have the places before it.
  if (may_learn && iteration_->learns_recipes() && planning.plans_sources()) {
    recipe = recipe_of(offer, kMostExtra, /*leaves=*/false);
  }
  const std::optional<Action> directions = host_->direct(*this, offer, wanted);
  return admit(offer, by,
               {.action = directions.value_or(wanted),
                .directed = directions.has_value(),
                .learns = may_learn && iteration_->learns_recipes(),
                .recipe = std::move(recipe)});
}

SaveResult Engine::admit(const Offer& offer, const TransfersPtr& by, Decision decision) {
  const auto nbytes = static_cast<int64_t>(offer.view.storage_nbytes());
  const bool recomputes = decision.action == Action::kRecompute;
  const Action action = recomputes ? by->traits.without_recipe : decision.action;
  Reason why = iteration_->admit(nbytes, action == Action::kEncode,
                                 offer.scope.group.value_or(Iteration::kNoGroup));
  if (action == Action::kKeep) {
    why = decision.directed ? reasons::kPlanned : offer.scope.why_kept.c_str();
  } else if (decision.directed && why != reasons::kNeverFreed) {
    why = nullptr;
  }
  auto storage = std::make_shared<StorageRef>(offer.tensor.storage());
  const EntryPtr entry = make_entry(offer.view, *storage, offer.for_recipe);
  const bool may_become_recipe = recomputes && why == nullptr;
  const bool is_recipe = (may_become_recipe || decision.learns) &&
                         becomes_recipe(entry, offer, may_become_recipe, decision.recipe);
  if (!is_recipe) {
    if (why == nullptr && action == Action::kEncode &&
        iteration_->frame_held_at_peak(entry->index())) {
      why = reasons::kHeldAtPeak;
    }
    if (why == nullptr) {
      why = send_as(action, offer, by, entry, storage);
    }
    if (why != nullptr) {
      ledger.keep(why, nbytes);
    }
  }
  storage.reset();  // its ticket's share is the last one
  if (planning.directed()) {
    planning.after_save(entry);
  } else if (schedule != Schedule::kBatches && !by->works_ahead()) {
    note_save(*entry, why == reasons::kHeldAtPeak);
  }
  return {.moves = is_recipe || why == nullptr, .known = entry};
}

// Tells the iteration how many bytes are there with a save ([Note: Held at the peak]).
void Engine::note_save(const Entry& entry, bool stays) {
  int64_t frame_nbytes = 0;
  if (stays) {
    frame_nbytes = *iteration_->frame_held_at_peak(entry.index());
  } else if (const AwayFormPtr& away = entry.away()) {
    frame_nbytes = static_cast<int64_t>(away->device_nbytes());
  }
  iteration_->at_peak.saved(entry.index(), entry.nbytes(), frame_nbytes, stays,
                            ledger.counters.most_lately());
}

Reason Engine::send_as(Action action, const Offer& offer, const TransfersPtr& by,
                       const EntryPtr& entry, const StorageRefPtr& storage) {
  if (action == Action::kSwap && schedule != Schedule::kBatches) {
    return send_raw(entry, storage, *by);
  }
  const TensorKey key{offer.scope.unit, offer.scope.ordinal, entry->nbytes(),
                      offer.tensor.scalar_type()};
  return leave(entry, storage, {by, form_of(action), key});
}

// `leaves`: whether a storage leaves as a recipe if it can, or its recipe is told.
Engine::FoundRecipe Engine::recipe_of(const Offer& offer, double most_extra, bool leaves) {
  if (!recipes_ || offer.for_recipe) {
    return std::make_shared<RecipeAnswer>();
  }
  const EngineRecipeHost::Saving saving(*recipes_, offer);
  return std::make_shared<RecipeAnswer>(recipes_->offer(
      std::make_shared<StorageRef>(offer.tensor.storage()), offer.view,
      {.unit = offer.scope.unit,
       .number = offer.number,
       .nbytes = static_cast<int64_t>(offer.view.storage_nbytes()),
       .dtype = offer.tensor.scalar_type()},
      {.most_extra = most_extra, .leaves = leaves, .planned = planning.directed()}));
}

// Whether an entry's storage leaves as a recipe. If not, the recipe may be on trial. `recipe`:
// nullptr: it is looked for here, where a plan may not have anything saved for it any more.
bool Engine::becomes_recipe(const EntryPtr& entry, const Offer& offer, bool leaves,
                            FoundRecipe recipe) {
  if (!recipe) {
    recipe = recipe_of(offer, planning.directed() ? 0 : kMostExtra, leaves);
  }
  RecipeAnswer& answer = *recipe;
  if (answer.leaving && schedule == Schedule::kBatches) {
    entry->hold(std::make_shared<StorageRef>(offer.tensor.storage()), std::move(*answer.leaving));
    return true;
  }
  if (answer.leaving) {
    depart(*entry, std::move(*answer.leaving));
    return true;
  }
  entry->try_recipe(std::move(answer.trial));
  if (answer.proven) {
    iteration_->note_proven(entry->index(), std::move(*answer.proven));
    return false;
  }
  if (leaves && planning.directed()) {
    iteration_->course.note_no_recipe(entry->index());
  }
  return false;
}

Reason Engine::send_raw(const EntryPtr& entry, const StorageRefPtr& storage, Transfers& by) {
  BlockSender& sender = *by.blocks();
  std::optional<Leaving> leaving = sender.send(storage);
  if (!leaving) {
    return refused(reasons::kPool, sender.why_refused(), *entry);
  }
  depart(*entry, std::move(*leaving));
  return nullptr;
}

void Engine::depart(Entry& entry, Leaving leaving) {
  entry.leave(std::move(leaving));
  departing.add(&entry);
}

}  // namespace memswap
