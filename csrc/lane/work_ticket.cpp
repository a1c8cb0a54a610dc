#include "work_ticket.h"

#include <exception>
#include <utility>

#include "work/without_gil.h"

namespace memswap {

void WorkTicket::synchronize() {
  finish();
  if (!ended()) {  // nobody is left to do it
    throw TransferError(
        "this process was forked from the one that moved these bytes, whose threads and pools are "
        "not here; run forward and backward in the same process");
  }
  if (!error_.empty()) {
    throw TransferError(error_);
  }
}

void WorkTicket::finish() {
  if (!ended()) {
    const WithoutGil without_gil;
    queue_->finish(*this);
  }
}

void WorkTicket::run() noexcept {
  try {
    if (given_up_) {
      throw TransferError("nobody was to wait for this any more");
    }
    work();
  } catch (const std::exception& error) {
    error_ = error.what();
    if (error_.empty()) {
      error_ = "a transfer failed without saying why";
    }
  } catch (...) {
    error_ = "a transfer failed for an unknown reason";
  }
  let_go(!error_.empty());
  finished_.store(true, std::memory_order_release);
  let_go_after_end();
}

void WorkTicket::give_up() noexcept {
  given_up_ = true;
  queue_->finish_if_queued(*this);
}

void Departures::make_room(const StorageRef& storage) {
  const size_t nbytes = storage.storage.nbytes();
  while (true) {
    std::shared_ptr<WorkTicket> oldest;
    {
      // Tickets of ended work own nothing any more, but for failed ones, whose owners have them.
      std::deque<std::shared_ptr<WorkTicket>> dropped;
      const std::lock_guard lock(mutex_);
      while (!tickets_.empty() && tickets_.front()->ended()) {
        dropped.push_back(std::move(tickets_.front()));
        tickets_.pop_front();
      }
      const size_t leaving = leaving_->nbytes();
      const size_t bound = bound_;
      if (bound == kNoBound || leaving == 0 || tickets_.empty() || leaving_->contains(storage) ||
          (nbytes <= bound && leaving <= bound - nbytes)) {
        return;
      }
      oldest = tickets_.front();
    }
    oldest->finish();
    if (!oldest->ended()) {
      return;  // in a forked child nobody does it
    }
  }
}

void Departures::add(std::shared_ptr<WorkTicket> ticket) {
  const std::lock_guard lock(mutex_);
  tickets_.push_back(std::move(ticket));
}

void Departures::settle() {
  std::deque<std::shared_ptr<WorkTicket>> tickets;
  {
    const std::lock_guard lock(mutex_);
    tickets.swap(tickets_);
  }
  for (const auto& ticket : tickets) {
    ticket->finish();
  }
}

}  // namespace memswap
