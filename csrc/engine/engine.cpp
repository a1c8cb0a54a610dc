#include "engine.h"

#include <torch/csrc/autograd/graph_task.h>

#include <chrono>
#include <optional>
#include <string>

#include "recipe_host.h"
#include "recipes.h"
#include "windows.h"

namespace memswap {

namespace {

// Waits for a ticket. Seconds for which the host was blocked.
double wait(Ticket& ticket) {
  const auto begin = std::chrono::steady_clock::now();
  ticket.wait();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// What `bring` gives, or the bytes are lost; also those of a recipe's source, which says so itself.
template <class Bring>
auto or_lost(Bring bring) {
  try {
    return bring();
  } catch (const LostBytes&) {
    throw;
  } catch (const TransferError& error) {
    throw LostBytes(std::string("a saved tensor cannot be brought back: ") + error.what());
  }
}

// Bytes of the device that a storage's frame takes, or would if it was not held at the peak.
int64_t waited_nbytes(const Entry& entry) {
  if (const AwayFormPtr away = entry.away()) {
    return static_cast<int64_t>(away->device_nbytes());
  }
  return entry.iteration() ? entry.iteration()->frame_held_at_peak(entry.index()).value_or(0) : 0;
}

// Backward has the storage now: what proves a recipe of it looks once more.
void tell_trial(const Entry& entry) {
  if (const std::shared_ptr<Trial> trial = entry.trial()) {
    trial->demanded(waited_nbytes(entry));
  }
}

}  // namespace

bool runs_backward() { return number_of_backward() != -1; }

int number_of_backward() { return torch::autograd::get_current_graph_task_id(); }

Engine::Engine(std::optional<int64_t> prefetch_bytes, Schedule schedule,
               std::unique_ptr<EngineHost> host)
    : schedule(schedule),
      windows(schedule == Schedule::kWindows ? std::make_unique<Windows>(*this) : nullptr),
      timeline(prefetch_bytes),
      host_(std::move(host)),
      iteration_(timeline.begin()) {
  if (host_) {
    ledger.warn = [this](const std::string& message) { host_->warn(message); };
  }
}

Engine::~Engine() = default;

// Brings back the storages that backward demands next, as far as there is memory.
void Engine::look_ahead(const EntryPtr& entry) {
  const IterationPtr of = entry->iteration();
  if (windows) {
    windows->look_ahead(of, entry->index());
  } else {
    of->bring_ahead(of->demand(entry->index()),
                    [](const EntryPtr& next) { return next->fetch_ahead(); });
  }
  of->at_peak.demanded(entry->index(), ledger.counters.most_lately());
}

StorageRefPtr Engine::demand_by(Caller caller, const EntryPtr& entry) {
  LockedFor locked(lock, caller);
  learn();
  const bool is_directed = planning.directed() && entry->iteration();
  if (is_directed) {
    planning.before_demand(entry);
  }
  StorageRefPtr storage = or_lost([&] { return entry->bring(); });
  const TicketPtr arrival = entry->arrival();
  if (is_directed) {
    planning.sweep_in_use();  // what recipes have read in between
  }
  if (entry->iteration()) {
    look_ahead(entry);
  }
  if (arrival) {
    double waited_s = 0;
    locked.aside([&] { waited_s = or_lost([&] { return wait(*arrival); }); });
    ledger.counters.exposed_wait_s += waited_s;
  }
  after_demand(entry, is_directed, locked);
  return storage;
}

void Engine::demand_kept_by(Caller caller, const EntryPtr& entry) {
  LockedFor locked(lock, caller);
  if (!entry->iteration()) {
    return;
  }
  const bool is_directed = planning.directed();
  if (is_directed) {
    planning.before_demand(entry);
  }
  entry->iteration()->look_at_never_freed(*entry);
  look_ahead(entry);
  after_demand(entry, is_directed, locked);
}

// Backward has the storage, in stream order.
void Engine::after_demand(const EntryPtr& entry, bool is_directed, LockedFor& locked) {
  tell_trial(*entry);
  if (!is_directed) {
    return;
  }
  if (planning.after_demand(entry)) {
    locked.aside([&] { entry->release_frame(); });
  }
  planning.record_demand(entry);
}

void Engine::tell() {
  while (ledger.has_untold()) {
    std::optional<std::string> message;
    {
      const Locked locked(lock);
      message = ledger.take_untold();
    }
    if (message) {
      ledger.warn(*message);
    }
  }
}

void Engine::open_recipes() {
  if (!recipes_) {
    recipes_ = std::make_shared<Recipes>(OperatorRules(policy_.operators),
                                         std::make_unique<EngineRecipeHost>(weak_from_this()),
                                         Recipes::Options{.proofs = policy_.proofs});
  }
}

void Engine::set_persistent(const std::vector<at::Tensor>& tensors) {
  persistent_.clear();
  for (const at::Tensor& tensor : tensors) {
    if (tensor.unsafeGetTensorImpl()->has_storage()) {
      const WeakStorage storage(StorageRef(tensor.storage()));
      persistent_.emplace(storage.key(), storage);
    }
  }
}

}  // namespace memswap
