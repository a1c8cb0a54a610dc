// What recipes are safe by, each broken on purpose: without it the bytes would be other ones, and
// the test that a whole part passes says so.
#include <ATen/ops/add.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/silu.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "engine/recipe_host.h"
#include "lane/worker_lane.h"
#include "pool/host_slabs.h"
#include "pool/pool.h"
#include "storage/lend.h"
#include "with_host.h"
#include "with_recipes.h"

namespace memswap {
namespace {

// A version that is not checked.
class Unchecked final : public Source {
 public:
  explicit Unchecked(at::Tensor tensor) : tensor_(std::move(tensor)) {}
  at::Tensor tensor() override { return tensor_; }
  at::Tensor look() override { return tensor_; }

 private:
  const at::Tensor tensor_;
};

// An input that is freed before its replay: its memory is another tensor's by then.
class Freed final : public Source {
 public:
  explicit Freed(const at::Tensor& tensor)
      : sizes_(tensor.sizes().vec()), options_(tensor.options()) {}
  at::Tensor tensor() override { return at::full(sizes_, 0.5, options_); }
  at::Tensor look() override { return tensor(); }

 private:
  const std::vector<int64_t> sizes_;
  const at::TensorOptions options_;
};

class BrokenHost final : public Host {
 public:
  using Make = std::function<SourcePtr(const at::Tensor&)>;
  explicit BrokenHost(Make make) : make_(std::move(make)) {}
  SourcePtr keep(const KnownTensor& tensor, Standing) override { return make_(tensor.lock()); }

 private:
  const Make make_;
};

std::shared_ptr<Recipes> recipes_of(std::unique_ptr<Host> host, int proofs = 0) {
  return std::make_shared<Recipes>(OperatorRules(), std::move(host),
                                   Recipes::Options{.proofs = proofs});
}

RecipeAnswer offer(Recipes& recipes, const at::Tensor& made) {
  return recipes.offer(std::make_shared<StorageRef>(made.storage()), *SavedView::capture(made),
                       {.unit = "unit",
                        .number = 0,
                        .nbytes = static_cast<int64_t>(made.storage().nbytes()),
                        .dtype = made.scalar_type()},
                       {.most_extra = 0.75});
}

enum class Seen : uint8_t { kRight, kWrong, kRefused };

Seen demanded(AwayForm& form, const at::Tensor& expected) {
  try {
    return same_bytes(form.bring().storage->storage, expected.storage()) ? Seen::kRight
                                                                         : Seen::kWrong;
  } catch (const std::exception&) {
    return Seen::kRefused;
  }
}

// What a demand sees after something has become of the source, of which nobody has heard.
template <class Change>
Seen after(std::unique_ptr<Host> host, Change change) {
  const std::shared_ptr<Recipes> recipes = recipes_of(std::move(host));
  recipes->log().enter();
  at::Tensor source = at::randn({64, 64});
  const at::Tensor made = at::silu(source);
  const RecipeAnswer answer = offer(*recipes, made);
  recipes->log().leave();
  change(source);
  return demanded(*answer.leaving->away, made);
}

// An edit between forward and backward.
Seen after_an_edit(std::unique_ptr<Host> host) {
  return after(std::move(host), [](at::Tensor& source) { source.mul_(2); });
}

// A source that nobody but the recipe holds.
Seen after_its_source_is_dropped(std::unique_ptr<Host> host) {
  return after(std::move(host), [](at::Tensor& source) { source.reset(); });
}

// A kernel that gives other bits in the second iteration, and is demanded in the third.
Seen at_a_place_that_differs(int proofs) {
  const std::shared_ptr<Recipes> recipes = recipes_of(std::make_unique<Host>(), proofs);
  recipes->log().enter();
  Seen seen = Seen::kRight;
  const at::Tensor x = at::randn({64, 64});
  for (int iteration = 0; iteration < 4; ++iteration) {
    recipes->begin_iteration();
    const at::Tensor made = at::silu(x);
    if (iteration > 0) {
      const OperatorLog::Unobserved unseen;
      bytes_of(made.storage())[17].add_(1);
    }
    const RecipeAnswer answer = offer(*recipes, made);
    if (answer.leaving && seen == Seen::kRight) {
      seen = demanded(*answer.leaving->away, made);
    }
    if (answer.trial) {
      answer.trial->demanded(0);
    }
  }
  recipes->log().leave();
  return seen;
}

template <class Broken>
std::unique_ptr<Host> keeping() {
  return std::make_unique<BrokenHost>(
      [](const at::Tensor& tensor) { return std::make_shared<Broken>(tensor); });
}

// An addend that nobody but the recipe of the sum wants, chosen in the first forward. Between
// forward and backward of the last one it is edited, or everybody else lets go of it.
Seen after_a_choice(std::unique_ptr<Host> host, bool edited) {
  host->saves = true;
  Host& of = *host;
  const std::shared_ptr<Recipes> recipes = recipes_of(std::move(host), 1);
  recipes->log().enter();
  const at::Tensor stream = at::randn({64, 64});
  Seen seen = Seen::kRefused;
  for (int iteration = 0; iteration < 3; ++iteration) {
    recipes->begin_iteration();
    at::Tensor added = at::mm(stream, stream).to(at::kBFloat16).cumsum(0);
    of.unknown = added;
    const at::Tensor total = at::add(stream, added);
    const RecipeAnswer answer = offer(*recipes, total);
    if (answer.trial) {
      answer.trial->demanded(0);
    }
    if (answer.leaving) {
      recipes->log().leave();
      if (edited) {
        added.mul_(2);
      }
      of.unknown = at::Tensor();
      added = at::Tensor();
      seen = demanded(*answer.leaving->away, total);
      recipes->log().enter();
    }
  }
  recipes->log().leave();
  return seen;
}

class BrokenEngine final : public Host {
 public:
  using Make = std::function<SourcePtr(const at::Tensor&)>;
  explicit BrokenEngine(Make make) : make_(std::move(make)) {}
  SourcePtr save(const KnownTensor& tensor) override { return make_(tensor.lock()); }

 private:
  const Make make_;
};

template <class Broken>
std::unique_ptr<Host> saving() {
  return std::make_unique<BrokenEngine>(
      [](const at::Tensor& tensor) { return std::make_shared<Broken>(tensor); });
}

// A held source that its recipe holds as it is, and that the engine knows nothing of.
class InNoAccount final : public EngineRecipeHost {
 public:
  using EngineRecipeHost::EngineRecipeHost;
  SourcePtr save(const KnownTensor& tensor) override {
    return std::make_shared<Kept>(tensor.lock());
  }
};

// A source that is let go of before the recipe has run that reads it.
class UsedAtOnce final : public Source {
 public:
  explicit UsedAtOnce(SourcePtr source) : source_(std::move(source)) {}
  at::Tensor tensor() override {
    at::Tensor found = source_->tensor();
    source_->used();
    return found;
  }
  at::Tensor look() override { return source_->look(); }

 private:
  const SourcePtr source_;
};

class LetsGoEarly final : public EngineRecipeHost {
 public:
  using EngineRecipeHost::EngineRecipeHost;
  SourcePtr save(const KnownTensor& tensor) override {
    return std::make_shared<UsedAtOnce>(EngineRecipeHost::save(tensor));
  }
};

// A source of a kind that stays, whose version the engine does not check.
class ChecksNothing final : public EngineRecipeHost {
 public:
  using EngineRecipeHost::EngineRecipeHost;
  SourcePtr keep(const KnownTensor& tensor, Standing) override {
    return std::make_shared<Unchecked>(tensor.lock());
  }
};

// Memory under a parameter that comes and goes, which is taken for memory that stays.
class TakesAllForTheModels final : public EngineRecipeHost {
 public:
  using EngineRecipeHost::EngineRecipeHost;
  Standing standing(const KnownTensor& tensor) override {
    return tensor.view.of_leaf() ? Standing::kPersistent : EngineRecipeHost::standing(tensor);
  }
};

constexpr int64_t kRows = 64;
constexpr int64_t kWideBytes = kRows * kRows * 4, kNarrowBytes = kRows * kRows * 2;

// An engine whose storages go to a pool, or are recomputed.
struct Recomputing {
  template <class RecipesHost>
  explicit Recomputing(std::type_identity<RecipesHost>, int proofs = 1) {
    const auto sender = std::make_shared<BlockSender>(lane, pool);
    engine = testing::hosted_engine(testing::transfers_by(sender)).engine;
    engine->set_policy({.min_bytes = 1, .action = Action::kRecompute});
    engine->set_recipes(std::make_shared<Recipes>(OperatorRules(),
                                                  std::make_unique<RecipesHost>(engine),
                                                  Recipes::Options{.proofs = proofs}));
  }

  EntryPtr save(const at::Tensor& tensor) {
    const Locked locked(engine->lock);
    const SavedView view = *SavedView::capture(tensor);
    const SaveResult saved =
        engine->save({.tensor = tensor, .view = view, .scope = scope, .number = number++});
    EXPECT_TRUE(saved.moves);
    auto entry = std::static_pointer_cast<Entry>(saved.known);
    entry->add_handle();
    return entry;
  }

  // A stream, the sum of it and an addend that is gone when the sum is saved, and a product.
  std::vector<EntryPtr> forward() {
    engine->next_iteration();
    engine->recipes()->begin_iteration();
    engine->recipes()->log().enter();
    number = 0;
    std::vector<EntryPtr> saved;
    const at::Tensor stream = at::mm(leaf, leaf);
    saved.push_back(save(stream));
    const at::Tensor sum = at::add(stream, at::mm(leaf, leaf).to(at::kBFloat16).cumsum(0));
    saved.push_back(save(sum));
    saved.push_back(save(at::mm(sum, sum)));
    engine->recipes()->log().leave();
    return saved;
  }

  // What the account has of a forward when the choice is made: the recipe's sum is not there.
  int64_t away_bytes() {
    for (int iteration = 0; iteration < 3; ++iteration) {
      std::vector<EntryPtr> saved = forward();
      for (; !saved.empty(); saved.pop_back()) {
        engine->demand(saved.back());
      }
    }
    const std::vector<EntryPtr> saved = forward();
    EXPECT_NE(std::dynamic_pointer_cast<RecipeForm>(saved[1]->away()), nullptr);
    return engine->ledger.counters.away_bytes;
  }

  // What the account has at most while the recipe of the sum runs, and after that.
  std::pair<int64_t, int64_t> run_bytes() {
    away_bytes();
    const std::vector<EntryPtr> saved = forward();
    for (size_t index = 0; index < engine->iteration()->size(); ++index) {
      while (!engine->iteration()->entry(index)->notice_gone(/*wait=*/true)) {
        std::this_thread::yield();  // the lane still holds what it has sent
      }
    }
    engine->ledger.reset();
    const Counters& counters = engine->ledger.counters;
    const int64_t before = counters.resident_bytes;
    engine->demand(saved[1]);
    return {counters.peak_resident_bytes - before, counters.resident_bytes - before};
  }

  // What a demand sees after a parameter that its recipe reads was edited, of which nobody has
  // heard.
  Seen after_an_edit() {
    engine->set_persistent({leaf});
    for (int iteration = 0; iteration < 3; ++iteration) {
      forward_of_one();
      engine->demand(one);
      one.reset();
    }
    const at::Tensor expected = forward_of_one();
    EXPECT_NE(std::dynamic_pointer_cast<RecipeForm>(one->away()), nullptr);
    {
      const at::NoGradGuard no_grad;
      leaf.mul_(2);
    }
    try {
      return same_bytes(engine->demand(one)->storage, expected.storage()) ? Seen::kRight
                                                                          : Seen::kWrong;
    } catch (const EditedInPlace&) {
      return Seen::kRefused;
    }
  }

  // What a demand sees after other weights were gathered to the memory under a leaf, which is none
  // of the model's own parameters. torch counts no edit of it.
  Seen after_other_weights_came() {
    engine->set_persistent({leaf});
    const at::Tensor gathered = at::randn({kRows, kRows}).requires_grad_();
    return after_a_change_under(gathered, [&] { bytes_of(gathered.storage())[17].add_(1); });
  }

  // What a demand sees after memory that was lent to a parameter of the model's was taken back.
  Seen after_its_memory_was_taken_back() {
    const at::Tensor weight = at::randn({kRows, kRows}).requires_grad_();
    engine->set_persistent({leaf, weight});
    const StorageRef slot(at::randn({kRows, kRows}).storage());
    StorageRef shell(weight.storage());
    const std::string message = "its weights are gathered no longer";
    take_back(shell, message);
    return after_a_change_under(
        weight, [&] { take_back(shell, message); },
        [&] { lend(shell, slot, 0, slot.storage.nbytes()); });
  }

  // What the demands of three forwards see, where the memory under a leaf changes before each.
  Seen after_a_change_under(
      const at::Tensor& weight, const std::function<void()>& change,
      const std::function<void()>& begin = [] {}) {
    Seen seen = Seen::kRight;
    for (int iteration = 0; iteration < 3 && seen == Seen::kRight; ++iteration) {
      begin();
      const at::Tensor expected = forward_of_one(weight);
      change();
      try {
        seen = same_bytes(engine->demand(one)->storage, expected.storage()) ? Seen::kRight
                                                                            : Seen::kWrong;
      } catch (const TransferError&) {
        seen = Seen::kRefused;
      }
      one.reset();
    }
    return seen;
  }

  // Saves one storage that an operator makes of a parameter, and gives a copy of it.
  at::Tensor forward_of_one() { return forward_of_one(leaf); }

  at::Tensor forward_of_one(const at::Tensor& parameter) {
    engine->next_iteration();
    engine->recipes()->begin_iteration();
    engine->recipes()->log().enter();
    number = 0;
    const at::Tensor made = at::silu(parameter);
    one = save(made);
    engine->recipes()->log().leave();
    return made.detach().clone();
  }

  EntryPtr one;

  static constexpr size_t kBudget = 1 << 20;
  const std::shared_ptr<Pool> pool = std::make_shared<Pool>(
      std::make_shared<BudgetedSlabs>(std::make_shared<OrdinarySlabs>(), kBudget),
      PoolOptions{.slab_bytes = kBudget, .alignment = 512});
  const std::shared_ptr<WorkerLane> lane = std::make_shared<WorkerLane>(2, kBudget);
  EnginePtr engine;
  const at::Tensor leaf = at::randn({kRows, kRows}).requires_grad_();
  HookScope scope{.unit = "unit", .covered = true};
  int64_t number = 0;
};

TEST(RecipeMutations, AHeldSourceInNoAccount) {
  EXPECT_EQ(Recomputing(std::type_identity<EngineRecipeHost>()).away_bytes(),
            2 * kWideBytes + kNarrowBytes);
  EXPECT_EQ(Recomputing(std::type_identity<InNoAccount>()).away_bytes(), 2 * kWideBytes)
      << "the mutation struck nothing";
}

TEST(RecipeMutations, ASourceThatIsInNoAccountWhileItsRecipeRuns) {
  // The stream, which autograd will ask for, the addend, and their sum, which backward holds.
  EXPECT_EQ(Recomputing(std::type_identity<EngineRecipeHost>()).run_bytes(),
            std::pair(2 * kWideBytes + kNarrowBytes, kWideBytes));
  EXPECT_EQ(Recomputing(std::type_identity<LetsGoEarly>()).run_bytes(),
            std::pair(2 * kWideBytes, kWideBytes))
      << "the mutation struck nothing";
}

TEST(RecipeMutations, AnEditThatTheEngineDoesNotCheck) {
  EXPECT_EQ(Recomputing(std::type_identity<EngineRecipeHost>()).after_an_edit(), Seen::kRefused);
  EXPECT_EQ(Recomputing(std::type_identity<ChecksNothing>()).after_an_edit(), Seen::kWrong)
      << "the mutation struck nothing";
}

TEST(RecipeMutations, AGatheredWeightThatIsTakenForTheModelsOwn) {
  EXPECT_EQ(
      Recomputing(std::type_identity<EngineRecipeHost>(), /*proofs=*/0).after_other_weights_came(),
      Seen::kRight);
  EXPECT_EQ(Recomputing(std::type_identity<TakesAllForTheModels>(), /*proofs=*/0)
                .after_other_weights_came(),
            Seen::kWrong)
      << "the mutation struck nothing";
}

TEST(RecipeMutations, LentMemoryThatIsTakenForMemoryThatStays) {
  if (!can_lend()) {
    GTEST_SKIP() << "this torch lends no memory";
  }
  EXPECT_EQ(Recomputing(std::type_identity<EngineRecipeHost>(), /*proofs=*/0)
                .after_its_memory_was_taken_back(),
            Seen::kRight);
  EXPECT_EQ(Recomputing(std::type_identity<TakesAllForTheModels>(), /*proofs=*/0)
                .after_its_memory_was_taken_back(),
            Seen::kRefused)
      << "the mutation struck nothing";
}

TEST(RecipeMutations, AHeldSourceThatIsFreedBeforeItsReplay) {
  EXPECT_EQ(after_a_choice(std::make_unique<Host>(), false), Seen::kRight);
  EXPECT_EQ(after_a_choice(saving<Freed>(), false), Seen::kWrong) << "the mutation struck nothing";
}

TEST(RecipeMutations, AnEditOfAHeldSourceThatIsNotChecked) {
  EXPECT_EQ(after_a_choice(std::make_unique<Host>(), true), Seen::kRefused);
  EXPECT_EQ(after_a_choice(saving<Unchecked>(), true), Seen::kWrong)
      << "the mutation struck nothing";
}

TEST(RecipeMutations, AVersionThatIsNotChecked) {
  EXPECT_EQ(after_an_edit(std::make_unique<Host>()), Seen::kRefused);
  EXPECT_EQ(after_an_edit(keeping<Unchecked>()), Seen::kWrong) << "the mutation struck nothing";
}

TEST(RecipeMutations, AnInputThatIsFreedBeforeItsReplay) {
  EXPECT_EQ(after_its_source_is_dropped(std::make_unique<Host>()), Seen::kRight);
  EXPECT_EQ(after_its_source_is_dropped(keeping<Freed>()), Seen::kWrong)
      << "the mutation struck nothing";
}

TEST(RecipeMutations, ADifferingPlaceThatIsUsed) {
  EXPECT_EQ(at_a_place_that_differs(Recipes::kProofs), Seen::kRight);
  EXPECT_EQ(at_a_place_that_differs(0), Seen::kWrong) << "the mutation struck nothing";
}

}  // namespace
}  // namespace memswap
