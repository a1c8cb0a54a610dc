// Recipes: what they read, that they give the same bytes, and what is proven before.
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/_softmax.h>
#include <ATen/ops/add.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/native_layer_norm.h>
#include <ATen/ops/neg.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/where.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "with_recipes.h"

namespace memswap {
namespace {

TEST_F(WithRecipes, TheOperatorGivesTheSameBytesAsOftenAsItIsAskedFor) {
  for (const at::Tensor& made :
       {at::silu(x), at::mul(x, x.t()), x.to(at::kBFloat16), at::add(x, 2.5),
        at::cat({x, x.exp()}, 1), at::constant_pad_nd(x, {1, 2}, 3.0), at::gelu(x, "tanh"),
        at::sum(x, {0}), at::_softmax(x, 1, false), at::where(x > 0, x, x.neg()),
        x.repeat({2, 1})}) {
    const RecipeAnswer answer = offer(made);
    ASSERT_TRUE(answer.leaving) << made.sizes();
    EXPECT_TRUE(answer.leaving->departure->done());
    EXPECT_EQ(answer.leaving->away->device_nbytes(), 0u);
    for (int times = 0; times < 2; ++times) {
      EXPECT_TRUE(comes_back(*answer.leaving->away, made)) << made.sizes();
    }
  }
}

TEST_F(WithRecipes, WhatNothingIsKnownOfStays) {
  EXPECT_FALSE(offer(at::mm(x, x)).leaving);
  EXPECT_FALSE(offer(x).leaving);
  at::Tensor edited = at::exp(x);
  edited.add_(1);
  EXPECT_FALSE(offer(edited).leaving);
}

TEST_F(WithRecipes, AnInputThatIsGoneIsMadeAgainToo) {
  const at::Tensor made = at::exp(at::mul(at::silu(x), 2.0));
  const RecipeAnswer answer = offer(made);
  ASSERT_TRUE(answer.leaving);
  EXPECT_EQ(host.kept, 1);
  const auto form = std::dynamic_pointer_cast<RecipeForm>(answer.leaving->away);
  EXPECT_EQ(words_of(form->step()), "exp(mul(silu(saved)))");
  EXPECT_TRUE(comes_back(*form, made));
}

// Two of a row of calls are there at once: what one reads, and what it makes.
TEST_F(WithRecipes, WhatIsMadeOnTheWayIsToldUntilTheRunIsOver) {
  const auto nbytes = static_cast<int64_t>(x.storage().nbytes());
  const at::Tensor made = at::exp(at::mul(at::silu(x), 2.0));
  const RecipeAnswer answer = offer(made);
  ASSERT_TRUE(answer.leaving);
  EXPECT_TRUE(comes_back(*answer.leaving->away, made));
  EXPECT_EQ(host.told, (std::vector<int64_t>{nbytes, 2 * nbytes, 2 * nbytes, 0}));
}

// What two calls read is there until both have run.
TEST_F(WithRecipes, WhatTwoCallsReadIsToldUntilBothHaveRun) {
  const auto nbytes = static_cast<int64_t>(x.storage().nbytes());
  at::Tensor read = at::silu(x);
  const at::Tensor made = at::mul(at::exp(read), at::neg(read));
  read.reset();
  const RecipeAnswer answer = offer(made);
  ASSERT_TRUE(answer.leaving);
  EXPECT_TRUE(comes_back(*answer.leaving->away, made));
  EXPECT_EQ(host.told, (std::vector<int64_t>{nbytes, 2 * nbytes, 3 * nbytes, 3 * nbytes, 0}));
}

// A recipe's sources are its own until it has run, also where the run breaks off.
TEST_F(WithRecipes, SourcesAreUsedUntilTheRunIsOver) {
  const at::Tensor source = at::randn({64, 64});
  const RecipeAnswer answer = offer(at::silu(source));
  ASSERT_TRUE(answer.leaving);
  answer.leaving->away->bring();
  EXPECT_EQ(host.used, 1);
  source.storage().unsafeGetStorageImpl()->set_nbytes(0);
  EXPECT_THROW(answer.leaving->away->bring(), TransferError);
  EXPECT_EQ(host.used, 2);
  EXPECT_EQ(host.told.back(), 0);
}

TEST_F(WithRecipes, SomethingSmallerIsKeptInPlaceOfTheResult) {
  const at::Tensor small = at::mm(x, x).to(at::kBFloat16);
  host.unknown = small;
  const at::Tensor narrow = at::bmm(small.unsqueeze(0), small.unsqueeze(0));
  host.unknown = narrow;
  const at::Tensor wide = narrow.to(at::kFloat), equal = at::exp(narrow);
  EXPECT_FALSE(offer(wide, 1).leaving) << "the engine cannot save it";
  host.saves = true;
  EXPECT_FALSE(offer(equal, 2).leaving) << "it takes as many bytes as it frees";
  const RecipeAnswer answer = offer(wide, 3);
  ASSERT_TRUE(answer.leaving);
  EXPECT_EQ(host.saved, 1);
  EXPECT_TRUE(comes_back(*answer.leaving->away, wide));
}

TEST_F(WithRecipes, OneRunServesAllResultsOfAnOperator) {
  const auto [normed, mean, rstd] = at::native_layer_norm(x, {64}, {}, {}, 1e-5);
  const RecipeAnswer first = offer(normed, 1), second = offer(rstd, 2);
  ASSERT_TRUE(first.leaving && second.leaving);
  int changes = 0;
  first.leaving->away->on_change([&] { ++changes; });
  EXPECT_TRUE(comes_back(*second.leaving->away, rstd));
  EXPECT_EQ(changes, 1) << "whoever counts what the form takes has to hear of it";
  EXPECT_EQ(first.leaving->away->device_nbytes(), normed.storage().nbytes());
  EXPECT_TRUE(same_bytes(first.leaving->away->look().storage->storage, normed.storage()));
  EXPECT_EQ(first.leaving->away->device_nbytes(), normed.storage().nbytes()) << "a look took it";
  EXPECT_TRUE(comes_back(*first.leaving->away, normed));
  EXPECT_EQ(changes, 2);
  EXPECT_EQ(first.leaving->away->device_nbytes(), 0u);
  EXPECT_EQ(recipes->runs(), 1);
}

TEST_F(WithRecipes, BeforeASourceIsEditedItsRecipesAreRun) {
  at::Tensor source = at::randn({64, 64});
  const at::Tensor made = at::silu(source);
  const RecipeAnswer answer = offer(made);
  ASSERT_TRUE(answer.leaving);
  source.mul_(2);
  EXPECT_EQ(answer.leaving->away->device_nbytes(), made.storage().nbytes());
  for (int times = 0; times < 2; ++times) {
    Returning back = answer.leaving->away->bring();
    EXPECT_TRUE(same_bytes(back.storage->storage, made.storage()));
    bytes_of(back.storage->storage).zero_();  // whoever got it may edit it
  }
}

TEST_F(WithRecipes, AnEditThatNobodySawIsRefusedAtTheDemand) {
  at::Tensor source = at::randn({64, 64});
  const RecipeAnswer answer = offer(at::silu(source));
  ASSERT_TRUE(answer.leaving);
  recipes->log().leave();
  source.mul_(2);
  recipes->log().enter();
  EXPECT_THROW(answer.leaving->away->bring(), std::runtime_error);
}

TEST_F(WithRecipes, MemoryThatWasTakenAwayIsRefusedAtTheDemand) {
  const at::Tensor source = at::randn({64, 64});
  const RecipeAnswer answer = offer(at::silu(source));
  ASSERT_TRUE(answer.leaving);
  source.storage().unsafeGetStorageImpl()->set_nbytes(0);
  EXPECT_THROW(answer.leaving->away->bring(), TransferError);
}

TEST_F(WithRecipes, SettingsAreThoseOfTheForward) {
  const at::Tensor numbers = at::arange(64, at::kLong);
  const at::Tensor made = at::mul(numbers, 2.5);  // of the default dtype
  const RecipeAnswer answer = offer(made);
  ASSERT_TRUE(answer.leaving);
  c10::set_default_dtype(caffe2::TypeMeta::Make<double>());
  const bool right = comes_back(*answer.leaving->away, made);
  const bool restored = c10::get_default_dtype_as_scalartype() == at::kDouble;
  c10::set_default_dtype(caffe2::TypeMeta::Make<float>());
  EXPECT_TRUE(right);
  EXPECT_TRUE(restored);
}

class WithProofs : public WithRecipes {
 protected:
  WithProofs() : WithRecipes(2) {}
};

TEST_F(WithProofs, APlaceBecomesARecipeOnceItHasPassedTwice) {
  for (int iteration = 0; iteration < 2; ++iteration) {
    recipes->begin_iteration();
    const at::Tensor made = at::silu(x);
    const RecipeAnswer answer = offer(made);
    EXPECT_FALSE(answer.leaving);
    ASSERT_TRUE(answer.trial);
    answer.trial->demanded(0);
    answer.trial->demanded(0);  // a second backward says nothing new
  }
  recipes->begin_iteration();
  const at::Tensor made = at::silu(x);
  const RecipeAnswer answer = offer(made);
  ASSERT_TRUE(answer.leaving);
  EXPECT_TRUE(comes_back(*answer.leaving->away, made));
  recipes->begin_iteration();
  EXPECT_FALSE(offer(at::exp(x)).leaving) << "another operator at the same place begins anew";
}

TEST_F(WithProofs, WhoPlansIsToldWhatIsProvenAndNothingLeaves) {
  for (int iteration = 0; iteration < 2; ++iteration) {
    recipes->begin_iteration();
    const at::Tensor made = at::silu(x);
    const RecipeAnswer answer = offer(made, 0, /*leaves=*/false);
    EXPECT_FALSE(answer.proven);
    answer.trial->demanded(0);
  }
  recipes->begin_iteration();
  const at::Tensor made = at::silu(x);
  const RecipeAnswer answer = offer(made, 0, /*leaves=*/false);
  ASSERT_TRUE(answer.proven);
  EXPECT_FALSE(answer.leaving);
  EXPECT_EQ(answer.proven->words, "silu(saved)");
  EXPECT_EQ(answer.proven->saved.size(), 1u);
  EXPECT_GT(answer.proven->seconds, 0);
  EXPECT_EQ(answer.proven->made_nbytes, static_cast<int64_t>(made.storage().nbytes()));
  EXPECT_EQ(host.kept, 0);
  // Of two at one place nobody can say which one the proofs were of.
  EXPECT_FALSE(offer(made, 0, /*leaves=*/false).proven);
}

TEST_F(WithProofs, APlaceThatDifferedNeverIsARecipe) {
  for (int iteration = 0; iteration < 4; ++iteration) {
    recipes->begin_iteration();
    const at::Tensor made = at::silu(x);
    if (iteration == 0) {  // as a kernel that gives other bits each time would
      const OperatorLog::Unobserved unseen;
      bytes_of(made.storage())[17].add_(1);
    }
    const RecipeAnswer answer = offer(made);
    EXPECT_FALSE(answer.leaving) << iteration;
    if (answer.trial) {
      answer.trial->demanded(0);
    }
  }
  EXPECT_TRUE(recipes->learnt().at(0).second.failed);
}

TEST_F(WithProofs, UnderOtherSettingsAPlaceIsProvenAnew) {
  const auto trains = [&] {
    recipes->begin_iteration();
    const at::Tensor made = at::silu(x);
    const RecipeAnswer answer = offer(made);
    if (answer.trial) {
      answer.trial->demanded(0);
    }
    return answer.leaving.has_value();
  };
  EXPECT_FALSE(trains() || trains());
  EXPECT_TRUE(trains());
  at::globalContext().setDeterministicAlgorithms(true, true);
  const bool anew = trains();
  at::globalContext().setDeterministicAlgorithms(false, false);
  EXPECT_FALSE(anew);
}

class WithFewPlaces : public WithRecipes {
 protected:
  WithFewPlaces() : WithRecipes({.proofs = 2, .most_places = 2}) {}
};

TEST_F(WithFewPlaces, APlaceThatDifferedIsNotForgottenForOthers) {
  for (int iteration = 0; iteration < 4; ++iteration) {
    recipes->begin_iteration();
    const at::Tensor made = at::silu(x), other = at::exp(x), third = at::sin(x);
    if (iteration == 0) {
      const OperatorLog::Unobserved unseen;
      bytes_of(made.storage())[17].add_(1);
    }
    int64_t number = 0;
    for (const at::Tensor& saved : {made, other, third}) {
      const RecipeAnswer answer = offer(saved, number++);
      EXPECT_FALSE(answer.leaving) << "of which others were forgotten is never proven twice";
      if (answer.trial) {
        answer.trial->demanded(0);
      }
    }
  }
  const auto rows = recipes->learnt();
  EXPECT_TRUE(std::any_of(rows.begin(), rows.end(), [](const auto& row) {
    return row.first.number == 0 && row.second.failed;
  }));
}

TEST_F(WithProofs, APlaceWhoseSourcesAreEditedBeforeBackwardNeverIsARecipe) {
  at::Tensor source = at::randn({64, 64});
  const RecipeAnswer answer = offer(at::silu(source));
  ASSERT_TRUE(answer.trial);
  source.add_(1);
  answer.trial->demanded(0);
  EXPECT_TRUE(recipes->learnt().at(0).second.failed);
}

}  // namespace
}  // namespace memswap
