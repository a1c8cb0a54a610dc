#include "worker_lane.h"

#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <exception>
#include <stdexcept>
#include <string>

#include "pool/without_gil.h"
#include "pool/work_queue.h"

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

  std::atomic<size_t> leaving_bytes{0};
  std::mutex mutex;
  std::vector<Unwritten> unwritten;
  WorkQueue queue;  // last: its workers use the rest
};

namespace {

bool same_block(const std::weak_ptr<Block>& one, const BlockPtr& other) {
  return !one.owner_before(other) && !other.owner_before(one);
}

}  // namespace

class WorkerTicket final : public Ticket, public Work {
 public:
  enum class Direction { kSend, kFetch };

  WorkerTicket(std::shared_ptr<WorkerLaneState> lane, Direction direction, StorageRefPtr storage,
               BlockPtr block)
      : lane_(std::move(lane)),
        direction_(direction),
        nbytes_(block->nbytes()),
        storage_(std::move(storage)),
        block_(std::move(block)),
        after_(block_->uses()) {}

  void wait() override { synchronize(); }

  bool done() override { return finished_.load(std::memory_order_acquire); }

  void synchronize() override {
    finish();
    if (!error_.empty()) {
      throw TransferError(error_);
    }
  }

  // Blocks until the transfer has ended, well or badly.
  void finish() {
    if (!ended()) {
      const WithoutGil without_gil;
      lane_->queue.finish(*this);
    }
  }

  bool failed() { return done() && !error_.empty(); }
  StorageRefPtr storage_of_failed_send() {
    return failed() && direction_ == Direction::kSend ? storage_ : nullptr;
  }

 private:
  void run() noexcept override {
    wait_for_uses();
    try {
      if (direction_ == Direction::kSend) {
        block_->write(storage_->storage.data());
        note_written();
      } else {
        check_written();
        block_->read(storage_->storage.mutable_data());
      }
    } catch (const std::exception& error) {
      error_ = error.what();
    } catch (...) {
      error_ = "a transfer of " + std::to_string(nbytes_) + " bytes failed for an unknown reason";
    }
    if (direction_ == Direction::kSend) {
      if (!error_.empty()) {
        note_unwritten();
      }
      lane_->leaving_bytes -= nbytes_;
    }
    if (direction_ == Direction::kFetch || error_.empty()) {
      storage_.reset();
    }
    // Storage and block are dropped before a waiter wakes, so that both memories can be had at
    // once. If this was the block's last owner, its pool now asks this very ticket whether it is
    // done.
    finished_.store(true, std::memory_order_release);
    block_.reset();
  }

  // The block's earlier uses, whose errors are their owners' affair. Fetches do not disturb each
  // other.
  void wait_for_uses() {
    for (TicketPtr& use : after_) {
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
    after_.clear();
  }

  void note_unwritten() {
    const std::lock_guard lock(lane_->mutex);
    std::erase_if(lane_->unwritten, [](const auto& known) { return known.block.expired(); });
    lane_->unwritten.push_back({block_, error_});
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
  // What follows belongs to the thread that runs the work, and after the end to everyone, to read.
  StorageRefPtr storage_;
  BlockPtr block_;
  std::vector<TicketPtr> after_;
  std::string error_;
  std::atomic<bool> finished_{false};  // publishes what stands above
};

WorkerLane::WorkerLane(size_t workers, size_t max_leaving_bytes)
    : state_(std::make_shared<WorkerLaneState>(workers)), max_leaving_bytes_(max_leaving_bytes) {}

WorkerLane::~WorkerLane() { stop(); }

TicketPtr WorkerLane::send(StorageRefPtr storage, BlockPtr block) {
  if (!storage || !block) {
    throw std::invalid_argument("WorkerLane.send needs a storage and a block, found None");
  }
  if (!storage->storage.device().is_cpu()) {
    throw std::invalid_argument("WorkerLane.send needs a storage in host memory, found one on " +
                                storage->storage.device().str() + "; use a StreamLane for it");
  }
  const size_t nbytes = storage->storage.nbytes();
  if (nbytes != block->nbytes()) {
    throw std::invalid_argument("WorkerLane.send needs a block as long as the storage: expected " +
                                std::to_string(nbytes) + " bytes, found " +
                                std::to_string(block->nbytes()));
  }
  make_room(nbytes);
  auto ticket = std::make_shared<WorkerTicket>(state_, WorkerTicket::Direction::kSend,
                                               std::move(storage), block);
  state_->leaving_bytes += nbytes;
  {
    const std::lock_guard lock(mutex_);
    sends_.push_back(ticket);
  }
  block->used_by(ticket);
  state_->queue.submit(ticket);
  return ticket;
}

std::pair<StorageRefPtr, TicketPtr> WorkerLane::fetch(BlockPtr block) {
  if (!block) {
    throw std::invalid_argument("WorkerLane.fetch needs a block, found None");
  }
  auto storage = std::make_shared<StorageRef>(c10::Storage(c10::Storage::use_byte_size_t(),
                                                           block->nbytes(), c10::GetCPUAllocator(),
                                                           /*resizable=*/true));
  auto ticket =
      std::make_shared<WorkerTicket>(state_, WorkerTicket::Direction::kFetch, storage, block);
  block->used_by(ticket);
  state_->queue.submit(ticket);
  return {std::move(storage), std::move(ticket)};
}

void WorkerLane::make_room(size_t nbytes) {
  while (true) {
    std::shared_ptr<WorkerTicket> oldest;
    {
      // Tickets of ended sends own nothing any more, but for failed ones, whose owners have them.
      std::deque<std::shared_ptr<WorkerTicket>> dropped;
      const std::lock_guard lock(mutex_);
      while (!sends_.empty() && sends_.front()->ended()) {
        dropped.push_back(std::move(sends_.front()));
        sends_.pop_front();
      }
      const size_t leaving = state_->leaving_bytes;
      const size_t bound = max_leaving_bytes_;
      if (bound == kNoBound || leaving == 0 || sends_.empty() ||
          (nbytes <= bound && leaving <= bound - nbytes)) {
        return;
      }
      oldest = sends_.front();
    }
    oldest->finish();
  }
}

void WorkerLane::settle() {
  std::deque<std::shared_ptr<WorkerTicket>> sends;
  {
    const std::lock_guard lock(mutex_);
    sends.swap(sends_);
  }
  for (const auto& send : sends) {
    send->finish();
  }
}

size_t WorkerLane::leaving_bytes() { return state_->leaving_bytes; }

void WorkerLane::stop() {
  const WithoutGil without_gil;  // the last storages may need it to be dropped
  state_->queue.stop();
}

bool failed(Ticket& ticket) {
  auto* ours = dynamic_cast<WorkerTicket*>(&ticket);
  return ours != nullptr && ours->failed();
}

StorageRefPtr storage_of_failed_send(Ticket& ticket) {
  auto* ours = dynamic_cast<WorkerTicket*>(&ticket);
  return ours != nullptr ? ours->storage_of_failed_send() : nullptr;
}

}  // namespace memswap
