// What an engine does for its recipes: it keeps what they read, as it keeps what autograd saves.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "engine.h"
#include "recipes.h"

namespace memswap {

class EngineRecipeHost : public RecipeHost {
 public:
  explicit EngineRecipeHost(std::weak_ptr<Engine> engine) : engine_(std::move(engine)) {}

  // For its lifetime, what is saved for a recipe is saved where its result is: like that offer.
  class Saving {
   public:
    Saving(Recipes& recipes, const Offer& offer)
        : host_(static_cast<EngineRecipeHost&>(recipes.host())) {
      host_.offer_ = &offer;
      host_.saved_ = 0;
    }
    Saving(const Saving&) = delete;
    Saving& operator=(const Saving&) = delete;
    ~Saving() { host_.offer_ = nullptr; }

   private:
    EngineRecipeHost& host_;
  };

  Standing standing(const KnownTensor& tensor) override;
  int depth(const KnownTensor& tensor) override;
  std::optional<size_t> index_of(const KnownTensor& tensor) override;
  SourcePtr keep(const KnownTensor& tensor, Standing standing) override;
  bool can_save(const KnownTensor& tensor) override;
  bool could_save(const KnownTensor& tensor) override;
  SourcePtr save(const KnownTensor& tensor) override;
  at::Tensor look(const KnownTensor& tensor) override;
  void serialise(const std::function<void()>& work) override;
  void made(int64_t nbytes) override;

 private:
  EnginePtr engine() const;

  const std::weak_ptr<Engine> engine_;
  const Offer* offer_ = nullptr;  // that is being saved now
  int64_t saved_ = 0;             // for its recipe
};

}  // namespace memswap
