#include "work_queue.h"

#include <utility>

#include "leak.h"

namespace memswap {

WorkQueue::WorkQueue(size_t workers)
    : shared_(std::make_unique<Shared>()), has_workers_(workers > 0) {
  workers_.reserve(workers);
  for (size_t i = 0; i < workers; ++i) {
    workers_.emplace_back([shared = shared_.get()] { work_until_stopped(*shared); });
  }
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
  std::unique_lock lock(shared_->mutex);
  if (work.state_.load(std::memory_order_relaxed) == Work::State::kQueued) {
    execute(*shared_, lock, begin(*shared_, work));
  }
}

void WorkQueue::drain() {
  if (forked()) {
    return;
  }
  std::unique_lock lock(shared_->mutex);
  while (!shared_->queue.empty()) {
    execute(*shared_, lock, begin(*shared_, *shared_->queue.front()));
  }
  shared_->ended.wait(lock, [&] { return shared_->running == 0; });
}

void WorkQueue::stop() {
  if (maker_.forked()) {
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

}  // namespace memswap
