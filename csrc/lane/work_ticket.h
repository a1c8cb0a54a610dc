// Tickets of work that threads of this process do, and how much such work may be under way.
#pragma once

#include <atomic>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <string>

#include "lane.h"
#include "storage/storage.h"
#include "work/ticket.h"
#include "work/work_queue.h"

namespace memswap {

// The completion of work in a WorkQueue. A wait for work that nobody has begun does it on the spot.
class WorkTicket : public Ticket, public Work {
 public:
  // The ticket shares the queue: it may live longer than the lane that made it.
  explicit WorkTicket(std::shared_ptr<WorkQueue> queue) : queue_(std::move(queue)) {}

  void wait() final { synchronize(); }
  bool done() final { return finished_.load(std::memory_order_acquire); }
  void synchronize() final;

  // Blocks until the work has ended, well or badly. Lets go of the GIL.
  void finish();

  bool failed() final { return done() && !error_.empty(); }
  const std::string& error() const { return error_; }  // after the end

 protected:
  // Throws what went wrong.
  virtual void work() = 0;

  // Lets go of what the work does not need any more. Called before a waiter wakes, so that memory
  // is there when it does.
  virtual void let_go(bool failed) noexcept = 0;

  // The same for what may ask this very ticket whether it is done.
  virtual void let_go_after_end() noexcept {}

  // For abandon(): if nobody has begun the work, it is not done any more. Where all work is done by
  // those who wait for it, it would stay in the queue, with all that it owns.
  void give_up() noexcept;

 private:
  void run() noexcept final;

  const std::shared_ptr<WorkQueue> queue_;
  std::string error_;
  std::atomic<bool> given_up_{false};
  std::atomic<bool> finished_{false};  // publishes error_ and what a subclass has
};

// Tickets that own storages until their work has ended, and a bound for what they own together.
class Departures {
 public:
  static constexpr size_t kNoBound = 0;

  // The tickets add their storages to `leaving` and remove them.
  Departures(size_t bound, std::shared_ptr<LeavingStorages> leaving)
      : leaving_(std::move(leaving)), bound_(bound) {}

  // Blocks until one more storage fits the bound, or nothing is under way. Lets go of the GIL.
  void make_room(const StorageRef& storage);

  void add(std::shared_ptr<WorkTicket> ticket);

  // Blocks until everything that was added has ended.
  void settle();

  size_t nbytes() const { return leaving_->nbytes(); }
  void set_bound(size_t bound) { bound_ = bound; }

 private:
  const std::shared_ptr<LeavingStorages> leaving_;
  std::atomic<size_t> bound_;
  std::mutex mutex_;
  std::deque<std::shared_ptr<WorkTicket>> tickets_;  // oldest first, ended ones dropped from there
};

}  // namespace memswap
