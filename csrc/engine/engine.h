// Engine: what becomes of the storages that autograd saves.
//
// From pack to unpack: a tensor is offered (`save`); its storage is known already, or becomes an
// Entry; the plan, the policy and the iteration say whether it stays; a sender sends it. In
// backward a handle demands the storage (`demand`), which comes back or is on its way already, and
// with it what is demanded next.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "action.h"
#include "departing.h"
#include "engine_host.h"
#include "entry.h"
#include "iteration.h"
#include "ledger.h"
#include "lock.h"
#include "planning.h"
#include "reasons.h"
#include "storage/saved_view.h"
#include "transfers.h"

namespace memswap {

class Batch;
class Recipes;
class Windows;
struct RecipeAnswer;

// Which storages of a batch travel together ([Note: When storages travel together] in batch.h).
struct BatchLimits {
  int64_t small_bytes = 1 << 20;    // storages of more travel alone
  int64_t bucket_bytes = 32 << 20;  // of what travels together, and so of the copy that it takes
};

// When what leaves is sent, and when it comes back.
enum class Schedule : uint8_t {
  kIterations,  // sent when it is saved; backward's demands bring back what comes next
  kWindows,     // the same, but codec work of an accelerator waits for an operator to run beside
  kBatches,     // batches of groups, which share storages, move when they are told to
};

// A policy as data.
struct PolicyTable {
  int64_t min_bytes = 0;         // storages of fewer stay
  std::optional<Action> action;  // nothing: what suits the device (Transfers::Traits)
  bool asks = false;             // a function of the user's says instead (EngineHost::decide)
  bool recipes = true;           // whether what suits a device may be to recompute
  // Operators of the user's that recipes may run, beside those of the table (OperatorRules), and
  // how often a place is proven (Recipes::Options). Both count when recipes are opened.
  std::vector<std::string> operators = {};
  int proofs = 2;
};

// One installation of an engine's hooks, a `with` block or one call of a unit, and how far it has
// come.
struct HookScope {
  std::string unit;
  bool covered = false;          // the policy covers the unit
  std::optional<Action> action;  // of all that is saved here, whatever the policy says
  // The reason that is counted for what `action` keeps.
  std::string why_kept = reasons::kPolicy;
  std::optional<int64_t> group;  // a checkpoint region's number
  int64_t packs = 0;             // tensors that were packed
  int64_t ordinal = -1;          // of the storage that was considered last
};

// A tensor that is saved.
struct Offer {
  const at::Tensor& tensor;
  const SavedView& view;
  HookScope& scope;         // that saves it
  int64_t number;           // among what the scope packs
  Batch* batch = nullptr;   // that saves it, of a group
  bool for_recipe = false;  // a recipe saves it, and not autograd
};

// What became of a tensor that was saved.
struct SaveResult {
  bool moves = false;  // its storage leaves, or has left; false: the tensor stays
  KnownPtr known;  // the entry of what leaves; of what stays, who stands for its storage, or nobody
};

// Whether the calling thread runs a backward, and its number; -1: none.
bool runs_backward();
int number_of_backward();

// Nothing in it is shared with another engine. Hooks may be called from any thread; `lock`
// serialises the bookkeeping, and no transfer ever waits for it.
class Engine : public std::enable_shared_from_this<Engine> {
 public:
  // `host`: answers what the engine cannot know; nullptr: nothing may be saved that the ledger does
  // not know.
  explicit Engine(std::optional<int64_t> prefetch_bytes, Schedule schedule = Schedule::kIterations,
                  std::unique_ptr<EngineHost> host = nullptr);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // --- what it is told ---

  const PolicyTable& policy() const { return policy_; }
  void set_policy(const PolicyTable& policy) { policy_ = policy; }
  // What is known of operators; nullptr: nothing is recomputed.
  const std::shared_ptr<Recipes>& recipes() const { return recipes_; }
  // Hears of operators from the next scope on, if it does not yet.
  void open_recipes();
  void set_recipes(std::shared_ptr<Recipes> recipes) { recipes_ = std::move(recipes); }
  // Storages of parameters and buffers, instead of those that were named before.
  void set_persistent(const std::vector<at::Tensor>& tensors);
  bool has_persistent() const { return !persistent_.empty(); }
  bool is_persistent(const void* key) const { return persistent_.contains(key); }
  // Whether a tensor is a parameter or a buffer, or a view of one: they are known by their
  // storages.
  bool persists(const SavedView& view) const {
    return view.of_leaf() || is_persistent(view.storage_key());
  }

  // --- iterations ---

  // The iteration that saves now.
  const IterationPtr& iteration() const { return iteration_; }
  // Another one saves from here on, with what the last one that was demanded predicts.
  void next_iteration() { iteration_ = timeline.begin(); }

  // --- save (save.cpp). The caller holds the lock, and the GIL where there is Python. ---

  // A plain tensor is saved. Where the policy asks a function of the user's, the caller does not
  // hold the lock meanwhile.
  SaveResult save(const Offer& offer);
  // Whether a storage is too small for the policy.
  bool is_small(const SavedView& view) const {
    return static_cast<int64_t>(view.storage_nbytes()) < policy_.min_bytes;
  }
  // A tensor stays, and nothing is known of its storage.
  SaveResult keep(const SavedView& view, std::string_view reason);
  // The entry of what the iteration admitted last, for a storage of that look.
  EntryPtr make_entry(const SavedView& view, const StorageRef& storage, bool for_recipe = false);
  // An entry's storage leaves as raw bytes in a block of the pool, unless there is a reason.
  Reason send_raw(const EntryPtr& entry, const StorageRefPtr& storage, Transfers& by);
  // An entry's storage is on its way, into whatever form.
  void depart(Entry& entry, Leaving leaving);
  // A sender has no room for a storage: told once. The reason for the statistics, which is
  // `short_of`.
  Reason refused(Reason short_of, const std::string& why, const Entry& entry);

  // --- leaving in another way (leave.cpp). The caller holds the lock, and the GIL. ---

  // An entry's storage leaves as ordered, unless there is a reason: now, or, as a frame under
  // windows, once an operator runs that it fits beside.
  Reason send(const EntryPtr& entry, const StorageRefPtr& storage, const LeaveOrder& order);
  // The same as a frame now; where there is no room for one, raw, if the form is a pooled one or a
  // plan has just so much room where it is.
  Reason send_frame(const EntryPtr& entry, const StorageRefPtr& storage, const LeaveOrder& order,
                    const Expectation& expectation);
  // Takes in what encoders have reported by now, of each device in the order of their encodes.
  void learn();

  // --- demand (engine.cpp). Unless the caller has the lock, as a recipe that reads has, nobody has
  // it while a demand waits. Nobody has it while the user is warned. ---

  // The storage of an entry, ordered before what the caller does next. Throws LostBytes.
  StorageRefPtr demand(const EntryPtr& entry) { return demand_by(Caller::kHasNoLock, entry); }
  StorageRefPtr demand_by(Caller caller, const EntryPtr& entry);
  // A storage that stayed is demanded: what comes next may have to come back.
  void demand_kept_by(Caller caller, const EntryPtr& entry);
  // Warns of what there is to tell by now ([Note: Warnings come last] in ledger.h).
  void tell();

  // --- parts, with methods of their own ---

  const Schedule schedule;
  const std::unique_ptr<Windows> windows;  // of Schedule::kWindows; else nullptr
  Lock lock;
  Ledger ledger;
  Departing departing;
  BatchLimits batch_limits;  // what it is made with suits links; tests of time have others
  Timeline timeline;
  Planning planning{*this};

 private:
  // What was found of a storage's recipe, which is looked for once; nullptr: nobody has looked yet.
  using FoundRecipe = std::shared_ptr<RecipeAnswer>;
  // As the plan of the current iteration says, where it expects just this storage. Nothing: it does
  // not, and nothing has happened, but that its recipe may have been looked for.
  std::optional<SaveResult> follow_plan(const Offer& offer, FoundRecipe& recipe);
  // Nothing: the storage is new, and something is to be decided about it.
  std::optional<SaveResult> look_up(const Offer& offer);
  SaveResult save_again(const Offer& offer, const KnownPtr& known);
  std::optional<Action> ask(const Offer& offer);
  SaveResult decide(const Offer& offer, std::optional<Action> action, FoundRecipe recipe);
  // What is done with a new storage.
  struct Decision {
    Action action;
    bool directed = false;  // by a plan, or by whoever makes one
    bool learns = false;    // its recipe is tried, or told, whatever is done with it
    FoundRecipe recipe = nullptr;
  };
  // A new entry, which leaves unless the plan or the timeline has a reason why it stays.
  SaveResult admit(const Offer& offer, const TransfersPtr& by, Decision decision);
  // A tensor stays for good, and its storage is known: once, however often it is saved.
  SaveResult stay(const SavedView& view, std::string_view reason);
  // An entry's storage leaves as the schedule has it, unless there is a reason: by `send`, or held
  // until its batch is told to go.
  Reason leave(const EntryPtr& entry, StorageRefPtr storage, LeaveOrder order);
  Reason send_as(Action action, const Offer& offer, const TransfersPtr& by, const EntryPtr& entry,
                 const StorageRefPtr& storage);
  void note_save(const Entry& entry, bool stays);
  const TransfersPtr& transfers_from(c10::Device device);
  Action default_action(const Transfers& by);
  FoundRecipe recipe_of(const Offer& offer, double most_extra, bool leaves);
  bool becomes_recipe(const EntryPtr& entry, const Offer& offer, bool leaves, FoundRecipe recipe);
  bool refilled(const KnownPtr& known, const SavedView& view) const;
  // Whether frames were short of room in an earlier iteration as well.
  bool short_again(const IterationPtr& shortage);
  Reason declined(const Refused& refused, const Entry& entry);
  void tell_refused(const FrameSender& sender, const Entry& entry, Form form);
  Reason send_unencoded(const EntryPtr& entry, const StorageRefPtr& storage,
                        const LeaveOrder& order, bool planned, Reason reason);
  // Whether what this sender encodes waits for a window.
  bool defers(const FrameSender& sender) const {
    return windows != nullptr && sender.works_ahead();
  }
  void look_ahead(const EntryPtr& entry);
  void after_demand(const EntryPtr& entry, bool is_directed, LockedFor& locked);

  const std::unique_ptr<EngineHost> host_;
  PolicyTable policy_;
  std::shared_ptr<Recipes> recipes_;
  // Storages of parameters and buffers. A weak storage keeps its key from being used again.
  std::unordered_map<const void*, WeakStorage> persistent_;
  IterationPtr iteration_;
  std::optional<std::weak_ptr<Iteration>> first_short_;  // where room for frames first ran out
  // Of each device that was seen, at the same place for good; nullptr: its storages stay.
  std::deque<std::pair<c10::Device, TransfersPtr>> devices_;
};

// Why a tensor cannot move, whatever the policy says.
Reason why_fixed(const SavedView& view);

}  // namespace memswap
