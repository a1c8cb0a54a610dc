// Transfers of storages in host memory, done by threads.
#pragma once

#include <atomic>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "lane.h"

namespace memswap {

class WorkerTicket;
struct WorkerLaneState;

// The lane of the CPU as device, and of blocks that only a processor can reach (files). Host memory
// has no streams: what the calling thread has computed is there when it calls, and a ticket's
// wait() blocks. A wait for a transfer that no worker has begun does it on the spot, ahead of the
// queue but never ahead of what the block's uses demand.
//
// A transfer shares its block until it has ended: a worker must reach the bytes. Everything that
// blocks lets go of the GIL. Threads may use one lane together, but one block only one at a time.
// Fork: see WorkQueue.
class WorkerLane final : public Lane {
 public:
  static constexpr size_t kNoBound = 0;

  // `workers` threads. Sends own at most `max_leaving_bytes` bytes of storages (kNoBound: any
  // number): the next send blocks until enough have ended. A single longer storage goes alone.
  explicit WorkerLane(size_t workers = 1, size_t max_leaving_bytes = kNoBound);
  ~WorkerLane() override;  // blocks until all transfers have ended

  // Throws std::invalid_argument unless the storage is in host memory and as long as the block.
  TicketPtr send(StorageRefPtr storage, BlockPtr block) override;

  // The storage comes from torch's CPU allocator, on the calling thread.
  std::pair<StorageRefPtr, TicketPtr> fetch(BlockPtr block) override;

  void settle() override;
  size_t leaving_bytes() override;
  void set_max_leaving_bytes(size_t bytes) override { max_leaving_bytes_ = bytes; }

  // Ends the workers after all transfers; later ones are done by whoever waits for them.
  void stop();

 private:
  void make_room(size_t nbytes);

  const std::shared_ptr<WorkerLaneState> state_;
  std::atomic<size_t> max_leaving_bytes_;
  std::mutex mutex_;
  std::deque<std::shared_ptr<WorkerTicket>> sends_;  // oldest first, ended ones dropped from there
};

// Whether the transfer behind a ticket of a worker lane failed. A send that failed has left its
// storage as it was: the ticket keeps it and gives it back. Other tickets: false, nullptr.
bool failed(Ticket& ticket);
StorageRefPtr storage_of_failed_send(Ticket& ticket);

}  // namespace memswap
