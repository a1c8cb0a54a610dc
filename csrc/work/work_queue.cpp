#include "work_queue.h"

#include <new>
#include <system_error>
#include <utility>

#include "leak.h"

namespace memswap {

// Work that the calling thread runs, innermost first, by the queues that it is of.
class WorkQueue::Running {
 public:
  explicit Running(const Shared& shared) : shared_(&shared), outer_(innermost_) {
    innermost_ = this;
  }
  ~Running() { innermost_ = outer_; }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;

  static bool any_of(const Shared& shared) {
    for (const Running* one = innermost_; one != nullptr; one = one->outer_) {
      if (one->shared_ == &shared) {
        return true;
      }
    }
    return false;
  }

 private:
  static thread_local const Running* innermost_;
  const Shared* const shared_;
  const Running* const outer_;
};

thread_local const WorkQueue::Running* WorkQueue::Running::innermost_ = nullptr;

WorkQueue::WorkQueue(size_t workers) : shared_(std::make_shared<Shared>()), has_workers_(false) {
  workers_.reserve(workers);
  try {
    while (workers_.size() < workers) {
      workers_.emplace_back([shared = shared_] { work_until_stopped(*shared); });
    }
  } catch (const std::system_error&) {  // a limit on threads, or on memory for their stacks
  } catch (const std::bad_alloc&) {
  }
  has_workers_ = !workers_.empty();
}

WorkQueue::~WorkQueue() {
  if (!maker_.forked()) {
    stop();
    return;
  }
  // A forked child: its copies of the workers can be neither joined nor told anything, and the
  // lock may be held by one of them for ever. What they use must therefore never be destroyed.
  leak(std::move(workers_));
  leak(std::move(shared_));
}

bool WorkQueue::forked() const { return has_workers_ && maker_.forked(); }

void WorkQueue::submit(std::shared_ptr<Work> work) {
  if (forked()) {
    return;
  }
  const std::lock_guard lock(shared_->mutex);
  Work& submitted = *work;
  shared_->queue.push_back(std::move(work));
  submitted.place_ = std::prev(shared_->queue.end());
  submitted.state_.store(Work::State::kQueued, std::memory_order_release);
  shared_->queued.notify_one();
}

// Takes queued work out of the queue. The lock is held.
std::shared_ptr<Work> WorkQueue::begin(Shared& shared, Work& work) {
  std::shared_ptr<Work> begun = std::move(*work.place_);
  shared.queue.erase(work.place_);
  work.state_.store(Work::State::kRunning, std::memory_order_release);
  ++shared.running;
  return begun;
}

// Runs work that was begun; drops it; both without the lock, which is held again at the end.
void WorkQueue::execute(Shared& shared, std::unique_lock<std::mutex>& lock,
                        std::shared_ptr<Work> work) {
  const Running running(shared);
  lock.unlock();
  work->run();
  lock.lock();
  work->state_.store(Work::State::kEnded, std::memory_order_release);
  --shared.running;
  shared.ended.notify_all();
  lock.unlock();
  work.reset();
  lock.lock();
}

namespace {
thread_local bool this_thread_is_a_worker = false;
}

bool WorkQueue::on_worker() { return this_thread_is_a_worker; }

void WorkQueue::work_until_stopped(Shared& shared) {
  this_thread_is_a_worker = true;
  std::unique_lock lock(shared.mutex);
  while (true) {
    shared.queued.wait(lock, [&] { return shared.stopping || !shared.queue.empty(); });
    if (shared.queue.empty()) {
      return;
    }
    execute(shared, lock, begin(shared, *shared.queue.front()));
  }
}

void WorkQueue::finish(Work& work) {
  finish_if_queued(work);
  if (work.ended() || forked()) {
    return;
  }
  std::unique_lock lock(shared_->mutex);
  shared_->ended.wait(lock, [&] { return work.ended(); });
}

void WorkQueue::finish_if_queued(Work& work) {
  if (work.ended() || forked()) {
    return;
  }
  const std::shared_ptr<Shared> shared = shared_;  // the work may drop this queue
  std::unique_lock lock(shared->mutex);
  if (work.state_.load(std::memory_order_relaxed) == Work::State::kQueued) {
    execute(*shared, lock, begin(*shared, work));
  }
}

bool WorkQueue::runs_here() const { return Running::any_of(*shared_); }

void WorkQueue::drain() {
  if (forked()) {
    return;
  }
  const std::shared_ptr<Shared> shared = shared_;
  std::unique_lock lock(shared->mutex);
  while (!shared->queue.empty()) {
    execute(*shared, lock, begin(*shared, *shared->queue.front()));
  }
  if (!Running::any_of(*shared)) {
    shared->ended.wait(lock, [&] { return shared->running == 0; });
  }
}

void WorkQueue::stop() {
  if (maker_.forked()) {
    return;
  }
  if (runs_here()) {
    stop_while_running();
    return;
  }
  drain();
  const std::lock_guard once(stop_mutex_);
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->stopping = true;
    shared_->queued.notify_all();
  }
  for (std::thread& worker : workers_) {
    worker.join();
  }
  workers_.clear();
  has_workers_ = false;
}

// See [Note: A queue that its own work drops].
void WorkQueue::stop_while_running() {
  const std::unique_lock once(stop_mutex_, std::try_to_lock);
  if (!once.owns_lock()) {
    return;  // another thread ends the workers, and waits for this one
  }
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->stopping = true;
    shared_->queued.notify_all();
  }
  for (std::thread& worker : workers_) {
    worker.detach();
  }
  workers_.clear();
  has_workers_ = false;
}

}  // namespace memswap
