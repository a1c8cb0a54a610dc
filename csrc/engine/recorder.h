// Recorder: takes down one iteration as it happens.
//
// [Note: Marks]
// An iteration is a row of marks: first the saves, in their order, then the first demands, in
// theirs. Between two marks the device computes. Each mark has a moment at which memswap began
// there and one at which it was done: between those two lies what the mark itself cost (a wait for
// room, for bytes that were not back yet, an encode by the calling thread), so that the time
// between the marks is the model's own. On an accelerator both moments are events on the compute
// stream: nobody waits for them, and they are read when the device has passed the last one. On a
// CPU they are read from the clock.
//
// Also recorded: for how long the forward itself still holds a storage that is leaving, since until
// then leaving frees nothing, and the last demand, after which autograd lets it go.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "clock.h"
#include "entry.h"
#include "iteration_record.h"
#include "lane/lane.h"
#include "link_times.h"
#include "region_calls.h"
#include "workspace.h"

namespace memswap {

// The engine's lock serialises the calls until `close`. What follows belongs to whoever reads the
// record, on any thread.
class Recorder {
 public:
  // A storage that is about to be saved, and what is to be done with it.
  struct Chosen {
    std::string_view unit;
    int64_t ordinal;
    int64_t nbytes;
    c10::ScalarType dtype;
    PlannedAction action;
  };

  explicit Recorder(Clock clock);
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  // --- the marks of an iteration ---

  // A storage is about to be saved; it is on its way, or stayed.
  void choose(const Chosen& chosen);
  void saved(const EntryPtr& entry);
  // Backward asks for a storage; backward has it. What a recipe reads in between, on the same
  // thread, is no mark, but a part of that one. Threads may ask side by side.
  void demanding(const Entry& entry);
  void demanded(const Entry& entry);
  size_t marks() const { return moments_.size(); }

  // --- what happens at them, or between them ---

  // A unit saves a storage that was saved before.
  void again(const Entry& entry, std::string_view unit);
  // Backward has a storage; those at these places of the iteration start back with that.
  void returning(const Iteration& of, const std::vector<size_t>& places) {
    links_.returning(of, places);
  }
  // An operator of so many seconds is about to be launched, and codec work may run beside it.
  void window(double seconds);
  // So many bytes are there of what recomputed units have saved again, and that is no entry's.
  void recomputed(int64_t nbytes);
  // A checkpoint region that is off is called (RegionCalls::add).
  void region(std::string unit, const std::vector<at::Tensor>& inputs, const Iteration& of,
              int64_t least_bytes) {
    regions_.add(std::move(unit), inputs, of, least_bytes);
  }

  // Also takes down what else is on the device; nullptr: nobody asked.
  std::shared_ptr<Workspace> workspace;

  // --- its end ---

  // The next iteration begins, and nothing more is taken down.
  void close();
  // Whether the device has passed the last moment.
  bool ready() const { return closed_ && (end_ == nullptr || end_->reached()); }
  // Blocks the host until it has. For who has to plan now; no steady step does.
  void wait() const;
  // The record of an iteration that is over. Nothing where a save or a demand broke off: memory was
  // short and the model has tried again, somebody pressed Ctrl-C, or captured a graph.
  std::optional<IterationRecord> take() const;

 private:
  // One storage after its save. Its place here is its index in the iteration, and the number of its
  // mark.
  struct Seen {
    std::weak_ptr<Entry> entry;
    std::optional<int32_t> held_until;
    std::optional<int32_t> let_go;  // the mark, if that was seen while its send was under way
    std::optional<int32_t> last_demand;
    std::optional<int32_t> kept_until;
    int32_t marks_since = 0;  // somebody demanded it
    bool demanded = false;
    bool served = false;   // it was demanded, and is still the graph's
    bool used_up = false;  // it came back, and nobody holds it any more

    // Whether those who demanded it are done with it.
    void look_at_use(const Entry& of);
  };

  // A demand of a thread of backward that has not been met; `began`: nullptr where the storage had
  // been demanded before.
  struct Demand {
    std::thread::id thread;
    size_t index;
    MomentPtr began;
  };

  MomentPtr now();
  std::vector<Demand>::iterator demand_of_this_thread();
  size_t unit_number(std::string_view unit);
  int32_t next_mark() const { return static_cast<int32_t>(moments_.size()); }
  void arrive();
  void depart();
  void add_mark(const MomentPtr& began);
  void note_bytes(const Entry& entry);
  void note_lane(const Entry& entry);
  void look();
  void look_at_served();
  std::unordered_set<size_t> owned_by_sends();
  int64_t leaving_bytes() const;
  void fill_times(IterationRecord& record) const;

  const Clock clock_;
  IterationRecord columns_;  // that are known when a mark is made
  std::unordered_map<std::string, size_t> unit_numbers_;
  std::vector<Seen> seen_;
  std::vector<size_t> held_;              // those that the forward may still hold
  std::vector<size_t> sent_;              // and those whose sends may be under way
  std::vector<size_t> served_;            // those that were demanded and are still the graph's
  std::unordered_set<AnyLanePtr> lanes_;  // that sends went by
  std::vector<std::pair<MomentPtr, MomentPtr>> moments_;  // begin and end of each mark
  bool chose_ = false;                                    // for a storage that is being saved
  std::vector<Demand> demands_;                           // that have not been met
  RegionCalls regions_;
  LinkTimes links_;
  bool broken_ = false, closed_ = false;
  MomentPtr opening_, began_, end_;  // nullptr: a graph was captured then
};

}  // namespace memswap
