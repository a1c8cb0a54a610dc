// ForwardGraph: what is chosen for a forward that was taken down, at the borders of what may be.
#include "engine/forward_graph.h"

#include <ATen/ops/exp.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/sin.h>
#include <gtest/gtest.h>

#include <memory>
#include <set>

#include "with_recipes.h"

namespace memswap {
namespace {

// Knows some storages, and can save others or not, as a test says.
class Knowing final : public Host {
 public:
  Standing standing(const KnownTensor& tensor) override {
    return there.contains(tensor.key()) ? Standing::kPersistent : Standing::kUnknown;
  }

  std::set<const void*> there;
};

class TakenDown : public ::testing::Test {
 protected:
  void SetUp() override {
    log->enter();
    host.there.insert(Host::known(x));
  }
  void TearDown() override { log->leave(); }

  void save(ForwardGraph& graph, const at::Tensor& tensor) {
    const SavedView view = *SavedView::capture(tensor);
    graph.add_saved(place_of(tensor), view, StorageRef(tensor.storage()),
                    log->maker(*KnownTensor::of(tensor)));
  }
  // A storage is told from others by its length.
  static RecipePlace place_of(const at::Tensor& tensor) {
    return {.unit = "unit",
            .number = 0,
            .nbytes = static_cast<int64_t>(tensor.storage().nbytes()),
            .dtype = tensor.scalar_type()};
  }
  static RecipeChoices choose(const ForwardGraph& graph, bool failed = false) {
    return graph.choose([](const RecipePlace&) { return 0; },
                        [=](const RecipePlace&) { return failed; });
  }
  static int depth(const RecipeShapePtr& shape) {
    return shape ? 1 + depth(shape->inputs.at(0)) : 0;
  }

  const OperatorLogPtr log = std::make_shared<OperatorLog>(OperatorRules());
  Knowing host;
  const at::Tensor x = at::randn({64, 64});
};

TEST_F(TakenDown, WhatIsMadeOfAParameterIsMadeAgain) {
  ForwardGraph graph(*log, host, 3);
  const at::Tensor y = at::silu(x);
  save(graph, y);
  const RecipeChoice choice = choose(graph).places.at(place_of(y));
  EXPECT_TRUE(choice.has_maker);
  EXPECT_EQ(depth(choice.shape), 1);
  EXPECT_EQ(choose(graph, /*failed=*/true).places.at(place_of(y)).shape, nullptr)
      << "its recipe has given other bits";
}

TEST_F(TakenDown, WhatNobodyKnowsTheMakerOfStays) {
  ForwardGraph graph(*log, host, 3);
  const at::Tensor y = at::mm(x, x);  // not of the table
  save(graph, y);
  const RecipeChoice choice = choose(graph).places.at(place_of(y));
  EXPECT_FALSE(choice.has_maker);
  EXPECT_EQ(choice.shape, nullptr);
}

TEST_F(TakenDown, NoMoreCallsInARowThanARecipeMayHave) {
  const at::Tensor first = at::silu(x), second = at::exp(first), third = at::sin(second);
  for (const int deepest : {2, 3}) {
    ForwardGraph graph(*log, host, deepest);
    save(graph, third);  // the others are nobody's by the time of backward
    EXPECT_EQ(depth(choose(graph).places.at(place_of(third)).shape), deepest == 3 ? 3 : 0);
  }
}

TEST_F(TakenDown, ACallWhoseInputWasEditedIsNotMadeAgain) {
  ForwardGraph graph(*log, host, 3);
  const at::Tensor y = at::silu(x);
  at::Tensor edited = x;
  edited.add_(1);
  save(graph, y);
  EXPECT_EQ(choose(graph).places.at(place_of(y)).shape, nullptr) << "it would read other bytes";
}

TEST_F(TakenDown, OneSourceThatAutogradDoesNotSaveIsHeldInPlaceOfSeveralThatItDoes) {
  const at::Tensor source = at::mm(x, x);
  const at::Tensor made = at::silu(source);
  const at::Tensor wide = at::exp(source).to(at::kDouble);  // another length, another place
  for (const bool can_save : {false, true}) {
    host.saves = can_save;
    ForwardGraph graph(*log, host, 3);
    save(graph, made);
    save(graph, wide);
    const RecipeChoices choices = choose(graph);
    EXPECT_EQ(choices.places.at(place_of(made)).shape != nullptr, can_save);
    EXPECT_EQ(choices.places.at(place_of(wide)).shape != nullptr, can_save);
    EXPECT_EQ(choices.holds.size(), can_save ? 2u : 0u) << "one for each call that reads it";
  }
}

TEST_F(TakenDown, WhatWasHeldForARecipeCountsAsASourceOfTheNextChoice) {
  host.saves = true;
  const at::Tensor source = at::mm(x, x), wide = at::exp(source).to(at::kDouble);
  host.there.insert(Host::known(source));  // the engine has saved it, for a recipe alone
  ForwardGraph graph(*log, host, 3);
  graph.add_held(*KnownTensor::of(source));
  save(graph, wide);
  EXPECT_EQ(choose(graph).holds.size(), 1u) << "nobody would hold it the next time";
}

TEST_F(TakenDown, AStorageThatWasNeverOfferedIsNotSavedOnceMore) {
  ForwardGraph graph(*log, host, 3);
  const at::Tensor y = at::silu(x);
  graph.add_again(*SavedView::capture(y));
  EXPECT_TRUE(choose(graph).places.empty());
}

}  // namespace
}  // namespace memswap
