// Planning: an engine's side of it. Here room is made for what a plan has next, what is resident is
// counted, and a recorder hears how it goes; the plans are made by whoever directs the engine,
// under a budget.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "entry.h"
#include "in_use.h"
#include "iteration.h"
#include "storage/storage.h"
#include "streak.h"

namespace memswap {

// Owned by its engine, whose lock serialises the calls.
class Planning {
 public:
  explicit Planning(Engine& engine);

  // --- what it is told ---

  // Whether somebody directs what leaves. If nobody does, none of what is below is called.
  bool directed() const { return directed_; }
  void set_directed(bool directed);
  // Whoever directs plans with what recipes would have saved for themselves.
  bool plans_sources() const { return plans_sources_; }
  void set_plans_sources(bool plans) { plans_sources_ = plans; }

  // --- iterations ---

  // The current iteration has just begun and follows a plan, as those that begin after it are to
  // ([Note: Asked when something changed] in streak.h).
  void begin_streak(int64_t forwards, size_t in_flight, int64_t leaving_bytes);
  // The current iteration has just begun. If it follows the plan of the streak: the bytes that may
  // leave at once, or 0. Nothing: whoever directs is to be asked.
  std::optional<int64_t> extend_streak();
  // The streak ends here, if there is one.
  std::optional<Streak::Seen> end_streak();

  // --- saves and demands ---

  // An entry was saved: the plan's storages that have to be gone by now are waited for, and the
  // iteration's recorder hears of it.
  void after_save(const EntryPtr& entry);
  // Backward asks for a storage of an iteration, and has not waited for it yet.
  void before_demand(const EntryPtr& entry);
  // Backward has the storage, in stream order. Whether its frame is to be off the device before
  // anything else is done (Entry::release_frame).
  bool after_demand(const EntryPtr& entry) const;
  // The same, for the iteration's recorder, once that is so.
  void record_demand(const EntryPtr& entry) const;
  // Orders the caller behind the send of an iteration's storage, if it is leaving or waits to, and
  // behind its frame's way to a pool: for a caller who needs the room.
  void make_room(Iteration& of, size_t index);

  // --- what is there that entries do not hold, and beside operators ---

  // A recomputed unit has saved a storage, in backward. Those of entries are counted already.
  void count_recomputed(const StorageRef& storage);
  // An entry has let go of its storage, which somebody else holds ([Note: In use]); or it holds the
  // storage of this key again.
  void count_in_use(Entry& entry);
  void hold_again(const void* key) { in_use_.remove(key); }
  // Takes off the books what operators held, and is gone; all of it, where nothing is in flight.
  void sweep_in_use(bool in_flight = true);
  // A recipe that runs has made so many bytes, which its entry does not have yet.
  void count_made(int64_t nbytes);
  // An operator of so many seconds is about to be launched; codec work may run beside it.
  void note_window(double seconds) const;

 private:
  void release(Iteration& of, size_t index);
  void note_peak(Iteration& of, int64_t more_bytes = 0) const;

  Engine& engine_;
  bool directed_ = false;
  bool plans_sources_ = false;
  IterationPtr backward_;  // whose backward runs
  InUse in_use_;
  std::optional<Streak> streak_;
};

}  // namespace memswap
