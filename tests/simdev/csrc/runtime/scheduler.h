// Streams, and the running of their tasks in the order that a policy chooses.
//
// [Note: schedules]
// A correct program gives the same bytes under every policy, because every pair of tasks that
// touch the same memory is ordered. A missing order shows under the policy that runs the pair the
// wrong way round, and different bugs need different policies: lazy and main_first run a copy too
// late, side_first too early, random anything in between. Deadlock is impossible: a wait refers to
// work that was enqueued before it, and a stream's wait for itself is dropped.
//
// [Note: who runs tasks]
// Under every policy but kFree, the host thread that enqueues or waits runs what the policy picks,
// one task at a time, before it goes on. So an execution is a function of the program and the seed,
// and a launch costs no thread switch. Other host threads meanwhile wait. Under kFree two workers
// run tasks concurrently with the host and with each other.
#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <list>
#include <mutex>
#include <random>
#include <thread>

#include "runtime.h"

namespace simdev {

struct Task {
  const char* name = "";
  WorkPtr work;       // null for a marker, which only waits
  RecordingPtr wait;  // null, or what must be complete before the task may run
  uint64_t sequence = 0;
  uint64_t program_order = 0;
  std::chrono::steady_clock::time_point not_before;
};

struct Stream {
  StreamId id;
  int slot = 0;
  std::deque<Task> queue;
  uint64_t issued = 0;
  uint64_t done = 0;
  bool busy = false;  // the task after `done` is being run
  VectorClock clock;
  double virtual_us = 0;
  double delay_us = 0;
};

// Every function is called with the machine's mutex held; those that may block take the lock.
class Scheduler {
 public:
  using Lock = std::unique_lock<std::mutex>;

  explicit Scheduler(std::mutex& mutex);
  void start();
  void stop();

  Stream& stream(StreamId id);
  std::array<Stream, kStreams>& streams() { return streams_; }
  bool complete(const Recording& recording) const;

  void set_policy(Policy policy, uint64_t seed);
  void push(Stream& stream, const char* name, RecordingPtr wait, WorkPtr work);
  void after_push(Lock& lock);  // lets the policy run something
  // Whether a task pushed now would run before anything else.
  bool runs_at_once(const Stream& stream) const {
    return policy_ == Policy::kEager && stream.queue.empty() && !stream.busy;
  }
  void wake_workers();  // kFree: enough where nothing has to run before the host goes on
  void finish(Lock& lock, const Stream& stream, uint64_t sequence);
  // True if complete. Otherwise lets one task that it needs run, so that polling ends, and answers
  // false once more.
  bool poll(Lock& lock, const Recording& recording);
  // What a task threw, once; as on a real device it surfaces at a later synchronisation.
  void rethrow_task_error();
  std::exception_ptr take_task_error() { return std::exchange(task_error_, nullptr); }

  void set_blocking_hooks(BlockingHooks hooks) { hooks_ = hooks; }
  uint64_t enqueued() const { return program_order_; }
  uint64_t executed() const { return executed_; }

 private:
  static constexpr size_t kWorkers = 2;

  bool ready(const Stream& stream) const;
  Stream* blocking(Stream* stream);  // the stream that must run for this one to advance
  template <class Filter>
  Stream* oldest(Filter filter);
  Stream* random_ready();
  Stream* demanded();
  Stream* pick();
  bool any_queued() const;
  void run_worker(size_t index);
  void run_front(Lock& lock, Stream& stream);
  void run_here(Lock& lock);  // all that the policy picks
  template <class Predicate>
  void block_host(Lock& lock, Predicate predicate);

  std::mutex& mutex_;
  std::array<Stream, kStreams> streams_;
  Policy policy_ = Policy::kEager;
  std::mt19937_64 random_{0};
  uint64_t budget_ = 0;  // kRandom: tasks that may run without being demanded
  std::list<std::pair<const Stream*, uint64_t>> demands_;
  bool running_ = false;  // a host thread is in run_here
  bool stopping_ = false;
  std::exception_ptr task_error_;
  uint64_t program_order_ = 0;
  uint64_t executed_ = 0;
  BlockingHooks hooks_;
  std::condition_variable host_cv_;
  std::array<std::condition_variable, kWorkers> worker_cv_;
  std::array<std::thread, kWorkers> workers_;
};

}  // namespace simdev
