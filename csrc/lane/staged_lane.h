// Transfers between an accelerator and a file, through pinned host memory.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "lane.h"
#include "pool/pool.h"
#include "stream_lane.h"
#include "worker_lane.h"

namespace memswap {

class StagedFetch;

// [Note: Two legs]
//
// A file is not within a copy engine's reach, so bytes travel in two legs, with a block of pinned
// memory between them: a StreamLane's copy, and a WorkerLane's write or read. What orders them,
// with the line that makes each edge:
//
//   a. copy to pinned memory -> write    start_send(): the write comes `after` the copy's ticket
//   b. write -> pinned memory reused     the write owns the staging block until it has ended
//   c. staging block's last uses -> read start_fetch(): the read comes `after` them
//   d. read -> copy to the device        StagedFetch::launch(): the copy is launched when the read
//                                        has ended, by who waits, or by the next call of the lane
//   e. allocation -> copy                launch(): on the compute stream of the call that allocated
//   f. write -> read of the file's range the worker lane: uses of the file's block
//
// A send is over for the device when the first leg is: its ticket's wait() lets go of the storage
// in stream order and never waits for the disk. Until its write has ended a block is fetched from
// pinned memory. So is one whose write has failed, for as long as the block lives: nothing is lost,
// and the disk's error costs pinned memory.
//
// Blocks that are in host memory (a pool whose requests overflow into a file) take one leg only.
class StagedLane final : public CheckedLane {
 public:
  // `pinned`: where bytes stand between the legs. `pageable`: the same where no memory can be
  // pinned; slower copies, and the same bytes. `max_staging_bytes`: pinned memory for bytes on
  // their way; a send or fetch beyond it first waits for the oldest write, and a longer block goes
  // alone.
  StagedLane(std::shared_ptr<StreamLane> copies, std::shared_ptr<WorkerLane> files,
             std::shared_ptr<Pool> pinned, std::shared_ptr<Pool> pageable, c10::Device device,
             size_t max_staging_bytes);

  std::pair<StorageRefPtr, std::vector<size_t>> gather(
      const std::vector<StorageRefPtr>& storages) override {
    return copies_->gather(storages);
  }
  void meet_stream() override { copies_->meet_stream(); }
  void settle() override { copies_->settle(); }
  size_t leaving_bytes() override { return copies_->leaving_bytes(); }
  void set_max_leaving_bytes(size_t bytes) override { copies_->set_max_leaving_bytes(bytes); }

  c10::Stream send_stream() const { return copies_->send_stream(); }
  c10::Stream fetch_stream() const { return copies_->fetch_stream(); }

  // Bytes that stand between the legs now, those of failed writes included.
  size_t staged_nbytes();

  // Blocks until every write has ended, well or badly.
  void finish_writes();

  // What the first write that failed said, once; empty where none has failed since.
  std::string take_failure();

 private:
  // A block on its way to the file, or one whose write has failed.
  struct Staged {
    std::weak_ptr<Block> block;
    BlockPtr staging;
    TicketPtr write;
  };

  void check(const StorageRef& storage, const Block& block) const override;
  void check(const Block&) const override {}
  TicketPtr start_send(StorageRefPtr storage, size_t offset, BlockPtr block,
                       Tickets after) override;
  TicketPtr start_fetch(BlockPtr block, StorageRefPtr storage, size_t offset,
                        Tickets after) override;
  StorageRefPtr allocate(size_t nbytes) override;

  BlockPtr new_staging(size_t nbytes);
  bool finish_oldest_write();
  void advance();  // launches second legs, and lets go of what has been written

  const std::shared_ptr<StreamLane> copies_;
  const std::shared_ptr<WorkerLane> files_;
  const std::shared_ptr<Pool> pinned_;
  const std::shared_ptr<Pool> pageable_;
  const std::shared_ptr<DeviceStreams> streams_;
  const size_t max_staging_bytes_;
  std::mutex mutex_;  // never held while a ticket is waited for
  std::unordered_map<const Block*, Staged> staged_;
  std::vector<TicketPtr> writes_;  // oldest first
  std::vector<std::weak_ptr<StagedFetch>> fetches_;
  std::string failure_;
};

}  // namespace memswap
