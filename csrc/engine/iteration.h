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

#include "course.h"
#include "demand_order.h"
#include "entry.h"
#include "held_at_peak.h"
#include "proven_recipe.h"
#include "reasons.h"

namespace memswap {

class Recorder;

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

  // A storage is demanded. The entries that are to be brought back now, in this order.
  std::vector<EntryPtr> demand(size_t index);
  // Starts bringing these of them back, in this order, by `fetch(entry)`. What there is no memory
  // for the next demand names first.
  template <class Fetch>
  void bring_ahead(std::span<const EntryPtr> entries, Fetch fetch) {
    for (; !entries.empty(); entries = entries.subspan(1)) {
      if (fetch(entries.front()) == Ahead::kNoMemory) {
        postpone(entries);
        return;
      }
    }
  }
  bool began_backward() const { return !order_.demanded().empty(); }

  // --- what is known of it ---

  // The entry of a storage; nullptr: it is dead, or has not been placed.
  EntryPtr entry(size_t index) const { return entries_.at(index).lock(); }
  size_t size() const { return order_.size(); }
  int64_t nbytes() const { return order_.raw().nbytes + order_.decoded().nbytes; }
  std::vector<int64_t> sizes() const { return order_.sizes(); }  // bytes of each
  // Whether most of what was saved is alive, for a backward that may come or has just begun.
  bool mostly_alive() const;
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

  // --- under a plan, which `course` has ---

  // Whether the plan knows all of its storages, and so says what comes back when.
  bool returns_as_planned() const { return course.plans_all(size()); }
  // Bytes that the plan has for the frame of a storage; nothing: as many as it needs.
  std::optional<int64_t> frame_nbytes(size_t index) const;
  Outcome outcome() const { return course.outcome(nbytes(), began_backward()); }

  // --- storages that left and are still there, as somebody holds them ---

  // The plan has released one.
  void note_released(size_t index) { released_.push_back(index); }
  // Notices which of those are gone by now.
  void look_at_released();
  // One was demanded, and leaving had freed nothing: the next iteration does not send it.
  void note_never_freed(size_t index) { never_freed_.insert(index); }
  // One that was not sent for that is demanded: if only handles hold it, it is freed next time.
  void look_at_never_freed(const Entry& entry);
  // Notices which of those that stay for the peak the forward has let go of.
  void look_at_held();

  // --- what it shows those who plan ---

  // Takes it down; nullptr: nobody does.
  const std::shared_ptr<Recorder>& recorder() const { return recorder_; }
  void set_recorder(std::shared_ptr<Recorder> recorder) { recorder_ = std::move(recorder); }
  // Recipes are tried of all that could have one, and are told here, by the storage's place.
  void learn_recipes() { learns_recipes_ = true; }
  bool learns_recipes() const { return learns_recipes_; }
  void note_proven(size_t index, ProvenRecipe recipe) {
    proven_.emplace_back(index, std::move(recipe));
  }
  const std::vector<std::pair<size_t, ProvenRecipe>>& proven() const { return proven_; }

  // --- parts, with methods of their own ---

  Course course;
  HeldAtPeak at_peak;  // which storages are held at the peak, where no plan says which stay

 private:
  Reason verdict(size_t index, int64_t nbytes);
  std::span<const size_t> next_to_prefetch(size_t index);
  EntryPtr to_bring(size_t index) const;
  void postpone(std::span<const EntryPtr> entries);

  DemandOrder order_;
  std::vector<std::weak_ptr<Entry>> entries_;
  std::vector<int64_t> groups_;
  std::shared_ptr<const Forecast> forecast_;  // that its storages agree with so far
  const std::optional<int64_t> given_prefetch_bytes_;
  std::vector<size_t> postponed_;  // what was to start back, and found no room yet: in order
  std::vector<size_t> released_;
  std::set<size_t> never_freed_;
  std::shared_ptr<Recorder> recorder_;
  bool learns_recipes_ = false;
  std::vector<std::pair<size_t, ProvenRecipe>> proven_;
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
