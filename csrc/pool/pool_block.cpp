#include <algorithm>
#include <exception>
#include <stdexcept>
#include <string>
#include <utility>

#include "pool_core.h"
#include "work/leak.h"

namespace memswap {

namespace {

// A block that is fetched again and again (retain_graph) would otherwise collect tickets for ever.
constexpr size_t kPruneTickets = 8;

}  // namespace

bool drop_done(std::vector<TicketPtr>& tickets) {
  std::erase_if(tickets, [](const TicketPtr& ticket) {
    try {
      return ticket->done();
    } catch (const std::exception&) {
      return false;  // who knows: the range stays gated
    }
  });
  return tickets.empty();
}

PoolBlock::PoolBlock(std::shared_ptr<PoolCore> core, Slab& slab, const Range& range, size_t nbytes,
                     std::vector<TicketPtr> behind)
    : core_(std::move(core)),
      slab_(slab),
      offset_(range.offset),
      range_(range),
      nbytes_(nbytes),
      tickets_(std::move(behind)),
      prune_at_(tickets_.size() + kPruneTickets) {}

PoolBlock::~PoolBlock() {
  if (core_->forked()) {
    leak(std::move(tickets_));
    return;
  }
  drop_done(tickets_);
  core_->give_back(range_, nbytes_, std::move(tickets_));
}

void* PoolBlock::data() const {
  auto* first = static_cast<std::byte*>(slab_.data());
  return first == nullptr ? nullptr : first + offset_;
}

size_t PoolBlock::nbytes() const {
  const std::lock_guard lock(mutex_);
  return nbytes_;
}

void PoolBlock::shrink(size_t nbytes) {
  const std::lock_guard lock(mutex_);
  if (nbytes > nbytes_) {
    throw std::invalid_argument("a block of " + std::to_string(nbytes_) +
                                " bytes cannot shrink to " + std::to_string(nbytes));
  }
  range_ = core_->shrink(range_, nbytes_, nbytes);
  nbytes_ = nbytes;
}

void PoolBlock::write(const void* source) {
  if (const size_t length = nbytes(); length > 0) {
    slab_.write(offset_, source, length);
    if (slab_.data() == nullptr) {
      core_->count_written(length);
    }
  }
}

void PoolBlock::read(void* destination) {
  if (const size_t length = nbytes(); length > 0) {
    slab_.read(offset_, destination, length);
  }
}

void PoolBlock::used_by(TicketPtr ticket) {
  if (ticket == nullptr) {
    throw std::invalid_argument("Block::used_by needs a ticket, found none");
  }
  std::vector<TicketPtr> candidates;
  {
    const std::lock_guard lock(mutex_);
    tickets_.push_back(std::move(ticket));
    if (tickets_.size() < prune_at_) {
      return;
    }
    candidates = tickets_;
  }
  // [Note: Gating]: tickets are asked and destroyed outside the lock. `candidates` holds a share of
  // each, so that removing it from tickets_ destroys nothing.
  std::vector<TicketPtr> running = candidates;
  drop_done(running);
  const std::lock_guard lock(mutex_);
  std::erase_if(tickets_, [&](const TicketPtr& known) {
    return std::ranges::find(candidates, known) != candidates.end() &&
           std::ranges::find(running, known) == running.end();
  });
  prune_at_ = tickets_.size() + kPruneTickets;
}

std::vector<TicketPtr> PoolBlock::uses() const {
  const std::lock_guard lock(mutex_);
  return tickets_;
}

}  // namespace memswap
