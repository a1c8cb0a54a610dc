#include "recipes.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "storage/lend.h"

namespace memswap {
namespace {

// Whether everything that a recipe reads has the version of the call, and parameters their memory.
bool unchanged(const Step& step) {
  return all_sources(step, [](const Step::Input&, const KnownTensor& tensor) {
    const auto held = tensor.storage.lock();
    return !tensor.view.edited() && (!held || owns_memory(*held, tensor.view.end()));
  });
}

RecipeShapePtr shape_of(const Step& step) {
  auto shape = std::make_shared<RecipeShape>();
  for (const Step::Input& input : step.inputs) {
    shape->inputs.push_back(input.step ? shape_of(*input.step) : nullptr);
  }
  return shape;
}

// Bytes that are kept for a recipe alone.
double extra_nbytes(const Step& step) {
  double nbytes = 0;
  each_source(step, [&](const Step::Input& input, const KnownTensor& tensor) {
    nbytes += input.extra ? static_cast<double>(tensor.view.storage_nbytes()) : 0;
  });
  return nbytes;
}

}  // namespace

// What a trial reads.
class Recipes::Looked final : public Source {
 public:
  Looked(std::weak_ptr<Recipes> recipes, KnownTensor tensor)
      : recipes_(std::move(recipes)), tensor_(std::move(tensor)) {}

  at::Tensor tensor() override { return look(); }
  at::Tensor look() override {
    const auto recipes = recipes_.lock();
    if (!recipes) {
      throw TransferError("the engine of a recipe is gone");
    }
    return recipes->host_->look(tensor_);
  }

 private:
  const std::weak_ptr<Recipes> recipes_;
  const KnownTensor tensor_;
};

void Recipes::look_at_sources(Step& step) {
  each_source(step, [&](Step::Input& input, const KnownTensor& tensor) {
    input.source = std::make_shared<Looked>(weak_from_this(), tensor);
  });
}

void Recipes::begin_iteration() {
  choose();
  log_->clear();
  siblings_.clear();
  claims_.clear();
  offered_.clear();
}

void Recipes::before_edits(const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined() && tensor.has_storage()) {
      log_->before_edit(tensor);
    }
  }
}

// The last forward is over: what it would have done best is done from now on. See
// [Note: Chosen once a forward is known].
void Recipes::choose() {
  if (graph_) {
    RecipeChoices found;
    {
      const std::lock_guard lock(mutex_);
      const auto known = [&](const RecipePlace& place) {
        const auto row = places_.find(place);
        return row == places_.end() ? nullptr : &row->second;
      };
      found = graph_->choose(
          [&](const RecipePlace& place) {
            const Learnt* const learnt = known(place);
            return learnt == nullptr ? 0 : learnt->waited_nbytes;
          },
          [&](const RecipePlace& place) {
            const Learnt* const learnt = known(place);
            return learnt != nullptr && learnt->failed;
          });
    }
    if (choices_.places.size() + found.places.size() > options_.most_places) {
      choices_ = {};
    }
    for (auto& [place, choice] : found.places) {
      choices_.places.insert_or_assign(place, std::move(choice));
    }
    for (auto& [moment, holds] : found.holds) {
      std::vector<OperatorLog::Hold>& known = choices_.holds[moment];
      for (OperatorLog::Hold& hold : holds) {
        if (std::find(known.begin(), known.end(), hold) == known.end()) {
          known.push_back(std::move(hold));
        }
      }
    }
    log_->hold(choices_.holds);
    graph_.reset();
    ++chosen_;
  }
  if (undecided_.exchange(false) && chosen_ < options_.most_choices) {
    graph_.emplace(*log_, *host_, options_.deepest);
  }
}

const RecipeChoice* Recipes::choice_of(const RecipePlace& place, const OperatorCallPtr& call) {
  const auto found = choices_.places.find(place);
  if (found == choices_.places.end() || (call && !found->second.has_maker)) {
    undecided_ = true;
    return nullptr;
  }
  return &found->second;
}

std::shared_ptr<Step> Recipes::steps_of(const OperatorCallPtr& call, int deepest,
                                        const RecipeShape* shape, bool planned) {
  if (shape != nullptr && shape->inputs.size() != call->inputs().size()) {
    return nullptr;  // the program has changed
  }
  auto step = std::make_shared<Step>();
  step->call = call;
  for (const OperatorCall::Input& input : call->inputs()) {
    if (input.tensor.view.private_format() || log_->edited_since(*call, input.tensor)) {
      return nullptr;
    }
    step->inputs.emplace_back();
    const bool anothers = claimed(input.tensor);
    if (!anothers && host_->standing(input.tensor) != RecipeHost::Standing::kUnknown) {
      step->depth = std::max(step->depth, 1 + host_->depth(input.tensor));
      continue;
    }
    const bool saves = !anothers && host_->can_save(input.tensor);
    const size_t which = step->inputs.size() - 1;
    const RecipeShape* const further = shape == nullptr ? nullptr : shape->inputs[which].get();
    const bool begins = deepest <= 1 || (shape != nullptr && further == nullptr);
    const OperatorCallPtr maker = begins ? nullptr : log_->maker(input.tensor);
    std::shared_ptr<Step>& made = step->inputs.back().step;
    made = maker ? steps_of(maker, deepest - 1, further, planned) : nullptr;
    if (made && saves && planned && shape == nullptr &&
        extra_nbytes(*made) >= static_cast<double>(input.tensor.view.storage_nbytes())) {
      made = nullptr;  // what it would keep is no less than what it makes
    }
    if (made) {
      step->depth = std::max(step->depth, 1 + made->depth);
    } else if (saves) {
      step->inputs.back().extra = true;
    } else {
      return nullptr;
    }
  }
  return step->depth > deepest ? nullptr : step;
}

// Where it began last time, if it still can.
std::shared_ptr<Step> Recipes::planned_steps_of(const OperatorCallPtr& call,
                                                const RecipePlace& place) {
  RecipeShapePtr shape;
  {
    const std::lock_guard lock(mutex_);
    const auto found = places_.find(place);
    shape = found == places_.end() ? nullptr : found->second.shape;
  }
  std::shared_ptr<Step> again =
      shape ? steps_of(call, options_.deepest, shape.get(), /*planned=*/true) : nullptr;
  return again ? again : steps_of(call, options_.deepest, nullptr, /*planned=*/true);
}

// Whether a recipe takes more than it gives.
bool Recipes::costs_too_much(const Step& step, double limit_nbytes) const {
  const double extra = extra_nbytes(step);
  return extra > limit_nbytes || (extra > 0 && reads_recipes(step));
}

bool Recipes::reads_recipes(const Step& step) const {
  return !all_sources(step, [&](const Step::Input& input, const KnownTensor& tensor) {
    return input.extra || host_->depth(tensor) == 0;
  });
}

// What was held for a recipe has been kept for it by now, or is not wanted.
void Recipes::let_go(const Step& step) {
  log_->let_go(*step.call);
  for (const Step::Input& input : step.inputs) {
    if (input.step) {
      let_go(*input.step);
    }
  }
}

bool Recipes::keep_sources(Step& step) {
  return all_sources(step, [&](Step::Input& input, const KnownTensor& tensor) {
    input.source = source_of(tensor);
    return input.source != nullptr;
  });
}

bool Recipes::keep_extras(Step& step) {
  return all_sources(step, [&](Step::Input& input, const KnownTensor& tensor) {
    if (!input.extra) {
      return true;
    }
    input.source = source_of(tensor);
    return input.source && host_->index_of(tensor);
  });
}

SourcePtr Recipes::source_of(const KnownTensor& tensor) {
  const RecipeHost::Standing standing = host_->standing(tensor);
  if (standing != RecipeHost::Standing::kUnknown) {
    return host_->keep(tensor, standing);
  }
  SourcePtr source = host_->save(tensor);
  if (source && graph_) {
    graph_->add_held(tensor);
  }
  return source;
}

void Recipes::claim(const Step& step, const RecipePlace& place) {
  each_source(step, [&](const Step::Input& input, const KnownTensor& tensor) {
    if (input.extra) {
      claims_.emplace(tensor.key(), Claim{place, tensor.storage});
    }
  });
}

void Recipes::look_at_claims(const SavedView& view) {
  if (const auto claim = claims_.find(view.storage_key()); claim != claims_.end()) {
    const std::lock_guard lock(mutex_);
    places_[claim->second.place].saved_later = true;
  }
}

// Who made a storage that is being saved.
OperatorCallPtr Recipes::maker_of(const SavedView& view) const {
  if (OperatorCallPtr call = log_->maker(view.storage_key(), view.version())) {
    return call;
  }
  // Perhaps the operator that is running saves its own result. If it does not, its end tells.
  OperatorCallPtr running = view.version() == 0 ? log_->running() : nullptr;
  return running && !running->reads(view.storage_key()) ? running : nullptr;
}

// A storage that has no recipe. While its forward is taken down, what it takes is seen.
RecipeAnswer Recipes::watched(const RecipePlace& place) {
  std::shared_ptr<Trial> watch;
  if (graph_) {
    watch.reset(new Trial(weak_from_this(), place, nullptr));
  }
  return {.leaving = std::nullopt, .trial = std::move(watch), .proven = std::nullopt};
}

std::optional<Recipes::Learnt> Recipes::known_of(const RecipePlace& place, const Step& step,
                                                 bool planned) {
  std::string words = words_of(step);
  const std::lock_guard lock(mutex_);
  if (places_.size() >= options_.most_places && !places_.contains(place)) {
    if (!full_of_failures_) {  // what has differed once is never forgotten
      std::erase_if(places_, [](const auto& row) { return !row.second.failed; });
      full_of_failures_ = places_.size() >= options_.most_places;
    }
    if (full_of_failures_) {
      return std::nullopt;
    }
  }
  const bool repeats = place.time > 0;
  if (repeats) {
    RecipePlace first = place;
    first.time = 0;
    places_[first].several = true;
  }
  Learnt& learnt = places_[place];
  if (learnt.failed || (learnt.saved_later && extra_nbytes(step) > 0)) {
    return std::nullopt;
  }
  std::vector<ComputeModes> modes = modes_of(step);
  if (learnt.words != words || learnt.modes != modes) {
    learnt = {.words = std::move(words),
              .modes = std::move(modes),
              .waited_nbytes = learnt.waited_nbytes,
              .several = learnt.several,
              .shape = planned ? shape_of(step) : nullptr,
              .saved_later = learnt.saved_later};
  }
  Learnt known = learnt;
  known.several = known.several || repeats;
  return known;
}

RecipeAnswer Recipes::offer(const StorageRefPtr& storage, const SavedView& view, RecipePlace place,
                            Terms terms) {
  if (view.edited() || view.private_format()) {
    return {};
  }
  look_at_claims(view);
  place.time = offered_[place]++;
  const OperatorCallPtr call = maker_of(view);
  const RecipeChoice* const chosen = terms.planned ? nullptr : choice_of(place, call);
  if (graph_ && !terms.planned) {
    graph_->add_saved(place, view, *storage, call);
  }
  if (chosen != nullptr && !chosen->shape) {
    return watched(place);
  }
  std::shared_ptr<Step> step;
  if (call && terms.planned) {
    step = planned_steps_of(call, place);
  } else if (call) {
    const RecipeShape* const shape = chosen == nullptr ? nullptr : chosen->shape.get();
    step = steps_of(call, options_.deepest, shape, /*planned=*/false);
  }
  if (!step && chosen != nullptr) {
    undecided_ = true;  // the program is another one by now
  }
  const auto costs_too_much_for = [&](int64_t nbytes) {
    const double limit = terms.most_extra * static_cast<double>(nbytes);
    return terms.planned ? extra_nbytes(*step) > limit
                         : chosen == nullptr && costs_too_much(*step, limit);
  };
  if (!step || costs_too_much_for(place.nbytes)) {
    return watched(place);
  }
  const std::optional<Learnt> known = known_of(place, *step, terms.planned);
  if (!known) {
    return {};
  }
  if (!terms.planned && known->waited_nbytes > 0 && costs_too_much_for(known->waited_nbytes)) {
    return {};
  }
  if (terms.planned) {
    claim(*step, place);
  }
  if (known->proofs < options_.proofs) {
    return {.leaving = std::nullopt,
            .trial = begin_trial(storage, place, std::move(step)),
            .proven = std::nullopt};
  }
  if (!terms.leaves) {
    if (known->several || !keep_extras(*step)) {
      return {};
    }
    ProvenRecipe told = proven(*step, *known);
    // What the recipe would have saved is there until its storage is not.
    std::shared_ptr<Trial> holds(new Trial(weak_from_this(), place, std::move(step)));
    return {.leaving = std::nullopt, .trial = std::move(holds), .proven = std::move(told)};
  }
  const bool kept = keep_sources(*step);
  let_go(*step);
  if (!kept) {
    return {};
  }
  return {.leaving = leave(storage, std::move(step)), .trial = nullptr, .proven = std::nullopt};
}

void Recipes::saved_again(const SavedView& view) {
  look_at_claims(view);
  if (graph_) {
    graph_->add_again(view);
  }
}

ProvenRecipe Recipes::proven(const Step& step, const Learnt& learnt) {
  ProvenRecipe made{.words = learnt.words,
                    .seconds = learnt.seconds,
                    .made_nbytes = learnt.made_nbytes,
                    .saved = {}};
  each_source(step, [&](const Step::Input&, const KnownTensor& tensor) {
    if (!tensor.view.of_leaf()) {
      made.saved.push_back(host_->index_of(tensor));
    }
  });
  return made;
}

Leaving Recipes::leave(const StorageRefPtr& storage, std::shared_ptr<Step> step) {
  const OperatorCallPtr call = step->call;
  // The form may outlive the engine that would serialise it; its sources then say what happened.
  const std::weak_ptr<Recipes> engine = weak_from_this();
  auto form = std::make_shared<RecipeForm>(
      std::move(step), storage->storage.unsafeGetStorageImpl(), storage->storage.nbytes(), runs_,
      [engine](const std::function<void()>& work) {
        if (const auto alive = engine.lock()) {
          alive->host_->serialise(work);
        }
      },
      [engine](int64_t nbytes) {
        if (const auto alive = engine.lock()) {
          alive->host_->made(nbytes);
        }
      });
  if (call->rule().op.schema().returns().size() > 1) {
    Siblings& siblings = siblings_[call];
    if (!siblings) {
      siblings = std::make_shared<Siblings::element_type>();
    }
    form->join(siblings);
  }
  form->listen(*log_);
  auto departure = std::make_shared<CallTicket>(call, storage);
  if (!call->ended()) {
    call->add_watcher(departure);
  }
  return {std::move(form), std::move(departure)};
}

// --- proofs ---

std::shared_ptr<Trial> Recipes::begin_trial(const StorageRefPtr& storage, const RecipePlace& place,
                                            std::shared_ptr<Step> step) {
  look_at_sources(*step);
  const OperatorCallPtr call = step->call;
  std::shared_ptr<Trial> trial(new Trial(weak_from_this(), place, std::move(step)));
  if (call->ended()) {
    trial->prove(*storage);
    let_go(*trial->step_);
  } else {
    trial->storage_ = storage;
    call->add_watcher(trial);
  }
  return trial;
}

void Recipes::waited(const RecipePlace& place, int64_t nbytes) {
  const std::lock_guard lock(mutex_);
  places_[place].waited_nbytes = nbytes;
}

void Recipes::passed(const RecipePlace& place, double seconds, int64_t made_nbytes) {
  const std::lock_guard lock(mutex_);
  if (const auto found = places_.find(place); found != places_.end()) {
    Learnt& learnt = found->second;
    learnt.seconds = learnt.proofs == 0 ? seconds : std::min(learnt.seconds, seconds);
    learnt.made_nbytes = std::max(learnt.made_nbytes, made_nbytes);
    ++learnt.proofs;
  }
}

void Recipes::failed(const RecipePlace& place) {
  const std::lock_guard lock(mutex_);
  if (const auto found = places_.find(place); found != places_.end()) {
    found->second.failed = true;
    undecided_ = true;
  }
}

std::vector<std::pair<RecipePlace, Recipes::Learnt>> Recipes::learnt() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::pair<RecipePlace, Learnt>> rows;
  std::copy_if(places_.begin(), places_.end(), std::back_inserter(rows),
               [](const auto& row) { return !row.second.words.empty(); });
  return rows;
}

void Trial::call_ended() noexcept {
  const auto recipes = recipes_.lock();
  if (const StorageRefPtr storage = std::exchange(storage_, nullptr); storage && recipes) {
    try {
      recipes->host_->serialise([&] { prove(*storage); });
    } catch (const std::exception&) {
      // The engine is gone, and nothing is proven.
    }
  }
}

void Trial::prove(const StorageRef& storage) noexcept {
  const auto recipes = recipes_.lock();
  if (!recipes) {
    return;
  }
  try {
    const OperatorCall::Output* const output =
        step_->call->output_in(storage.storage.unsafeGetStorageImpl());
    if (output != nullptr) {
      Lap lap(storage.storage.device());
      const auto made = [this](int64_t nbytes) { made_nbytes_ = std::max(made_nbytes_, nbytes); };
      const at::Tensor again =
          run_again(*step_, /*in_passing=*/true, &lap, made).at(output->position);
      same_bits_ = same_bytes(again.storage(), storage.storage);
      seconds_ = lap.seconds();
    }
  } catch (const c10::OutOfMemoryError&) {
    return;  // there may be room next time
  } catch (const std::exception&) {
    // An operator that cannot be run again.
  }
  if (!same_bits_) {
    recipes->failed(place_);
  }
}

void Trial::demanded(int64_t waited_nbytes) {
  const auto recipes = recipes_.lock();
  if (!recipes) {
    return;
  }
  recipes->waited(place_, waited_nbytes);
  if (!same_bits_) {
    return;
  }
  if (!unchanged(*step_)) {
    recipes->failed(place_);
  } else if (!std::exchange(counted_, true)) {
    recipes->passed(place_, seconds_, made_nbytes_);
  }
}

}  // namespace memswap
