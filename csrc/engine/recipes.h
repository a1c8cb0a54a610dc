// Which storages become recipes: those whose place in the program has proven to give the same bits.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "away.h"
#include "compute_modes.h"
#include "forward_graph.h"
#include "operator_log.h"
#include "proven_recipe.h"
#include "recipe.h"
#include "recipe_form.h"
#include "recipe_place.h"

namespace memswap {

// What the engine does for recipes. The seam: nothing else of the engine is known here.
class RecipeHost {
 public:
  enum class Standing : uint8_t {
    kUnknown,
    kSaved,       // autograd has saved its storage in this iteration
    kPersistent,  // a parameter, a buffer, or a view of one
    kSmall,       // too small to be worth moving, and somebody holds it
  };

  virtual ~RecipeHost() = default;

  // What a recipe could read of a tensor without costing memory.
  virtual Standing standing(const KnownTensor& tensor) = 0;
  // Of what waits as a recipe itself: its depth (Step::depth). 0: it does not.
  virtual int depth(const KnownTensor& tensor) = 0;
  // Which of the storages that this iteration has saved a tensor's is; nothing: none of them.
  virtual std::optional<size_t> index_of(const KnownTensor& tensor) = 0;
  // Keeps a tensor of another standing than kUnknown for a recipe. nullptr: it cannot.
  virtual SourcePtr keep(const KnownTensor& tensor, Standing standing) = 0;
  // Whether a tensor of the standing kUnknown could be saved for a recipe, as autograd would have
  // saved it; and that. nullptr: it could not.
  virtual bool can_save(const KnownTensor& tensor) = 0;
  // The same of one that is gone, had it been held.
  virtual bool could_save(const KnownTensor& tensor) = 0;
  virtual SourcePtr save(const KnownTensor& tensor) = 0;
  // The tensor, for a look in passing of who runs a recipe. Throws TransferError where it is not
  // there.
  virtual at::Tensor look(const KnownTensor& tensor) = 0;
  // Runs a function while nobody else works with the engine's entries. For who is not serialised
  // yet: everything else here is called by who is.
  virtual void serialise(const std::function<void()>& work) = 0;
  // So many bytes are there of what a recipe makes again.
  virtual void made(int64_t nbytes) = 0;
};

class Recipes;
class Trial;

// What becomes of a storage that is about to leave: it does as a recipe; or it should leave in
// another form, and its entry owns the trial from then on; or its recipe is told; or nothing.
struct RecipeAnswer {
  std::optional<Leaving> leaving;
  std::shared_ptr<Trial> trial;
  std::optional<ProvenRecipe> proven;
};

// One storage whose recipe is being proven while its bytes wait in another form, or of which is
// only seen what that takes. Owned by its entry.
class Trial final : public OperatorCall::Watcher {
 public:
  // Backward has the storage now. If nothing that the recipe would read was edited or lost since,
  // the place has passed once; by a later backward of the same graph it may still fail.
  // `waited_nbytes`: of the device, that its bytes have taken meanwhile; 0: none.
  void demanded(int64_t waited_nbytes);

  void call_ended() noexcept override;

 private:
  friend class Recipes;
  struct Verdict;

  // `step`: nullptr where nothing is proven.
  Trial(std::weak_ptr<Recipes> recipes, RecipePlace place, StepPtr step)
      : recipes_(std::move(recipes)), place_(std::move(place)), step_(std::move(step)) {}
  void prove(const StorageRef& storage) noexcept;

  const std::weak_ptr<Recipes> recipes_;
  const RecipePlace place_;
  const StepPtr step_;
  StorageRefPtr storage_;  // until the call has ended that makes it
  bool same_bits_ = false;
  bool counted_ = false;
  double seconds_ = 0;
  int64_t made_nbytes_ = 0;  // at once
};

// [Note: Proven before it is used]
// While a place is being learnt, its storage leaves in another form, and its recipe is run at once,
// beside the original: their bytes must be equal. When backward demands the storage, everything
// that the recipe would read by then must still be there, at the version of the forward. A place
// that has passed `proofs` times becomes a recipe in the next forward. One that has failed once
// never does, and one whose recipe reads other words than last time begins anew.

// [Note: What a recipe keeps]
// Most of what autograd saves was made of something that it saves too, or of a parameter; reading
// that costs no memory. Some was made of something smaller that autograd does not save: the
// bfloat16 tensor in front of a float32 norm. A recipe may have that saved in its place, where it
// takes less than `most_extra` of the bytes that the recipe frees: of the storage's, or, where it
// waited as a frame while the place was learnt, of that frame's. (A frame of what was cast up takes
// no more than one of what it was cast from; one of a sum is longer than what was added.) What an
// operator of the table made needs no place at all: it is a further step. That judges each storage
// alone, and holds until its place was chosen for ([Note: Chosen once a forward is known]).
//
// Who plans with recipes is told what each of them would have saved, and chooses: a plan counts
// such a source's bytes for as long as the recipe is planned. A recipe begins where it keeps the
// fewest bytes, each of them belongs to it alone, with which it comes and goes, and in the next
// forward it begins there again, whatever other recipes are planned. What autograd saves by itself
// later on is no source: it is there without the recipe, too.
//
// Sources may be recipes themselves. All that stand in a row are there at once when the last one is
// demanded, so there are at most `deepest` of them, and what a recipe has saved for itself alone
// begins a row.

// The recipes of one engine, which serialises the calls.
class Recipes : public std::enable_shared_from_this<Recipes> {
 public:
  static constexpr int kProofs = 2;

  struct Options {
    int proofs = kProofs;  // 0: recipes are used unproven
    int deepest = 8;
    size_t most_places = 16384;
    int most_choices = 32;  // forwards that are taken down
  };

  Recipes(OperatorRules rules, std::unique_ptr<RecipeHost> host, Options options)
      : log_(std::make_shared<OperatorLog>(std::move(rules))),
        host_(std::move(host)),
        options_(options),
        runs_(std::make_shared<RecipeRuns::element_type>(0)) {
    choose();
  }

  OperatorLog& log() { return *log_; }
  RecipeHost& host() { return *host_; }
  int64_t runs() const { return *runs_; }
  void reset_runs() { *runs_ = 0; }

  // A new forward.
  void begin_iteration();
  // These are about to be edited, by nobody whose operators are known.
  void before_edits(const std::vector<at::Tensor>& tensors);

  struct Terms {
    double most_extra;     // see [Note: What a recipe keeps]; 0: nothing is kept for a recipe alone
    bool leaves = true;    // as a recipe if it can; or its recipe is told
    bool planned = false;  // by who plans with recipes: nothing is chosen for them
  };
  // A storage is about to leave.
  RecipeAnswer offer(const StorageRefPtr& storage, const SavedView& view, RecipePlace place,
                     Terms terms);

  // A storage is saved once more, that is known already.
  void saved_again(const SavedView& view);

  // What became of a place, for reports.
  struct Learnt {
    std::string words;
    std::vector<ComputeModes> modes;  // under which it was proven, of each of its calls
    int proofs = 0;
    bool failed = false;
    int64_t waited_nbytes = 0;  // of the device, taken by the other form; 0: not known, or none
    double seconds = 0;         // the least that a trial took
    int64_t made_nbytes = 0;    // and the most that it had made at once
    bool several = false;       // of this place in one iteration: which is which, nobody can say
    RecipeShapePtr shape;       // under a plan: where it begins
    bool saved_later = false;   // autograd has saved by itself what the recipe would have kept
  };
  std::vector<std::pair<RecipePlace, Learnt>> learnt() const;

 private:
  friend class Trial;
  class Looked;
  using Siblings = std::shared_ptr<std::vector<std::weak_ptr<RecipeForm>>>;

  OperatorCallPtr maker_of(const SavedView& view) const;
  // The recipe of a call's results, its sources left open; nullptr: there is none. In it are at
  // most `deepest` calls in a row. `shape`: where it begins, as it was chosen; nullptr: as far back
  // as can be.
  // `planned`: where that keeps the fewest bytes instead.
  std::shared_ptr<Step> steps_of(const OperatorCallPtr& call, int deepest, const RecipeShape* shape,
                                 bool planned);
  std::shared_ptr<Step> planned_steps_of(const OperatorCallPtr& call, const RecipePlace& place);
  // What was chosen for a place, that this call has made; nullptr: nothing yet.
  const RecipeChoice* choice_of(const RecipePlace& place, const OperatorCallPtr& call);
  void choose();
  RecipeAnswer watched(const RecipePlace& place);
  // What is known of a place, of this recipe: one that reads other words, or runs under other
  // settings of torch, begins anew. Nothing: the place has none, or none that keeps anything for
  // itself; or it is new, and there are too many that have failed.
  std::optional<Learnt> known_of(const RecipePlace& place, const Step& step, bool planned);
  bool costs_too_much(const Step& step, double limit_nbytes) const;
  bool reads_recipes(const Step& step) const;
  // Fills in the sources. Whether all could be kept.
  bool keep_sources(Step& step);
  // The same of those that nothing but the recipe keeps, and that can be told.
  bool keep_extras(Step& step);
  SourcePtr source_of(const KnownTensor& tensor);
  // Under a plan: what the recipe of a place keeps is nobody else's in this forward.
  void claim(const Step& step, const RecipePlace& place);
  bool claimed(const KnownTensor& tensor) const { return claims_.contains(tensor.key()); }
  // Autograd saves a storage.
  void look_at_claims(const SavedView& view);
  void let_go(const Step& step);
  void look_at_sources(Step& step);
  std::shared_ptr<Trial> begin_trial(const StorageRefPtr& storage, const RecipePlace& place,
                                     std::shared_ptr<Step> step);
  Leaving leave(const StorageRefPtr& storage, std::shared_ptr<Step> step);

  ProvenRecipe proven(const Step& step, const Learnt& learnt);
  void waited(const RecipePlace& place, int64_t nbytes);
  void passed(const RecipePlace& place, double seconds, int64_t made_nbytes);
  void failed(const RecipePlace& place);

  const OperatorLogPtr log_;
  const std::unique_ptr<RecipeHost> host_;
  const Options options_;
  const RecipeRuns runs_;
  std::unordered_map<OperatorCallPtr, Siblings> siblings_;
  mutable std::mutex mutex_;  // of what trials tell
  std::unordered_map<RecipePlace, Learnt, RecipePlaceHash> places_;
  bool full_of_failures_ = false;
  std::unordered_map<RecipePlace, int64_t, RecipePlaceHash>
      offered_;  // in this iteration, how often
  struct Claim {
    RecipePlace place;
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // keeps the address from being used again
  };
  std::unordered_map<const void*, Claim> claims_;  // of this iteration
  std::optional<ForwardGraph> graph_;              // of this iteration, if it is taken down
  RecipeChoices choices_;
  // Nothing was chosen for some place, or what was is none any more.
  std::atomic<bool> undecided_ = true;
  int chosen_ = 0;  // how often
};

}  // namespace memswap
