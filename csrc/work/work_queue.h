// Worker threads and the work that waits for them, in order.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "process_mark.h"

namespace memswap {

class WorkQueue;

// Something to be done once. The queue owns it until it has ended.
class Work {
 public:
  Work() = default;
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;
  virtual ~Work() = default;

  bool ended() const { return state_.load(std::memory_order_acquire) == State::kEnded; }

 protected:
  // Runs on a worker or on a thread that waits; no lock is held. May call WorkQueue::finish for
  // work that was submitted earlier, never for later work.
  virtual void run() noexcept = 0;

 private:
  friend class WorkQueue;
  enum class State { kNew, kQueued, kRunning, kEnded };

  std::atomic<State> state_{State::kNew};  // written under the queue's mutex
  std::list<std::shared_ptr<Work>>::iterator place_;
};

// [Note: Who waits, works]
// Workers take work first in, first out. A thread that waits for work that nobody has begun does it
// itself, at once: it has nothing better to do, nothing queued earlier delays it, and a worker that
// finds that its work depends on work still in the queue cannot end in a deadlock. Waits go from
// later to earlier work only, so they never close a circle.

// Thread-safe. With 0 workers all work is done by those who wait for it: the laziest order there
// is, for tests.
//
// After fork() the child has no workers, and a lock may be held for ever. Dropping a queue there is
// safe and leaks it. Nothing that is submitted or waited for there is ever done (forked()).
class WorkQueue {
 public:
  // Starts `workers` threads, or as many as the system gives: where it gives none, whoever waits
  // does the work.
  explicit WorkQueue(size_t workers);
  ~WorkQueue();  // stop()
  WorkQueue(const WorkQueue&) = delete;
  WorkQueue& operator=(const WorkQueue&) = delete;

  void submit(std::shared_ptr<Work> work);

  // Whether this process was forked from the one that made the queue, and has no workers therefore.
  bool forked() const;

  // Returns when `work`, which must have been submitted here, has ended.
  void finish(Work& work);

  // The same if nobody has begun it. Else returns at once.
  void finish_if_queued(Work& work);

  // Whether the calling thread is a queue's worker. Work that finds no has a thread to itself that
  // would only wait for it.
  static bool on_worker();

  // Returns when everything that was submitted before has ended; but for what runs, where the
  // calling thread itself runs some of it.
  void drain();

  // Drains and ends the workers. Work that is submitted later is done by those who wait for it.
  // May be called several times. Does nothing in a forked child.
  //
  // [Note: A queue that its own work drops]
  // Work may hold the last share of what owns the queue: a storage's finalizer is code of the
  // user's. Whoever runs it cannot wait for it to end, nor for other workers, which may wait for
  // it. There this returns at once: the workers do what is queued, end by themselves, and share
  // what they use.
  void stop();

 private:
  class Running;
  struct Shared {
    std::mutex mutex;
    std::condition_variable queued;
    std::condition_variable ended;
    std::list<std::shared_ptr<Work>> queue;
    size_t running = 0;
    bool stopping = false;
  };

  void stop_while_running();
  bool runs_here() const;
  static void work_until_stopped(Shared& shared);
  static std::shared_ptr<Work> begin(Shared& shared, Work& work);
  static void execute(Shared& shared, std::unique_lock<std::mutex>& lock,
                      std::shared_ptr<Work> work);

  std::shared_ptr<Shared> shared_;  // with the workers, and with whoever runs work
  std::mutex stop_mutex_;
  std::vector<std::thread> workers_;
  std::atomic<bool> has_workers_;  // asked while another thread may end them
  const ProcessMark maker_;
};

}  // namespace memswap
