// EngineHost: what an engine asks of whoever made it.
#pragma once

#include <c10/core/Device.h>

#include <optional>

#include "action.h"
#include "transfers.h"

namespace memswap {

class Engine;
struct Offer;

// The questions that data cannot answer. None is asked about a storage that a plan expects. Each
// but `decide` is asked with the engine's lock held, and may call nothing that takes it
// ([Note: The engine's lock and the GIL] in lock.h).
class EngineHost {
 public:
  EngineHost() = default;
  EngineHost(const EngineHost&) = delete;
  EngineHost& operator=(const EngineHost&) = delete;
  virtual ~EngineHost() = default;

  // A function of the user's says what is done with a storage. Nothing: what suits the device. The
  // lock is not held: that function may do whatever it likes.
  virtual std::optional<Action> decide(Engine& engine, const Offer& offer) = 0;
  // Under a budget, what is done with a storage that is about to be saved. Nothing: `action`.
  virtual std::optional<Action> direct(Engine& engine, const Offer& offer, Action action) = 0;
  // A device is seen for the first time: the transfers that its storages leave by. nullptr: they
  // stay.
  virtual TransfersPtr open(Engine& engine, c10::Device device) = 0;
  // A tensor is saved after backward began, so a new forward has begun.
  virtual void begin_iteration(Engine& engine) = 0;
  // A storage is to be recomputed: `Engine::recipes` are there from now on.
  virtual void open_recipes(Engine& engine) = 0;
};

}  // namespace memswap
