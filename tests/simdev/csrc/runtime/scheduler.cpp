#include "scheduler.h"

namespace simdev {

using SteadyClock = std::chrono::steady_clock;

namespace {

thread_local bool inside_task = false;

void refuse_inside_task() {
  if (inside_task) throw Error("sim: a kernel must not use the device that it runs on");
}

}  // namespace

Scheduler::Scheduler(std::mutex& mutex) : mutex_(mutex) {
  for (int slot = 0; slot < kStreams; ++slot) {
    Stream& stream = streams_[static_cast<size_t>(slot)];
    stream.id = stream_of(slot);
    stream.slot = slot;
  }
}

void Scheduler::start() {
  for (size_t i = 0; i < kWorkers; ++i) workers_[i] = std::thread([this, i] { run_worker(i); });
}

void Scheduler::stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  host_cv_.notify_all();
  for (auto& cv : worker_cv_) cv.notify_all();
  for (auto& worker : workers_)
    if (worker.joinable()) worker.join();
}

Stream& Scheduler::stream(StreamId id) {
  if (id.device < 0 || id.device >= kDevices || id.index < 0 || id.index >= kStreamsPerDevice)
    throw Error("sim: no stream " + std::to_string(id.index) + " on device " +
                std::to_string(id.device));
  return streams_[static_cast<size_t>(slot_of(id))];
}

bool Scheduler::complete(const Recording& recording) const {
  return streams_[static_cast<size_t>(slot_of(recording.stream))].done >= recording.sequence;
}

// ---------------------------------------------------------------- policies
bool Scheduler::ready(const Stream& stream) const {
  if (stream.queue.empty() || stream.busy) return false;
  const auto& wait = stream.queue.front().wait;
  return !wait || complete(*wait);
}

Stream* Scheduler::blocking(Stream* stream) {
  while (!stream->queue.empty() && !stream->busy) {
    const auto& wait = stream->queue.front().wait;
    if (!wait || complete(*wait)) return stream;
    stream = &streams_[static_cast<size_t>(slot_of(wait->stream))];
  }
  return nullptr;
}

template <class Filter>
Stream* Scheduler::oldest(Filter filter) {
  Stream* best = nullptr;
  for (Stream& stream : streams_) {
    if (stream.queue.empty() || !filter(stream) || !ready(stream)) continue;
    if (!best || stream.queue.front().program_order < best->queue.front().program_order)
      best = &stream;
  }
  return best;
}

Stream* Scheduler::random_ready() {
  std::array<Stream*, kStreams> candidates{};
  size_t count = 0;
  const auto now = policy_ == Policy::kFree ? SteadyClock::now() : SteadyClock::time_point::max();
  for (Stream& stream : streams_)
    if (!stream.queue.empty() && ready(stream) && stream.queue.front().not_before <= now)
      candidates[count++] = &stream;
  return count ? candidates[random_() % count] : nullptr;
}

Stream* Scheduler::demanded() {
  while (!demands_.empty() && demands_.front().first->done >= demands_.front().second)
    demands_.pop_front();
  if (demands_.empty()) return nullptr;
  return blocking(&streams_[static_cast<size_t>(demands_.front().first->slot)]);
}

Stream* Scheduler::pick() {
  switch (policy_) {
    case Policy::kEager:
      return oldest([](const Stream&) { return true; });
    case Policy::kLazy:
      return demanded();
    case Policy::kSideFirst:
      if (Stream* side = oldest([](const Stream& s) { return s.id.index != 0; })) return side;
      return demanded();
    case Policy::kMainFirst:
      if (Stream* main = oldest([](const Stream& s) { return s.id.index == 0; })) return main;
      return demanded();
    case Policy::kRandom:
      return demanded() || budget_ > 0 ? random_ready() : nullptr;
    case Policy::kFree:
      return random_ready();
  }
  return nullptr;
}

void Scheduler::set_policy(Policy policy, uint64_t seed) {
  policy_ = policy;
  random_.seed(seed);
  budget_ = 0;
  wake_workers();
}

// ---------------------------------------------------------------- running tasks
bool Scheduler::any_queued() const {
  for (const Stream& stream : streams_)
    if (!stream.queue.empty()) return true;
  return false;
}

void Scheduler::run_front(Lock& lock, Stream& stream) {
  Task task = std::move(stream.queue.front());
  stream.queue.pop_front();
  if (task.work) {
    stream.busy = true;
    lock.unlock();
    inside_task = true;
    std::exception_ptr error;
    try {
      task.work->run();
    } catch (...) {
      error = std::current_exception();
    }
    task.work.reset();  // may run arbitrary destructors: not under the lock
    inside_task = false;
    lock.lock();
    if (error && !task_error_) task_error_ = error;
    stream.busy = false;
  }
  stream.done = task.sequence;
  ++executed_;
  if (budget_ > 0) --budget_;
}

void Scheduler::run_here(Lock& lock) {
  running_ = true;
  while (Stream* stream = pick()) run_front(lock, *stream);
  budget_ = 0;
  running_ = false;
  host_cv_.notify_all();
}

void Scheduler::run_worker(size_t index) {
  Lock lock(mutex_);
  while (!stopping_) {
    const bool free = policy_ == Policy::kFree;
    if (Stream* stream = free ? pick() : nullptr) {
      run_front(lock, *stream);
      host_cv_.notify_all();
      worker_cv_[1 - index].notify_one();
    } else if (free && any_queued()) {
      worker_cv_[index].wait_for(lock, std::chrono::microseconds(50));
    } else {
      worker_cv_[index].wait(lock);
    }
  }
}

void Scheduler::wake_workers() {
  if (policy_ != Policy::kFree) return;
  for (auto& cv : worker_cv_) cv.notify_one();
}

// ---------------------------------------------------------------- the host's side
void Scheduler::push(Stream& stream, const char* name, RecordingPtr wait, WorkPtr work) {
  Task task{name, std::move(work), std::move(wait), ++stream.issued, ++program_order_, {}};
  if (policy_ == Policy::kFree && stream.delay_us > 0)
    task.not_before =
        SteadyClock::now() + std::chrono::microseconds(static_cast<int64_t>(stream.delay_us));
  stream.queue.push_back(std::move(task));
}

// [Note: blocking and the GIL]
// A task may be a Python kernel and need the GIL that the blocked host thread holds, so the hooks
// give the GIL away before the wait. They take it back with the mutex released: another host thread
// may hold the GIL and wait for the mutex.
template <class Predicate>
void Scheduler::block_host(Lock& lock, Predicate predicate) {
  if (predicate() || stopping_) return;
  void* token = hooks_.enter ? hooks_.enter() : nullptr;
  host_cv_.wait(lock, [&] { return predicate() || stopping_; });
  if (!token) return;
  lock.unlock();
  hooks_.leave(token);
  lock.lock();
}

void Scheduler::after_push(Lock& lock) {
  switch (policy_) {
    case Policy::kLazy:
      return;
    case Policy::kFree:
      wake_workers();
      return;
    case Policy::kRandom:
      budget_ = random_() % 4;
      if (budget_ == 0) return;
      break;
    default:
      break;
  }
  refuse_inside_task();
  if (running_) {
    block_host(lock, [&] { return !running_; });  // the thread that runs tasks sees the new one
  } else {
    run_here(lock);
  }
}

void Scheduler::finish(Lock& lock, const Stream& stream, uint64_t sequence) {
  if (stream.done >= sequence) return;
  refuse_inside_task();
  if (policy_ == Policy::kFree) {
    wake_workers();
    block_host(lock, [&] { return stream.done >= sequence; });
    return;
  }
  demands_.emplace_back(&stream, sequence);
  while (stream.done < sequence && !stopping_) {
    if (running_) {
      block_host(lock, [&] { return !running_ || stream.done >= sequence; });
    } else {
      run_here(lock);
    }
  }
}

bool Scheduler::poll(Lock& lock, const Recording& recording) {
  if (complete(recording)) return true;
  if (policy_ == Policy::kFree) return false;
  block_host(lock, [&] { return !running_; });
  if (Stream* next = blocking(&stream(recording.stream)))
    finish(lock, *next, next->queue.front().sequence);
  return false;
}

void Scheduler::rethrow_task_error() {
  if (auto error = take_task_error()) std::rethrow_exception(error);
}

}  // namespace simdev
