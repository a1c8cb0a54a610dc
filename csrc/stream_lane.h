// Transfers between an accelerator and pinned host memory, on streams of their own.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "lane.h"

namespace memswap {

// [Note: Every edge of a swap]
//
// One stream sends (device to host) and one fetches (host to device). "Compute" below is whatever
// stream is current for the calling thread at that moment; it is asked for at each call and only
// ever compared with, never waited on later. The seven edges, and the line that makes each:
//
//   1. producer -> send                  send():   the send stream waits for an event on compute
//   2. send -> memory freed              Send::wait(): compute waits for the send, then the
//   storage's
//                                        last reference is dropped
//   3. send -> fetch of the same block   fetch():  the fetch stream waits for the block's uses
//   4. allocation on compute -> fetch    fetch():  the fetch stream waits for an event on compute
//   5. fetch -> consumer                 Fetch::wait(): compute waits for the fetch
//   6. last consumer -> freed            the storage is allocated on compute and dropped there:
//                                        the caching allocator's own stream order
//   7. fetch -> block used again         send():   the send stream waits for the block's uses, and
//                                        so for those of the range's previous owner
//
// With one compute stream, 3 and 7 follow from 2, 4 and 5; they are needed as soon as compute
// streams do not wait for each other.
//
// Edges 2 and 6 are stream order only where allocation, use and release happen on one stream. A
// storage may have been allocated on another one, and only the allocator knows: before a storage is
// dropped, it is told (record_stream) which compute stream used it. For the stream that owns the
// memory, which is the only stream of most programs, that changes nothing; for any other, the
// memory is reused only behind an event of the stream that was told. The lane's own streams never
// need it, because compute waits for them first, or the host knows that they are done.
//
// Where the host already knows that a transfer has ended (Ticket::done() returned true), the memory
// may be dropped without a wait: everything submitted afterwards comes later.
class StreamLane : public Lane, public std::enable_shared_from_this<StreamLane> {
 public:
  // `max_leaving_bytes`: sends own at most this much device memory; the next send makes compute
  // wait for the oldest before it starts (0: no bound). `chunk_bytes`: longest single copy, so that
  // copies of different lanes can interleave on a shared link.
  StreamLane(c10::Device device, size_t max_leaving_bytes, size_t chunk_bytes);
  ~StreamLane() override;

  TicketPtr send(StorageRefPtr storage, BlockPtr block) override;
  std::pair<StorageRefPtr, TicketPtr> fetch(BlockPtr block) override;
  void settle() override;
  size_t leaving_bytes() override;

  void set_max_leaving_bytes(size_t bytes) override { max_leaving_bytes_ = bytes; }
  c10::Stream send_stream() const { return send_stream_; }
  c10::Stream fetch_stream() const { return fetch_stream_; }

 private:
  class Transfer;
  class Send;
  class Fetch;

  c10::Stream current_stream() const { return backend_.getStream(device_); }
  c10::Event take_event();
  void give_event(c10::Event event);
  void order_after_compute(c10::Stream lane_stream, c10::Stream compute);
  void tell_allocator(const c10::Storage& storage, c10::Stream user) const;
  std::shared_ptr<Send> oldest_send();
  void reap();
  void make_room(size_t nbytes);
  at::Tensor device_bytes(const c10::Storage& storage, size_t offset, size_t nbytes) const;
  template <class CopyChunk>
  void in_chunks(c10::Stream stream, size_t nbytes, CopyChunk&& copy_chunk) const;

  const c10::Device device_;
  const c10::impl::VirtualGuardImpl backend_;
  const c10::Stream send_stream_;
  const c10::Stream fetch_stream_;
  const size_t chunk_bytes_;
  const c10::DispatchKeySet device_keys_;
  std::atomic<size_t> max_leaving_bytes_;

  std::mutex mutex_;  // guards what follows; never held while another lane or ticket is called
  std::vector<c10::Event> idle_events_;
  std::deque<std::shared_ptr<Send>> sends_;
};

}  // namespace memswap
