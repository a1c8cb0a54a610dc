#include "recipe_host.h"

#include <variant>

#include "iteration.h"
#include "storage/lend.h"
#include "work/without_gil.h"

namespace memswap {

namespace {

// An entry's storage for a look in passing: the entry stays as it is. The engine's lock is held.
StorageRefPtr looked_at(Entry& entry) {
  if (entry.storage()) {
    return entry.storage();
  }
  if (StorageRefPtr storage = entry.identity().lock()) {
    return storage;
  }
  if (!entry.away() || !entry.notice_gone(/*wait=*/true)) {
    throw TransferError("a tensor that a recipe reads is not there");
  }
  const AwayFormPtr away = entry.away();
  Returning back = away->look();
  if (back.arrival) {
    back.arrival->wait();
  }
  return std::move(back.storage);
}

// What a recipe keeps, as autograd would.
class SavedSource final : public Source {
 public:
  // `seen`: how a storage looks that waits elsewhere, by `entry`. Without these the tensor stays.
  SavedSource(SavedTensor saved, EntryPtr entry, KnownTensor seen)
      : saved_(std::move(saved)), entry_(std::move(entry)), seen_(std::move(seen)) {}
  explicit SavedSource(SavedTensor saved) : saved_(std::move(saved)) {}
  SavedSource(const SavedSource&) = delete;
  SavedSource& operator=(const SavedSource&) = delete;

  ~SavedSource() override {
    const WithGil gil;  // which serialises the ends of entries
    saved_.reset();
    entry_.reset();
  }

  at::Tensor tensor() override {
    const WithGil gil;
    if (!entry_) {
      return saved_->unpack(Caller::kHasLock);
    }
    entry_->use();
    try {
      return saved_->unpack(Caller::kHasLock);
    } catch (...) {
      used();
      throw;
    }
  }

  void used() override {
    if (entry_) {
      const WithGil gil;
      entry_->used();
    }
  }

  at::Tensor look() override {
    if (!entry_) {
      return saved_->tensor();
    }
    const WithGil gil;
    // Who looks may be about to edit the tensor: after its bytes have been read.
    if (entry_->departure()) {
      wait_ignoring_failure(entry_->departure());
    }
    return seen_->view.rebuild(*looked_at(*entry_), false);
  }

 private:
  std::optional<SavedTensor> saved_;
  EntryPtr entry_;  // that `saved_` shares
  const std::optional<KnownTensor> seen_;
};

// [Note: Parameters whose memory comes and goes]
// Weights that are gathered for one unit's forward and again for its backward are leaves, and have
// the same storage and version then; in between there may be no memory under them, or memory that
// is being filled, or the weights of after an optimizer's step. Lent memory says that it is that
// (lend.h). Of others' the model's own parameters are the shards, and what is gathered is none of
// them; but for the unit with which an iteration begins, which may be gathered by then: there a
// proof and each demand look whether the memory is there.
bool is_there_to_stay(const Engine& of, const KnownTensor& tensor) {
  const auto storage = tensor.storage.lock();
  return storage && owns_memory(*storage, tensor.view.end()) &&
         (!of.has_persistent() || of.is_persistent(tensor.key()));
}

// Who stands for what autograd has saved in this forward; nullptr: it has not.
KnownPtr known_in(Engine& of, const SavedView& view) {
  KnownPtr known = of.ledger.find(view).known;
  const EntryPtr entry = as_entry(known);
  return entry && entry->iteration() != of.iteration() ? nullptr : known;
}

// The entry whose bytes wait elsewhere, or which holds the storage itself; nullptr: none does.
EntryPtr moved_entry(KnownPtr known) {
  EntryPtr entry = as_entry(std::move(known));
  return entry && entry->moves() ? entry : nullptr;
}

// What is saved for recipes alone has ordinals of its own: whether it is saved changes no other's.
constexpr int64_t kFirstOrdinal = int64_t{1} << 40;
constexpr int64_t kMostForOne = 64;

// `held` has no graph, and no other share of its storage than this one.
SourcePtr kept_source(at::Tensor held, KnownPtr known) {
  const auto version = static_cast<uint32_t>(held._version());
  return std::make_shared<SavedSource>(
      SavedTensor::kept(std::move(held), version, std::move(known)));
}

SourcePtr moved_source(const EntryPtr& entry, const KnownTensor& tensor) {
  return std::make_shared<SavedSource>(SavedTensor::moved(entry, SavedView(tensor.view)), entry,
                                       tensor);
}

}  // namespace

EnginePtr EngineRecipeHost::engine() const {
  EnginePtr alive = engine_.lock();
  if (!alive) {
    throw TransferError("the engine of a recipe is gone");
  }
  return alive;
}

RecipeHost::Standing EngineRecipeHost::standing(const KnownTensor& tensor) {
  const EnginePtr of = engine();
  const SavedView& view = tensor.view;
  const bool alive = !tensor.storage.expired();
  if (of->persists(view)) {
    return alive && is_there_to_stay(*of, tensor) ? Standing::kPersistent : Standing::kUnknown;
  }
  if (const KnownPtr known = known_in(*of, view); known && (moved_entry(known) || alive)) {
    return Standing::kSaved;
  }
  const bool small = static_cast<int64_t>(view.storage_nbytes()) < of->policy().min_bytes;
  return small && alive && view.computed() ? Standing::kSmall : Standing::kUnknown;
}

int EngineRecipeHost::depth(const KnownTensor& tensor) {
  const EntryPtr entry = moved_entry(known_in(*engine(), tensor.view));
  return entry ? entry->depth() : 0;
}

std::optional<size_t> EngineRecipeHost::index_of(const KnownTensor& tensor) {
  const EntryPtr entry = as_entry(known_in(*engine(), tensor.view));
  return entry ? std::optional(entry->index()) : std::nullopt;
}

SourcePtr EngineRecipeHost::keep(const KnownTensor& tensor, Standing standing) {
  if (standing == Standing::kUnknown) {
    return nullptr;
  }
  KnownPtr known = standing == Standing::kSaved ? known_in(*engine(), tensor.view) : nullptr;
  if (const EntryPtr entry = moved_entry(known)) {
    return moved_source(entry, tensor);
  }
  at::Tensor held = tensor.lock();
  return held.defined() ? kept_source(std::move(held), std::move(known)) : nullptr;
}

bool EngineRecipeHost::can_save(const KnownTensor& tensor) {
  return !tensor.storage.expired() && could_save(tensor);
}

bool EngineRecipeHost::could_save(const KnownTensor& tensor) {
  const auto nbytes = static_cast<int64_t>(tensor.view.storage_nbytes());
  return offer_ != nullptr && tensor.view.computed() && nbytes >= engine()->policy().min_bytes;
}

SourcePtr EngineRecipeHost::save(const KnownTensor& tensor) {
  at::Tensor held = tensor.lock();
  if (!held.defined() || offer_ == nullptr) {
    return nullptr;
  }
  // An iteration that follows no plan and that nobody takes down shows nobody what it would take.
  const Iteration& in = *engine()->iteration();
  if (engine()->planning.directed() && !in.course.follows_plan() && !in.recorder()) {
    return nullptr;
  }
  const Offer& offer = *offer_;
  HookScope scope = offer.scope;
  scope.ordinal = kFirstOrdinal + kMostForOne * scope.ordinal + saved_++;
  const int64_t saved_by_now = saved_;
  SaveResult saved = engine()->save({.tensor = held,
                                     .view = tensor.view,
                                     .scope = scope,
                                     .number = offer.number,
                                     .batch = offer.batch,
                                     .for_recipe = true});
  offer_ = &offer;  // others may have saved while a function of the user's was asked
  saved_ = saved_by_now;
  if (saved.moves) {
    return moved_source(as_entry(saved.known), tensor);
  }
  return kept_source(std::move(held), std::move(saved.known));
}

at::Tensor EngineRecipeHost::look(const KnownTensor& tensor) {
  if (at::Tensor held = tensor.lock(); held.defined()) {
    return held;
  }
  const WithGil gil;
  const EnginePtr of = engine();
  const EntryPtr entry = as_entry(known_in(*of, tensor.view));
  if (!entry) {
    throw TransferError("a tensor that a recipe reads is gone: " + tensor.view.describe());
  }
  return tensor.view.rebuild(*looked_at(*entry), false);
}

void EngineRecipeHost::serialise(const std::function<void()>& work) {
  const WithGil gil;
  const EnginePtr of = engine();
  const Locked locked(of->lock);
  work();
}

void EngineRecipeHost::made(int64_t nbytes) {
  const WithGil gil;  // which serialises the ends of entries, and they count as well
  if (const EnginePtr alive = engine_.lock()) {
    alive->planning.count_made(nbytes);
  }
}

}  // namespace memswap
