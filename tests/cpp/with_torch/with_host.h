// What tests of an engine share: who made it, and what its storages leave by.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "engine/engine.h"
#include "engine/recipe_host.h"

namespace memswap::testing {

// Everything of the one device that there is leaves by a sender; no codec serves it.
class OneSender final : public Transfers::Opener {
 public:
  explicit OneSender(std::shared_ptr<BlockSender> sender) : sender_(std::move(sender)) {}
  std::shared_ptr<BlockSender> open_blocks() override { return sender_; }
  std::shared_ptr<FrameSender> open_frames(Form) override { return nullptr; }
  void begin(int64_t, int64_t) override {}

 private:
  const std::shared_ptr<BlockSender> sender_;
};

inline TransfersPtr transfers_by(std::shared_ptr<BlockSender> sender, Transfers::Traits traits = {},
                                 c10::Device device = c10::kCPU) {
  return std::make_shared<Transfers>(
      device,
      std::make_shared<Expectations>(Expectations::Device{.worst_case = true}, ExpectationLimits{}),
      std::make_unique<OneSender>(std::move(sender)), traits);
}

// Answers as a test says, and counts how often it was asked.
class Host final : public EngineHost {
 public:
  explicit Host(TransfersPtr transfers) : transfers(std::move(transfers)) {}

  std::optional<Action> decide(Engine&, const Offer&) override {
    ++asked;
    if (meanwhile) {
      std::exchange(meanwhile, nullptr)();
    }
    return says;
  }
  std::optional<Action> direct(Engine&, const Offer&, Action) override {
    ++asked;
    return directs;
  }
  TransfersPtr open(Engine&, c10::Device) override {
    ++opened;
    return transfers;
  }
  void begin_iteration(Engine& engine) override { engine.next_iteration(); }
  void open_recipes(Engine& engine) override {
    if (!engine.recipes()) {
      engine.set_recipes(std::make_shared<Recipes>(OperatorRules(),
                                                   recipe_host(engine.weak_from_this()),
                                                   Recipes::Options{.proofs = proofs}));
    }
  }

  TransfersPtr transfers;
  std::function<std::unique_ptr<RecipeHost>(std::weak_ptr<Engine>)> recipe_host =
      [](std::weak_ptr<Engine> engine) { return std::make_unique<EngineRecipeHost>(engine); };
  std::optional<Action> says, directs;
  std::function<void()> meanwhile;  // is done while `decide` is asked for the first time
  int asked = 0, opened = 0;
  int proofs = 0;
};

// An engine whose storages leave by `transfers`, and the host that it owns.
struct HostedEngine {
  EnginePtr engine;
  Host& host;
};

inline HostedEngine hosted_engine(TransfersPtr transfers, int64_t prefetch_bytes = 0,
                                  Schedule schedule = Schedule::kIterations) {
  auto owned = std::make_unique<Host>(std::move(transfers));
  Host& host = *owned;
  return {std::make_shared<Engine>(prefetch_bytes, schedule, std::move(owned)), host};
}

}  // namespace memswap::testing
