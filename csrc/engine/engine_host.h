// EngineHost: what an engine asks of whoever made it, and tells it.
#pragma once

#include <c10/core/Device.h>

#include <optional>
#include <string>

#include "action.h"
#include "transfers.h"

namespace memswap {

class Engine;
struct Offer;

// The only calls out of an engine, for what data cannot answer. None is made about a storage that a
// plan expects. Each but `decide` and `warn` is made with the engine's lock held, and may call
// nothing that takes it ([Note: The engine's lock and the GIL] in lock.h).
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
  // stay. Once more with the `form` in which a storage leaves for the first time: from then on the
  // transfers have a sender of that form, unless no codec serves the device.
  virtual TransfersPtr open(Engine& engine, c10::Device device, std::optional<Form> form) = 0;
  // A tensor is saved after backward began, so a new forward has begun.
  virtual void begin_iteration(Engine& engine) = 0;
  // The user is to be told something ([Note: Warnings come last] in ledger.h). May throw what comes
  // of that.
  virtual void warn(const std::string& message) = 0;
};

}  // namespace memswap
