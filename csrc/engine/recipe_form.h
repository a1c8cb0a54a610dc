// RECOMPUTE: nothing but the operator that made the bytes, which is run again.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "away.h"
#include "recipe.h"

namespace memswap {

// How often recipes were run. Shared by the forms of one engine.
using RecipeRuns = std::shared_ptr<std::atomic<int64_t>>;

// Runs a function while nobody else works with the entries of an engine. For who is not serialised
// yet (RecipeHost::serialise).
using Serialised = std::function<void(const std::function<void()>&)>;

// [Note: An edit of what a recipe reads]
// Autograd lets a program edit what no operator has saved, and a recipe may read just that. So the
// form listens: when an operator inside a hook scope is about to edit a source, the recipe is run
// while its sources are as they were, and the form has the bytes from then on. The same is done
// before an optimizer's step. Other edits outside of hook scopes are nobody's to see: the source
// says at the demand that it was edited, in autograd's words.

// Where the bytes are:
//
//   ready_  settled_  what a demand does
//   -       -         runs the recipe
//   held    -         takes what a sibling's run has made too
//   -       held      gets a copy of what was made before a source was edited
//
class RecipeForm final : public AwayForm,
                         public EditListener,
                         public std::enable_shared_from_this<RecipeForm> {
 public:
  // The storage `key` is what the last step makes of it, now or when its call has ended. `made`
  // hears how many bytes there are of what a run makes, and of none when it is over.
  RecipeForm(StepPtr step, const void* key, size_t nbytes, RecipeRuns runs, Serialised serialised,
             MadeBytes made);

  // Forms of other results of the same call. One run serves all that are there.
  void join(std::shared_ptr<std::vector<std::weak_ptr<RecipeForm>>> siblings);
  // Has `log` tell it of edits of what it reads.
  void listen(OperatorLog& log);

  Returning bring() override { return bring(false); }
  Returning look() override { return bring(true); }
  size_t device_nbytes() const override;
  size_t pool_nbytes() const override { return 0; }
  void on_change(std::function<void()> call) override { changed_ = std::move(call); }
  size_t returning_nbytes() const override { return 0; }
  // Its sources may themselves be away: nothing is gained by asking for them early.
  bool can_fetch_ahead() const override { return false; }
  bool recomputes() const override { return true; }
  int depth() const override { return step_->depth; }
  Reason short_of() const override { return reasons::kNoRecipe; }

  void before_edit() noexcept override;

  const Step& step() const { return *step_; }

 private:
  Returning bring(bool in_passing);
  Returning run(bool in_passing);
  void serve(const std::vector<at::Tensor>& results) noexcept;
  void note_change() const;
  StorageRefPtr result_of(const std::vector<at::Tensor>& results) const;

  const StepPtr step_;
  const void* const key_;
  const size_t nbytes_;
  const RecipeRuns runs_;
  const Serialised serialised_;
  const MadeBytes made_;
  std::shared_ptr<std::vector<std::weak_ptr<RecipeForm>>> siblings_;
  std::function<void()> changed_;
  Returning ready_;    // a sibling's run has made it too
  Returning settled_;  // of before a source was edited; whoever asks gets a copy
};

// The departure of a storage into a recipe. Holds the storage until the call that made it has
// ended: only then is it known to be one of its results. If it is not, the ticket gives it back.
class CallTicket final : public Ticket, public OperatorCall::Watcher {
 public:
  CallTicket(OperatorCallPtr call, StorageRefPtr storage);

  void wait() override;
  bool done() override;
  bool failed() override;
  std::shared_ptr<StorageRef> kept_storage() override;
  void synchronize() override { wait(); }
  void call_ended() noexcept override;

 private:
  const OperatorCallPtr call_;
  const void* const key_;
  mutable std::mutex mutex_;
  StorageRefPtr storage_;
  bool ended_ = false;
  bool failed_ = false;
};

}  // namespace memswap
