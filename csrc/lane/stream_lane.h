// Transfers between an accelerator and pinned host memory, on streams of their own.
#pragma once

#include <c10/core/Stream.h>

#include <cstddef>
#include <memory>

#include "lane.h"
#include "stream_transfer.h"

namespace memswap {

// [Note: Every edge of a swap]
//
// One stream sends (device to host) and one fetches (host to device). "Compute" below is whatever
// stream is current for the calling thread at that moment; it is asked for at each call and only
// ever compared with, never waited on later. The edges, and the line that makes each:
//
//   1. producer -> send                  submit(): the send stream waits for an event on compute
//   2. send -> memory freed, or written  StreamTransfer::wait(): compute waits for the send, then
//                                        the storage's reference is dropped
//   3. send -> fetch of the same block   submit(): the fetch stream waits for the block's uses
//   4. allocation on compute -> fetch    submit(): the fetch stream waits for an event on compute
//   5. fetch -> consumer                 StreamTransfer::wait(): compute waits for the fetch
//   6. last consumer -> freed            the storage is allocated on compute and dropped there:
//                                        the caching allocator's own stream order
//   7. fetch -> block used again         submit(): the send stream waits for the block's uses, and
//                                        so for those of the range's previous owner
//   8. `after` -> send, fetch            submit(): the lane's stream waits for those tickets
//
// Memory that is not pinned (where a system pins no more) is copied to and from by the host, which
// waits until the copy has ended: slower, by the same edges.
//
// A fetch into a storage that exists writes to memory in use: what compute read there before is
// behind edge 4, and a send of these bytes that compute has not waited for is the caller's to name
// in `after`. What others do with the storage's other bytes is none of the lane's affair.
//
// With one compute stream, 3 and 7 follow from 2, 4 and 5; they are needed as soon as compute
// streams do not wait for each other.
//
// Edges 2 and 6 are stream order only where allocation, use and release happen on one stream. A
// storage may have been allocated on another one, and only the allocator knows: once a lane has met
// a compute stream beside the default one, the allocator is told before a storage is dropped which
// compute stream used it ([Note: One compute stream] in device_streams.h). The lane's own streams
// never need it, because compute waits for them first, or the host knows that they are done.
//
// Where the host already knows that a transfer has ended (Ticket::done() returned true), the memory
// may be dropped without a wait: everything submitted afterwards comes later.
class StreamLane final : public CheckedLane {
 public:
  // `max_leaving_bytes`: sends own at most this much device memory; the next send makes compute
  // wait for the oldest before it starts (0: no bound). `chunk_bytes`: longest single copy, so that
  // copies of different lanes can interleave on a shared link.
  StreamLane(c10::Device device, size_t max_leaving_bytes, size_t chunk_bytes);

  std::pair<StorageRefPtr, std::vector<size_t>> gather(
      const std::vector<StorageRefPtr>& storages) override;
  void meet_stream() override { streams_->current(); }
  void settle() override { departures_.settle(); }
  size_t leaving_bytes() override { return departures_.nbytes(); }
  void set_max_leaving_bytes(size_t bytes) override { departures_.set_bound(bytes); }
  c10::Stream send_stream() const { return send_stream_; }
  c10::Stream fetch_stream() const { return fetch_stream_; }

 private:
  void check(const StorageRef& storage, const Block& block) const override;
  void check(const Block& block) const override;
  TicketPtr start_send(StorageRefPtr storage, size_t offset, BlockPtr block,
                       Tickets after) override;
  TicketPtr start_fetch(BlockPtr block, StorageRefPtr storage, size_t offset,
                        Tickets after) override;
  StorageRefPtr allocate(size_t nbytes) override;

  template <class CopyChunk>
  void submit(const std::shared_ptr<StreamTransfer>& ticket, c10::Stream lane_stream, Block& block,
              const Tickets& after, CopyChunk&& copy_chunk);

  const std::shared_ptr<DeviceStreams> streams_;
  const c10::Stream send_stream_;
  const c10::Stream fetch_stream_;
  const size_t chunk_bytes_;
  StreamDepartures departures_;
};

}  // namespace memswap
