// Transfers of storages in host memory, done by threads.
#pragma once

#include <cstddef>
#include <memory>

#include "lane.h"
#include "work_ticket.h"

namespace memswap {

struct WorkerLaneState;

// The lane of the CPU as device, and of blocks that only a processor can reach (files). Host memory
// has no streams: what the calling thread has computed is there when it calls, and a ticket's
// wait() blocks. A wait for a transfer that no worker has begun does it on the spot, ahead of the
// queue but never ahead of what the block's uses and the tickets in `after` demand: whoever does
// the transfer waits for those. If the work of one in `after` failed, so does the transfer.
//
// A transfer shares its block until it has ended: a worker must reach the bytes. Everything that
// blocks lets go of the GIL. Threads may use one lane together, but one block only one at a time.
// Fork: see WorkQueue.
class WorkerLane final : public CheckedLane {
 public:
  static constexpr size_t kNoBound = Departures::kNoBound;

  // `workers` threads. Sends own at most `max_leaving_bytes` bytes of storages (kNoBound: any
  // number): the next send blocks until enough have ended. A single longer storage goes alone.
  explicit WorkerLane(size_t workers = 1, size_t max_leaving_bytes = kNoBound);
  ~WorkerLane() override;  // blocks until all transfers have ended

  void settle() override { departures_.settle(); }
  size_t leaving_bytes() override { return departures_.nbytes(); }
  void set_max_leaving_bytes(size_t bytes) override { departures_.set_bound(bytes); }

  // Ends the workers after all transfers; later ones are done by whoever waits for them.
  void stop();

 private:
  // Throws std::invalid_argument unless the storage is in host memory.
  void check(const StorageRef& storage, const Block& block) const override;
  void check(const Block&) const override {}
  TicketPtr start_send(StorageRefPtr storage, size_t offset, BlockPtr block,
                       Tickets after) override;
  TicketPtr start_fetch(BlockPtr block, StorageRefPtr storage, size_t offset,
                        Tickets after) override;
  // From torch's CPU allocator, on the calling thread.
  StorageRefPtr allocate(size_t nbytes) override;

  const std::shared_ptr<WorkerLaneState> state_;
  Departures departures_;
};

}  // namespace memswap
