// What recipes are safe by, each broken on purpose: without it the bytes would be other ones, and
// the test that a whole part passes says so.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

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

Recipes::Answer offer(Recipes& recipes, const at::Tensor& made) {
  return recipes.offer(std::make_shared<StorageRef>(made.storage()), *SavedView::capture(made),
                       {.unit = "unit",
                        .number = 0,
                        .nbytes = static_cast<int64_t>(made.storage().nbytes()),
                        .dtype = made.scalar_type()},
                       0.75, /*leaves=*/true);
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
  const Recipes::Answer answer = offer(*recipes, made);
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
    const Recipes::Answer answer = offer(*recipes, made);
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
    const Recipes::Answer answer = offer(*recipes, total);
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

class BrokenSaver final : public Host {
 public:
  using Make = std::function<SourcePtr(const at::Tensor&)>;
  explicit BrokenSaver(Make make) : make_(std::move(make)) {}
  SourcePtr save(const KnownTensor& tensor) override { return make_(tensor.lock()); }

 private:
  const Make make_;
};

template <class Broken>
std::unique_ptr<Host> saving() {
  return std::make_unique<BrokenSaver>(
      [](const at::Tensor& tensor) { return std::make_shared<Broken>(tensor); });
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
