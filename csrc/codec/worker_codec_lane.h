// Encodes and decodes storages in host memory, on threads.
#pragma once

#include <memory>
#include <utility>

#include "codec_lane.h"
#include "lane/work_ticket.h"

namespace memswap {

// The codec lane of the CPU as device. On a worker each encode or decode runs on one thread, and
// several run side by side. A wait for what no worker has begun does it on the spot, on torch's
// intra-op threads; with 0 workers all work is done so. As in WorkerLane, what the calling thread
// has computed is there when it calls, and a ticket's wait() blocks.
//
// A frame is encoded into a block long enough for the worst case, which then gives back what the
// frame did not need. Fork: see WorkQueue.
class WorkerCodecLane final : public CodecLane {
 public:
  static constexpr size_t kNoBound = Departures::kNoBound;

  // Frames live in `pool`, of ordinary host memory; decoded storages in `outputs` (nullptr: in
  // `pool` as well), or in memory of the system where that pool refuses.
  WorkerCodecLane(size_t workers, std::shared_ptr<Pool> pool, std::shared_ptr<Pool> outputs,
                  size_t max_leaving_bytes = kNoBound);
  ~WorkerCodecLane() override;  // blocks until all work has ended

  std::optional<Encoding> encode(StorageRefPtr storage, const FrameOptions& options) override;

  // The worker moves the frame itself: `lane` may be nullptr. The block has the frame's own size,
  // and a pool that refuses it fails the ticket.
  std::optional<Encoding> encode_to(StorageRefPtr storage, const FrameOptions& options,
                                    const std::shared_ptr<Lane>& lane,
                                    const std::shared_ptr<Pool>& pool) override;

  std::pair<StorageRefPtr, TicketPtr> decode(const EncodedStoragePtr& encoded) override;

  void settle() override { departures_.settle(); }
  size_t leaving_bytes() override { return departures_.nbytes(); }
  void set_max_leaving_bytes(size_t bytes) override { departures_.set_bound(bytes); }

  // Ends the workers after all work; later work is done by whoever waits for it.
  void stop();

 private:
  std::optional<Encoding> submit(StorageRefPtr storage, const FrameOptions& options,
                                 std::shared_ptr<Pool> destination);

  const std::shared_ptr<Pool> pool_;
  const std::shared_ptr<Pool> outputs_;
  const std::shared_ptr<WorkQueue> queue_;
  const std::shared_ptr<LeavingStorages> leaving_;
  Departures departures_;
};

}  // namespace memswap
