// Engine: what becomes of the storages that autograd saves.
//
// From pack to unpack: a tensor is offered (`save`); its storage is known already, or becomes an
// Entry; the plan, the policy and the iteration say whether it stays; a sender sends it. In
// backward a handle demands the storage (`demand`), which comes back or is on its way already, and
// with it what is demanded next.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "block_form.h"
#include "departing.h"
#include "entry.h"
#include "host.h"
#include "iteration.h"
#include "ledger.h"
#include "lock.h"
#include "recomputed.h"
#include "storage/saved_view.h"

namespace memswap {

// The bytes that a demand has waited for did not come.
struct LostBytes : TransferError {
  using TransferError::TransferError;
};

// A policy as data: what is done with storages that nobody has to be asked about.
struct PolicyTable {
  enum class Action : uint8_t { kAsk, kKeep, kSwap };

  struct DeviceRow {
    c10::Device device;
    Action action;                        // of a policy that names none
    std::shared_ptr<BlockSender> sender;  // of what is swapped
  };

  int64_t min_bytes = 0;         // storages of fewer stay
  Action action = Action::kAsk;  // kAsk: somebody decides, or a device's row
  bool by_device = false;        // the policy names no action
  std::vector<DeviceRow> devices;
};

// A tensor that is saved, and who saves it.
struct Offer {
  const at::Tensor& tensor;
  const SavedView& look;
  std::string_view unit;
  int64_t group;     // a checkpoint region's number, or Iteration::kNoGroup
  bool covered;      // the policy covers the unit
  bool has_action;   // who saves it has an action of its own
  int64_t& ordinal;  // of the unit's last storage
};

// What became of a tensor.
struct Saved {
  enum class As : uint8_t {
    kAsked,  // nothing yet: somebody has to decide
    kKept,   // it stays; `known` stands for its storage, or nobody does
    kMoved,  // its storage leaves, or has left; `known` is its entry
  };
  As as = As::kAsked;
  KnownPtr known;
};

// Nothing in it is shared with another engine. Hooks may be called from any thread; `lock`
// serialises the bookkeeping, and no transfer ever waits for it.
class Engine : public std::enable_shared_from_this<Engine> {
 public:
  static constexpr const char* kPlanned = "planned";

  explicit Engine(std::optional<int64_t> window_bytes)
      : host(std::make_unique<NoHost>()), timeline(window_bytes), iteration(timeline.begin()) {}
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // --- save (save.cpp). The caller holds the lock. ---

  // A plain tensor is saved.
  Saved save(const Offer& offer);
  // The same as the plan of the current iteration says, where it expects just this storage; kAsked
  // where it does not, and nothing has happened.
  Saved follow_plan(const Offer& offer);
  // A tensor stays, and nothing is known of its storage.
  Saved keep(const SavedView& look, std::string_view reason);
  // A tensor stays for good, and its storage is known: once, however often it is saved.
  Saved stay(const SavedView& look, std::string_view reason);
  // The entry of what the iteration admitted last.
  EntryPtr make_entry(const at::Tensor& tensor, const SavedView& look, StorageRefPtr& storage);
  // Makes it and sends it.
  Saved swap(const at::Tensor& tensor, const SavedView& look, BlockSender& sender, EntryPtr& entry);
  // A sender has no room for a storage: told once. The reason for the statistics, which is
  // `short_of`.
  const char* refused(const char* short_of, const std::string& why, const Entry& entry);

  // --- demand (demand.cpp). Neither takes the lock for the wait. ---

  // The storage of an entry, ordered before what the caller does next. Throws LostBytes.
  StorageRefPtr demand(const EntryPtr& entry);
  // A storage that stayed is demanded: what comes next may have to come back.
  void demand_kept(const EntryPtr& entry);

  // --- under a plan (follow_plan.cpp) ---

  // What follows the save of an entry: what has to be gone by then is waited for, and who takes the
  // iteration down hears of it.
  void saved(const EntryPtr& entry);
  // What comes next comes after a storage of an iteration has left, if it is leaving or waits to.
  void release(Iteration& of, size_t index);
  // Notices what was released, was still held then, and is gone by now.
  static void look_at_released(Iteration& of);
  // Bytes on the device at this moment of the plan, and so many more.
  void note_peak(Iteration& of, int64_t more_bytes = 0) const;

  // --- what is there beside entries, and beside operators (follow_plan.cpp) ---

  // A recomputed unit has saved a storage again, in backward.
  void count_recomputed(const StorageRef& storage);
  // An operator of so many seconds is about to be launched; codec work may run beside it.
  void note_window(double seconds) const;

  std::unique_ptr<Host> host;  // never nullptr
  Lock lock;
  Ledger ledger;
  Departing departing;
  PolicyTable policy;
  Timeline timeline;
  IterationPtr iteration;  // that saves now
  IterationPtr backward;   // whose backward runs, where it is directed
  Recomputed recomputed{ledger.counters};
  // Storages of parameters and buffers. A weak storage keeps its key from being used again.
  std::unordered_map<const void*, WeakStorage> persistent;

  bool directed = false;        // somebody directs what leaves, under a budget
  bool looks_ahead = true;      // what comes next is brought back at once, without the host
  bool shares_batches = false;  // its iterations are batches of groups, which share storages
  bool awaits_reports = false;  // encoders have not reported yet

 private:
  Saved save_again(const Offer& offer, const KnownPtr& known);
  Saved swap_new(const Offer& offer, BlockSender& sender);
  bool refilled(const KnownPtr& known, const SavedView& look) const;
  void learn() {
    if (awaits_reports) {
      host->learn();
    }
  }
  void look_ahead(const EntryPtr& entry);
  bool demanding(const EntryPtr& entry);
  void served(const EntryPtr& entry);
};

}  // namespace memswap
