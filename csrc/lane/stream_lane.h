// Transfers between an accelerator and pinned host memory, on streams of their own: their tickets,
// and the lane that makes them.
#pragma once

#include <c10/core/Stream.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>

#include "device_streams.h"
#include "lane.h"
#include "storage/storage.h"

namespace memswap {

// [Note: No lock while holding the GIL]
// A backend may let go of the GIL and take it back inside a call that is made under one of the
// locks of a ticket or a lane (an event query that runs a queue of tasks, a destructor of
// Python's). A thread that held the GIL and waited for that lock would then wait for ever, so every
// way in lets go of the GIL first: the bindings do for calls, and what a destructor can reach does
// it itself.

// The event behind the work, and everything that must outlive it. All of it goes at once: when the
// first stream has waited, or the host knows that the work has ended.
class StreamTransfer final : public StreamTicket {
 public:
  enum class Direction { kAway, kBack };

  // `storage` is what leaves (kAway: sent or encoded) or comes back. What leaves is on the books of
  // `leaving` while it is owned. "Compute" is the stream that is current here.
  StreamTransfer(std::shared_ptr<DeviceStreams> streams, Direction direction, StorageRefPtr storage,
                 std::shared_ptr<LeavingStorages> leaving = nullptr);
  ~StreamTransfer() override;  // anywhere, including while the process ends

  // Before the work is submitted: other memory that it uses, and what else it needs.
  void also_owns(StorageRefPtr storage) { owned_.storages.push_back(std::move(storage)); }
  void also_needs(std::shared_ptr<void> other) { owned_.others.push_back(std::move(other)); }

  c10::Stream compute() const { return compute_; }
  void record(c10::Stream stream);

  // Called at every use, because each may come from another stream.
  void wait() override;
  bool done() override;
  void synchronize() override;
  void abandon() noexcept override;
  void order_before(c10::Stream stream) override;

  bool owns_storage() const { return owns_storage_; }

 private:
  struct Owned {
    c10::SmallVector<StorageRefPtr, 2> storages;
    c10::SmallVector<std::shared_ptr<void>, 2> others;
  };

  Owned let_go();
  Owned known_to_have_ended();

  const std::shared_ptr<DeviceStreams> streams_;
  const Direction direction_;
  const c10::Stream compute_;  // the stream that was current at submission
  const WeakStorage identity_;
  const void* const memory_;  // the storage's, at submission
  const std::shared_ptr<LeavingStorages> leaving_;
  std::atomic<bool> owns_storage_{true};
  std::mutex mutex_;  // guards what follows
  c10::Event event_;
  Owned owned_;
  StorageRefPtr kept_;  // what has other memory than was sent ([Note: Memory that is taken away])
  bool ended_ = false;  // as far as the host knows
  c10::SmallVector<c10::Stream, 2> ordered_;  // streams that have waited
};

// Transfers that own storages until they are ordered, and a bound for what they own together.
class StreamDepartures {
 public:
  explicit StreamDepartures(size_t bound) : bound_(bound) {}

  const std::shared_ptr<LeavingStorages>& leaving() const { return leaving_; }
  size_t nbytes() const { return leaving_->nbytes(); }
  void set_bound(size_t bound) { bound_ = bound; }

  // Lets go of what the host can see has ended.
  void reap();

  // Makes compute wait for the oldest until one more storage fits the bound (0: no bound).
  void make_room(const StorageRef& storage);

  void add(std::shared_ptr<StreamTransfer> transfer);

  // Makes compute wait for everything that was added.
  void settle();

 private:
  std::shared_ptr<StreamTransfer> oldest();

  const std::shared_ptr<LeavingStorages> leaving_ = std::make_shared<LeavingStorages>();
  std::atomic<size_t> bound_;
  std::mutex mutex_;  // never held while a ticket is called
  std::deque<std::shared_ptr<StreamTransfer>> transfers_;
};

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
  // What CheckedLane (lane.h) calls for send, fetch and fetch_into: checks, and what is left to do.
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
