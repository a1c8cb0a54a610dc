// Iteration: one forward of what is managed and the backward that belongs to it.
//
// The last iteration that was demanded predicts the next one, storage by storage, for as long as
// the sizes agree. A wrong guess costs a stall or a little memory, never an error.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "demand_order.h"
#include "entry.h"
#include "held_at_peak.h"
#include "plan.h"
#include "proven_recipe.h"
#include "reasons.h"

namespace memswap {

class Recorder;

// How an iteration went so far, for who made its plan.
struct Outcome {
  bool began_backward = false;
  bool changed = false;  // it left its plan, or its forward saved clearly more or fewer bytes
  bool unfit = false;    // more was resident than planned, or a frame became longer
  bool refused = false;  // the pool had no room for something
  int64_t peak_bytes = 0;
  int64_t over_budget_bytes = 0;  // of these, beyond the budget of all that are in flight
  std::set<size_t> no_recipe;
};

// The engine's lock serialises the calls.
class Iteration : public std::enable_shared_from_this<Iteration> {
 public:
  static constexpr int64_t kNoGroup = -1;

  // `forecast`: what an earlier iteration predicts, or nullptr. `prefetch_bytes`: nothing where
  // what is saved decides ([Note: Prefetched bytes]).
  Iteration(std::shared_ptr<const Forecast> forecast, std::optional<int64_t> prefetch_bytes)
      : forecast_(std::move(forecast)), given_prefetch_bytes_(prefetch_bytes) {}
  Iteration(const Iteration&) = delete;
  Iteration& operator=(const Iteration&) = delete;

  // --- saving ---

  // The next storage is saved. `decoded`: it would be encoded where it is. Storages of one `group`
  // are those of a checkpoint region, which replays its forward: they are expected back in the
  // order in which they were saved. The reason why the storage should stay.
  Reason admit(int64_t nbytes, bool decoded, int64_t group);
  // The length of the frame that a storage should do without ([Note: Held at the peak] in
  // held_at_peak.h); nothing: it need not.
  std::optional<int64_t> frame_held_at_peak(size_t index) const;
  // The entry of the storage that was admitted last. Throws std::invalid_argument.
  void place(const EntryPtr& entry);

  // --- demanding ---

  // A storage is demanded. The entries that are to be brought back now.
  std::vector<EntryPtr> demand(size_t index);
  bool began_backward() const { return !order_.demanded().empty(); }

  // --- what is known of it ---

  // The entry of a storage; nullptr: it is dead, or has not been placed.
  EntryPtr entry(size_t index) const { return entries_.at(index).lock(); }
  size_t size() const { return order_.size(); }
  int64_t nbytes() const { return order_.raw().nbytes + order_.decoded().nbytes; }
  std::vector<int64_t> sizes() const { return order_.sizes(); }  // bytes of each
  // Whether most of what was saved is still there, for a backward that may come.
  bool waits() const;
  // Bytes of the device that its storages and their frames take now, whoever holds them, each
  // rounded up to a multiple of `granularity`, which is 1 at least.
  int64_t present_bytes(int64_t granularity) const;
  // The storages that are there, for a caller who decides when their memory is free.
  std::vector<StorageRefPtr> present() const;
  // Those of them whose bytes are on their way back.
  std::vector<StorageRefPtr> returning() const;
  // Whether nothing that was saved is alive: no graph will demand it.
  bool over() const;
  const DemandOrder& order() const { return order_; }
  const std::vector<int64_t>& groups() const { return groups_; }

  // An operator is launched, and about so many bytes can be decoded beside it.
  void open_window(double room_bytes) { order_.open_window(room_bytes); }

  // --- bytes ahead of the latest demand that are on their way back ---

  // As predicted, for as long as the sizes agree; otherwise as its own storages make it.
  int64_t prefetch_bytes() const;
  int64_t own_prefetch_bytes() const;
  // The same without the bytes whose decodes wait for operators to run beside.
  int64_t least_prefetch_bytes() const;
  // Bytes that may leave at once: as many, and never less than one storage.
  int64_t leaving_bytes() const;

  // The forecast that it makes for the next iteration.
  Forecast predicts(int64_t prefetch_bytes) const;

  // --- under a plan ---

  // What it comes to if it goes as planned.
  struct Expected {
    double nbytes = 0;                    // that its forward saves
    int64_t peak_bytes = 0;               // resident ones at most, where `limit_bytes` is 0
    std::optional<int64_t> budget_bytes;  // of all that are in flight; nothing: none is kept
  };

  // A plan says from here on what happens to its storages. What is expected: see Expected.
  void follow(std::shared_ptr<const Plan> plan, double nbytes, int64_t peak_bytes,
              std::optional<int64_t> budget_bytes);
  // It goes another way from here on.
  void leave_plan() { plan.reset(); }
  bool follows_plan() const { return plan != nullptr; }

  // What happens to its storages; nullptr: nobody has planned, or it has left its plan.
  std::shared_ptr<const Plan> plan;
  std::optional<Expected> expected;  // nothing: nobody has planned
  // Whether its plan knows all of its storages, and so says what comes back when.
  bool returns_as_planned() const { return plan && plan->places.size() == size(); }
  int64_t peak_bytes = 0;  // resident ones, the most at a mark of the plan
  // Resident bytes that what starts back stays below, whatever was planned; 0: as many as come.
  int64_t limit_bytes = 0;
  std::vector<size_t> released;  // by the plan, and still held by somebody then
  // Notices which of these are gone by now.
  void look_at_released();
  // Bytes that the plan has for the frame of a storage; nothing: as many as it needs.
  std::optional<int64_t> frame_nbytes(size_t index) const;

  // --- what it shows those who plan ---

  std::shared_ptr<Recorder> recorder;  // takes it down; nullptr: nobody does
  // Recipes are tried of all that could have one, and are told here, by the storage's place.
  bool learns_recipes = false;
  std::vector<std::pair<size_t, ProvenRecipe>> proven;
  std::set<size_t> no_recipe;  // was to be recomputed, and is not
  bool unfit = false;          // a storage did not become the frame that was planned
  bool refused = false;        // the pool had no room for something
  int64_t pooled_bytes = 0;    // the most that was away then, or when backward began

  // The pool was full.
  void refuse(int64_t away_bytes);
  // Its forward is over, and its backward begins. What saved another number of storages than
  // planned follows the plan no more.
  void begin_backward(int64_t away_bytes);

  Outcome outcome() const;
  // Whether it is as planned in all of that, and its backward has begun.
  bool went_as_planned() const;

  // Places of storages that stayed alive although they had left.
  std::set<size_t> held;

  // Which storages are held at the peak, where no plan says which stay.
  HeldAtPeak at_peak;
  // Notices which of what stays for that the forward has let go of.
  void look_at_held();

 private:
  Reason verdict(size_t index, int64_t nbytes);
  std::span<const size_t> next_to_prefetch(size_t index);
  EntryPtr to_bring(size_t index) const;

  DemandOrder order_;
  std::vector<std::weak_ptr<Entry>> entries_;
  std::vector<int64_t> groups_;
  std::shared_ptr<const Forecast> forecast_;  // that its storages agree with so far
  const std::optional<int64_t> given_prefetch_bytes_;
  std::vector<size_t> postponed_;  // what was to start back, and found no room yet
};

// The iterations of one engine.
class Timeline {
 public:
  explicit Timeline(std::optional<int64_t> bytes) : prefetch_bytes(bytes) {}

  // A new iteration, with what the last one that was demanded predicts.
  IterationPtr begin();

  std::optional<int64_t> prefetch_bytes;  // of iterations that begin; nothing: automatic

 private:
  static constexpr size_t kRecent = 8;

  std::deque<IterationPtr> recent_;
  std::shared_ptr<const Forecast> forecast_;
  std::weak_ptr<Iteration> forecast_of_;
};

// The order in which nobody has seen storages demanded: last saved first, group by group.
std::vector<size_t> first_guess(const std::vector<int64_t>& groups);

}  // namespace memswap
