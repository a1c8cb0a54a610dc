#include "worker_lane.h"

#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <exception>
#include <stdexcept>
#include <string>

#include "work/without_gil.h"
#include "work_ticket.h"

namespace memswap {

// What a lane's tickets need; they may live longer than the lane.
struct WorkerLaneState {
  explicit WorkerLaneState(size_t workers) : queue(workers) {}

  // A send that failed leaves a block that was never filled. Its later fetch must not succeed, and
  // the block's list of uses may have forgotten the ticket by then.
  struct Unwritten {
    std::weak_ptr<Block> block;
    std::string why;
  };

  LeavingStorages leaving;
  std::mutex mutex;
  std::vector<Unwritten> unwritten;
  WorkQueue queue;  // last: its workers use the rest
};

namespace {

bool same_block(const std::weak_ptr<Block>& one, const BlockPtr& other) {
  return !one.owner_before(other) && !other.owner_before(one);
}

}  // namespace

class WorkerTicket final : public WorkTicket {
 public:
  enum class Direction { kSend, kFetch };

  WorkerTicket(std::shared_ptr<WorkerLaneState> lane, Direction direction, StorageRefPtr storage,
               size_t offset, BlockPtr block, Tickets after)
      : WorkTicket({lane, &lane->queue}),
        lane_(std::move(lane)),
        direction_(direction),
        nbytes_(block->nbytes()),
        offset_(offset),
        memory_(storage->memory),
        storage_(std::move(storage)),
        block_(std::move(block)),
        uses_(block_->uses()),
        after_(std::move(after)) {
    if (direction_ == Direction::kSend) {
      lane_->leaving.add(*storage_);
    }
  }

  StorageRefPtr kept_storage() override {
    return failed() && direction_ == Direction::kSend ? storage_ : nullptr;
  }

 private:
  void work() override {
    wait_for_uses();
    wait_for_others();
    if (direction_ == Direction::kSend) {
      const void* const source = memory_ ? memory_->get() : storage_->storage.data();
      block_->write(static_cast<const std::byte*>(source) + offset_);
      note_written();
    } else {
      check_written();
      block_->read(static_cast<std::byte*>(storage_->storage.mutable_data()) + offset_);
    }
  }

  void let_go(bool failed) noexcept override {
    if (direction_ == Direction::kSend) {
      if (failed) {
        note_unwritten();
      }
      lane_->leaving.remove(*storage_);
    }
    memory_.reset();
    if (direction_ == Direction::kFetch || !failed) {
      storage_.reset();
    }
  }

  // If this was the block's last owner, its pool now asks this very ticket whether it is done.
  void let_go_after_end() noexcept override { block_.reset(); }

  // The block's earlier uses, whose errors are their owners' affair. Fetches do not disturb each
  // other.
  void wait_for_uses() {
    for (const TicketPtr& use : uses_) {
      if (auto* ours = dynamic_cast<WorkerTicket*>(use.get())) {
        if (direction_ == Direction::kSend || ours->direction_ == Direction::kSend) {
          ours->finish();
        }
      } else {
        try {
          use->synchronize();
        } catch (const std::exception&) {
        }
      }
    }
    uses_.clear();
  }

  // Unlike those of the uses, their errors are this transfer's: it would move the wrong bytes.
  void wait_for_others() {
    const Tickets after = std::move(after_);
    for (const TicketPtr& ticket : after) {
      try {
        ticket->synchronize();
      } catch (const std::exception& error) {
        throw TransferError(
            "cannot move " + std::to_string(nbytes_) +
            " bytes, because the work that comes first had failed: " + error.what());
      }
    }
  }

  void note_unwritten() {
    const std::lock_guard lock(lane_->mutex);
    std::erase_if(lane_->unwritten, [](const auto& known) { return known.block.expired(); });
    lane_->unwritten.push_back({block_, error()});
  }

  void note_written() {
    const std::lock_guard lock(lane_->mutex);
    std::erase_if(lane_->unwritten,
                  [&](const auto& known) { return same_block(known.block, block_); });
  }

  void check_written() const {
    const std::lock_guard lock(lane_->mutex);
    const auto found = std::ranges::find_if(
        lane_->unwritten, [&](const auto& known) { return same_block(known.block, block_); });
    if (found != lane_->unwritten.end()) {
      throw TransferError("cannot bring back " + std::to_string(nbytes_) +
                          " bytes that were never sent away; the send had failed: " + found->why);
    }
  }

  const std::shared_ptr<WorkerLaneState> lane_;
  const Direction direction_;
  const size_t nbytes_;
  const size_t offset_;  // in the storage
  // What follows belongs to the thread that runs the work, and after the end to everyone, to read.
  MemoryShare memory_;  // of the storage ([Note: Memory that is taken away]), or nullptr
  StorageRefPtr storage_;
  BlockPtr block_;
  Tickets uses_;
  Tickets after_;
};

WorkerLane::WorkerLane(size_t workers, size_t max_leaving_bytes)
    : state_(std::make_shared<WorkerLaneState>(workers)),
      departures_(max_leaving_bytes, {state_, &state_->leaving}) {}

WorkerLane::~WorkerLane() { stop(); }

void WorkerLane::check(const StorageRef& storage, const Block&) const {
  if (!storage.storage.device().is_cpu()) {
    throw std::invalid_argument("a WorkerLane needs a storage in host memory, found one on " +
                                storage.storage.device().str() + "; use a StreamLane for it");
  }
}

TicketPtr WorkerLane::start_send(StorageRefPtr storage, size_t offset, BlockPtr block,
                                 Tickets after) {
  departures_.make_room(*storage);
  auto ticket = std::make_shared<WorkerTicket>(state_, WorkerTicket::Direction::kSend,
                                               std::move(storage), offset, block, std::move(after));
  departures_.add(ticket);
  block->used_by(ticket);
  state_->queue.submit(ticket);
  return ticket;
}

StorageRefPtr WorkerLane::allocate(size_t nbytes) {
  return std::make_shared<StorageRef>(c10::Storage(c10::Storage::use_byte_size_t(), nbytes,
                                                   c10::GetCPUAllocator(), /*resizable=*/true));
}

TicketPtr WorkerLane::start_fetch(BlockPtr block, StorageRefPtr storage, size_t offset,
                                  Tickets after) {
  auto ticket = std::make_shared<WorkerTicket>(state_, WorkerTicket::Direction::kFetch,
                                               std::move(storage), offset, block, std::move(after));
  block->used_by(ticket);
  state_->queue.submit(ticket);
  return ticket;
}

void WorkerLane::stop() {
  const WithoutGil without_gil;  // the last storages may need it to be dropped
  state_->queue.stop();
}

}  // namespace memswap
