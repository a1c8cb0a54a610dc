// Encodes and decodes storages on an accelerator, on streams of its own.
#pragma once

#include <c10/core/Stream.h>

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "arena.h"
#include "codec_lane.h"
#include "decode_status.h"
#include "lane/stream_lane.h"

namespace memswap {

// [Note: Every edge of an encode]
//
// One stream encodes and one decodes; a third reads the headers of frames that stay back to pinned
// memory (it is the send stream of a lane of its own, so that no encode waits behind a header).
// "Compute" as in [Note: Every edge of a swap], whose rules hold here as well. A ticket owns every
// storage that its work touches, frames included, until it is ordered; so does the ticket of a
// header's copy. The edges, and the line that makes each:
//
//   1. producer -> encode               start(): the encode stream waits for an event on compute
//   2. frame allocated on compute ->    start(): the same event, recorded after the allocation
//      encode
//   3. encode -> original freed         StreamTransfer::wait(): compute waits for the encode, then
//                                       the ticket's references are dropped
//   4. encode -> header read back       start(): `after` of that lane. A codec that writes it to
//   the
//                                       host itself needs neither: the encode's ticket says when
//   5. encode -> copy of the frame      start(): `after` of the lane that copies
//   6. encode -> decode                 decode(): the decode stream waits for the encode's ticket
//   7. output allocated on compute ->   decode(): the decode stream waits for an event on compute
//      decode
//   8. frame fetched -> decode          decode(): the decode stream waits for the fetch's ticket
//   9. decode -> consumer               StreamTransfer::wait(): compute waits for the decode
//  10. encode, header's copy, decode -> the same waits: the frame is allocated on compute, and the
//      frame freed                      tickets of all three own it until compute is behind them
//  11. decode -> arena used again       Arena::set_back(): encodes wait for the last decode
//  12. last consumer -> output freed    the output is allocated on compute and dropped there
//  13. encode, decode -> pinned memory  Arena::Chunk: the block knows a ticket behind both
//      of the arena given back
//
// With one compute stream, 6 follows from 3 and 7, and 11 from 9 and 1, once the tickets have been
// waited for; they are needed as soon as compute streams do not wait for each other.
class StreamCodecLane final : public CodecLane {
 public:
  struct Options {
    size_t max_leaving_bytes = 0;    // as in StreamLane, of originals
    size_t arena_budget = 0;         // bytes; 0: every frame needs room for its own worst case
    size_t arena_chunk = 16u << 20;  // bytes
    // Pinned memory for the arena, where the codec's kernels reach it; nullptr: none.
    std::shared_ptr<Pool> arena_pool;
  };

  StreamCodecLane(c10::Device device, const Options& options);

  std::optional<Encoding> encode(StorageRefPtr storage, const FrameOptions& options) override;

  // `lane` is a StreamLane of this device, `pool` one of pinned memory. What overflowed stays in
  // the arena.
  std::optional<Encoding> encode_to(StorageRefPtr storage, const FrameOptions& options,
                                    const std::shared_ptr<Lane>& lane,
                                    const std::shared_ptr<Pool>& pool) override;

  std::pair<StorageRefPtr, TicketPtr> decode(const EncodedStoragePtr& encoded) override;

  void meet_stream() override { streams_->current(); }
  void settle() override { departures_.settle(); }
  size_t leaving_bytes() override { return departures_.nbytes(); }
  void set_max_leaving_bytes(size_t bytes) override { departures_.set_bound(bytes); }

  c10::Stream encode_stream() const { return encode_stream_; }
  c10::Stream decode_stream() const { return decode_stream_; }
  c10::Stream control_stream() const { return headers_.send_stream(); }
  Arena::Statistics arena_statistics() const { return arena_->statistics(); }
  size_t trim_arena() { return arena_->trim(); }
  const std::shared_ptr<Pool>& arena_pool() const { return arena_pool_; }
  void set_arena_budget(size_t bytes) { arena_->set_budget(bytes); }

  // A thread that finds no credit waits for the oldest encodes before it is refused, so that the
  // host is ahead of the device by no more than the arena has credit for: for half of those under
  // way at most, since the device is to go on meanwhile.
  //
  // A plan counts on it that overflows take exactly so many bytes of the device, whatever is
  // encoded; nothing ends that. From then on such a thread waits for all of them, and
  // EncodedStorage::device_nbytes() counts as it says there.
  void set_overflow_room(std::optional<size_t> bytes);

  // What decodes found wrong: nothing, unless memory is broken or somebody wrote to it.
  DecodeStatus& decode_status() { return status_; }

 private:
  class Encoded;
  class Header;

  std::optional<Encoding> start(StorageRefPtr storage, const FrameOptions& options,
                                const FramePlan& plan, const std::shared_ptr<Lane>& copies,
                                BlockPtr block);
  std::optional<FramePlan> plan(const StorageRefPtr& storage, const FrameOptions& options);
  void* workspace(const memswap_codec& codec);
  template <class Job>
  int launch(const char* name, c10::Stream stream, const Job& job,
             int (*run)(const Job*, const memswap_launch*), void* workspace) const;
  void settle_known();
  size_t unsettled();
  bool settle_oldest();

  const std::shared_ptr<DeviceStreams> streams_;
  const c10::Stream encode_stream_;
  const c10::Stream decode_stream_;
  const std::shared_ptr<Pool> arena_pool_;
  const std::shared_ptr<Arena> arena_;
  const size_t arena_chunk_;
  std::atomic<bool> planned_{false};         // whether a room for overflows was set
  const std::shared_ptr<Pool> header_pool_;  // pinned
  StreamLane headers_;
  DecodeStatus status_;
  StreamDepartures departures_;
  std::mutex mutex_;
  at::Tensor workspace_;  // of encodes, which are in order on their stream; made with the first
  std::deque<std::weak_ptr<Header>> unsettled_;  // that the host has not seen
};

}  // namespace memswap
