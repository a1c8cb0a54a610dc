// Windows: the codec work of one engine, put off until an operator opens a window that it fits
// into ([Note: Windows] in window_queue.h).
//
// Where a lane does not work ahead of the host (a CPU) there is nothing to run beside, and
// everything is done at once as in any engine.
#pragma once

#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <thread>
#include <unordered_map>
#include <vector>

#include "durations.h"
#include "window_queue.h"

namespace memswap {

// Owned by its engine, whose lock serialises the calls.
class Windows final : private WindowQueue::Work {
 public:
  explicit Windows(Engine& engine) : queue(*this), engine_(engine) {}

  // An operator of so many seconds is about to be launched on the current stream. Nothing where the
  // thread is in an explicit window: whoever opened it has counted what is inside.
  void open(double seconds);
  // The window of several operators, up to `leave`, which the thread calls.
  void enter(double seconds);
  void leave();
  // Whether the thread is in an explicit window.
  bool inside() const { return depths_.contains(std::this_thread::get_id()); }
  // The managed part of a forward is over.
  void end_forward();
  void begin_iteration();

  // An encode is promised. There may turn out to be no room when it starts.
  void defer(const EntryPtr& entry, const StorageRefPtr& storage, const LeaveOrder& order,
             const Expectation& expectation);
  // A storage is demanded: what comes next is wanted.
  void look_ahead(const IterationPtr& iteration, size_t index);
  // Starts bringing back those of these entries that are away, in this order, as far as there is
  // memory.
  void bring(const std::vector<EntryPtr>& entries);
  // The room of an entry is needed: its encode starts now, if it still waits.
  void hurry(const EntryPtr& entry);

  WindowQueue queue;
  // Whether a stream is the calling thread's current one; empty: it is asked.
  std::function<bool(const c10::Stream&)> is_current;
  Durations durations{queue.encode_rate, queue.decode_rate};

 private:
  TicketPtr start(const PendingEncode& pending) override;
  Ahead fetch(const EntryPtr& entry) override;
  bool on_stream(const c10::Stream& stream) override;
  void notice(const AnyLanePtr& lane, int64_t nbytes, bool encoded);

  Engine& engine_;
  std::unordered_map<std::thread::id, int> depths_;  // of the explicit windows that threads are in
  IterationPtr demanded_;                            // whose storage was demanded last
  bool works_ahead_ = false;                         // codec work was ever put off
};

}  // namespace memswap
