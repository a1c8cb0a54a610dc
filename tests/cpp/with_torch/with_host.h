// What tests of an engine share: who made it, and what its storages leave by.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine.h"

namespace memswap::testing {

// Everything of the one device that there is leaves by a sender; no codec serves it.
inline TransfersPtr transfers_by(std::shared_ptr<BlockSender> sender, Transfers::Traits traits = {},
                                 c10::Device device = c10::kCPU) {
  auto made = std::make_shared<Transfers>(
      device,
      std::make_shared<Expectations>(Expectations::Device{.worst_case = true}, ExpectationLimits{}),
      traits);
  made->set_blocks(std::move(sender));
  return made;
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
  TransfersPtr open(Engine&, c10::Device, std::optional<Form> form) override {
    opened += form ? 0 : 1;
    return transfers;
  }
  void begin_iteration(Engine& engine) override { engine.next_iteration(); }
  void warn(const std::string& message) override { told.push_back(message); }

  TransfersPtr transfers;
  std::optional<Action> says, directs;
  std::function<void()> meanwhile;  // is done while `decide` is asked for the first time
  int asked = 0, opened = 0;
  std::vector<std::string> told;
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
