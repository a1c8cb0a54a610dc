// WindowQueue: encodes and decodes that wait for an operator to run beside.
//
// [Note: Windows]
// An encode costs memory bandwidth. Launched the moment autograd saves a tensor, it runs beside the
// next elementwise operator and slows it; beside a matrix product or a collective it is almost
// free. So it waits, and whoever is about to launch such an operator opens a window of its
// duration.
//
// The queue keeps one clock of estimates. Windows move it; work that is started ends at
// `busy_until`. Of what fits the window that opens, that starts first which frees most for its time
// (masks, indices, what repeats), then the oldest; what does not fit waits for a later one. What is
// longer than windows are starts in one when it has waited for as long as it takes and the lane has
// nothing else to do. Work whose estimated end has passed is joined: the current stream waits for
// it, which by then costs nothing, and the storage is free in stream order. Between windows the
// clock stands still although the lane works on, so the estimate errs towards joining late. A wrong
// one costs time, never an error.
//
// An encode that waits is only a promise: the entry is resident and holds its storage. Demanded, it
// simply stays; dropped, nothing remains. Four rules keep it right and bounded:
//
// 1. It starts on the stream on which its tensor was saved, for the lane orders it after what that
//    stream has been given so far. Streams are compared, never remembered to be waited for.
// 2. It does not start once its iteration's backward has begun: from there on memory only falls.
// 3. No more than `max_pending_bytes` wait; beyond that, encodes start at once.
// 4. A decode that is wanted waits as long as no more than half of the bytes to prefetch do.
#pragma once

#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "entry.h"
#include "transfers.h"
#include "work/ticket.h"

namespace memswap {

// What became of the work that waited for windows. Bytes are bytes of storages.
struct WindowCounts {
  int64_t windows = 0;  // that were opened
  double window_s = 0;  // seconds that they promised
  int64_t encoded_in_windows = 0;
  int64_t encoded_bytes = 0;
  int64_t started_at_bound = 0;  // outside windows, because too many bytes waited
  int64_t started_at_end = 0;    // at the end of a forward
  // Storages whose encode had not been started when backward began, or that found no room.
  int64_t kept_storages = 0;
  int64_t kept_bytes = 0;
  int64_t decoded_in_windows = 0;
  int64_t decoded_ahead = 0;  // outside windows, because backward was close
};

// An encode that has not been started.
struct PendingEncode {
  std::weak_ptr<Entry> entry;
  int64_t nbytes;
  double gain;         // what is expected to be freed, as a share of `nbytes`
  c10::Stream stream;  // on which the tensor was saved
  LeaveOrder order;
  Expectation expectation;
};

// Encodes that wait, decodes that are wanted, and the clock. The engine's lock serialises the
// calls.
class WindowQueue {
 public:
  // The engine that it belongs to.
  class Work {
   public:
    Work() = default;
    Work(const Work&) = delete;
    Work& operator=(const Work&) = delete;
    virtual ~Work() = default;

    // Starts an encode now, on its own stream. nullptr: there was no room, and the entry stays.
    virtual TicketPtr start(const PendingEncode& pending) = 0;
    // Starts bringing an entry back, unless it is not away.
    virtual Ahead fetch(const EntryPtr& entry) = 0;
    // Whether a stream is the calling thread's current one, and takes work.
    virtual bool on_stream(const c10::Stream& stream) = 0;
  };

  // Bytes that may wait: a share of what one forward defers, and never less than the second.
  static constexpr int64_t kPendingPart = 8, kLeastPendingBytes = 64 << 20;

  explicit WindowQueue(Work& work) : work_(work) {}
  WindowQueue(const WindowQueue&) = delete;
  WindowQueue& operator=(const WindowQueue&) = delete;

  // --- what waits ---

  // What is deferred from now on belongs to a new forward.
  void begin_iteration();
  // An encode is to be started in a window; if too much waits already, some start now.
  void defer(PendingEncode pending);
  // Entries will be demanded soon, in this order. What there is no memory for goes on waiting.
  void want(const std::vector<EntryPtr>& entries, int64_t prefetch_bytes);
  // Promises nothing any more. What waits stays where it is.
  void clear();
  // Encodes that wait, in the order in which they should start.
  std::vector<EntryPtr> pending() const;
  // Starts the encodes of these entries that still wait, outside of a window, and no others.
  void start_now(const std::vector<EntryPtr>& entries);

  // --- windows ---

  // An operator of so many seconds is about to be launched on the current stream.
  void open(double seconds);
  // The operator of the last window has been launched.
  void close();
  // The managed part of a forward is over: loss and logits follow, and with them the peak, so what
  // still waits starts now, if `leftovers_start`.
  void end_forward();
  // The first storage of an iteration is demanded: the memory of what has left is needed.
  void begin_backward();

  int64_t pending_bytes() const { return pending_bytes_; }
  void reset_counts() { counts = {}; }
  WindowCounts counts;

  double encode_rate = 100e9, decode_rate = 100e9;  // bytes per second; not measured yet
  std::optional<int64_t> max_pending_bytes;         // rule 3; nothing: from what forwards defer
  // Whether what waits at the end of a forward starts then. If not, it goes on waiting for windows
  // of later microbatches, and stays if there are none.
  bool leftovers_start = true;

 private:
  struct Waiting {
    int64_t number;
    PendingEncode pending;
    double since;
  };
  struct Wanted {
    std::weak_ptr<Entry> entry;
    int64_t nbytes;
    double since;
  };
  struct Started {
    TicketPtr ticket;
    double end;
    c10::Stream stream;
  };
  // What a run of encodes goes by: where it ends on the clock, how many it may look at in vain, how
  // many bytes may be left waiting, and which entries it is for; nullptr: all that wait.
  struct Bounds {
    double end;
    std::optional<size_t> looks;
    int64_t most_left = 0;
    const std::vector<EntryPtr>* only = nullptr;
  };

  static bool sooner(const Waiting& one, const Waiting& other);
  bool fits(double cost, double since, double end) const;
  int64_t run(const Bounds& bounds);
  bool too_late(const PendingEncode& pending);
  void forget();
  void keep(const PendingEncode& pending);
  bool fetch_next(int64_t& fetched);
  void join(double until);

  Work& work_;
  int64_t auto_pending_bytes_ = 256 << 20;  // before anything is known about the model
  int64_t deferred_bytes_ = 0;              // in this iteration
  std::vector<Waiting> pending_;            // in the order in which they should start
  int64_t number_ = 0;
  int64_t pending_bytes_ = 0;
  std::deque<Wanted> wanted_;
  int64_t wanted_bytes_ = 0;
  std::deque<Started> started_;  // not joined
  double now_ = 0, end_ = 0, busy_until_ = 0;
};

}  // namespace memswap
