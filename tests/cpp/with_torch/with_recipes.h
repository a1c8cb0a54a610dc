// What tests of recipes share: an engine that keeps tensors, and recipes of it.
#pragma once

#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "engine/recipes.h"

namespace memswap {

// A tensor that stays, as an engine keeps it: with autograd's check of its version.
class Kept : public Source {
 public:
  explicit Kept(at::Tensor tensor, int* used = nullptr)
      : tensor_(std::move(tensor)), version_(tensor_._version()), used_(used) {}
  at::Tensor tensor() override {
    if (static_cast<uint32_t>(tensor_._version()) != version_) {
      throw std::runtime_error("modified by an inplace operation");
    }
    return tensor_;
  }
  at::Tensor look() override { return tensor_; }
  void used() override {
    if (used_ != nullptr) {
      ++*used_;
    }
  }

 private:
  const at::Tensor tensor_;
  const uint32_t version_;
  int* const used_;
};

// An engine that has saved all tensors that are alive, but for those in `unknown`.
class Host : public RecipeHost {
 public:
  Standing standing(const KnownTensor& tensor) override {
    const bool hidden = unknown.defined() && tensor.key() == known(unknown);
    return hidden || tensor.storage.expired() ? Standing::kUnknown : Standing::kSaved;
  }
  int depth(const KnownTensor&) override { return 0; }
  std::optional<size_t> index_of(const KnownTensor&) override { return std::nullopt; }
  SourcePtr keep(const KnownTensor& tensor, Standing) override {
    ++kept;
    return std::make_shared<Kept>(tensor.lock(), &used);
  }
  bool can_save(const KnownTensor& tensor) override { return saves && !tensor.storage.expired(); }
  bool could_save(const KnownTensor&) override { return saves; }
  SourcePtr save(const KnownTensor& tensor) override {
    ++saved;
    return std::make_shared<Kept>(tensor.lock());
  }
  at::Tensor look(const KnownTensor& tensor) override { return tensor.lock(); }
  void serialise(const std::function<void()>& work) override { work(); }
  void made(int64_t nbytes) override { told.push_back(nbytes); }

  static const void* known(const at::Tensor& tensor) {
    return tensor.storage().unsafeGetStorageImpl();
  }

  at::Tensor unknown;
  bool saves = false;
  int kept = 0;
  int saved = 0;
  int used = 0;               // sources, as often as that was told
  std::vector<int64_t> told;  // of what was made
};

class WithRecipes : public ::testing::Test {
 protected:
  explicit WithRecipes(int proofs = 0, std::unique_ptr<Host> made = std::make_unique<Host>())
      : WithRecipes(Recipes::Options{.proofs = proofs}, std::move(made)) {}
  explicit WithRecipes(Recipes::Options options,
                       std::unique_ptr<Host> made = std::make_unique<Host>())
      : recipes(std::make_shared<Recipes>(OperatorRules(), std::move(made), options)),
        host(static_cast<Host&>(recipes->host())) {
    recipes->log().enter();
  }
  ~WithRecipes() override { recipes->log().leave(); }

  RecipeAnswer offer(const at::Tensor& tensor, int64_t number = 0, bool leaves = true) {
    return recipes->offer(std::make_shared<StorageRef>(tensor.storage()),
                          *SavedView::capture(tensor),
                          {.unit = "unit",
                           .number = number,
                           .nbytes = static_cast<int64_t>(tensor.storage().nbytes()),
                           .dtype = tensor.scalar_type()},
                          {.most_extra = 0.75, .leaves = leaves});
  }

  static bool comes_back(AwayForm& form, const at::Tensor& expected) {
    const Returning back = form.bring();
    return same_bytes(back.storage->storage, expected.storage());
  }

  const std::shared_ptr<Recipes> recipes;
  Host& host;
  const at::Tensor x = at::randn({64, 64});
};

}  // namespace memswap
