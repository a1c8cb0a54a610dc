#include "stream_lane.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <utility>

namespace memswap {

using Direction = StreamTransfer::Direction;

StreamLane::StreamLane(c10::Device device, size_t max_leaving_bytes, size_t chunk_bytes)
    : streams_(std::make_shared<DeviceStreams>(device)),
      send_stream_(streams_->new_stream()),
      fetch_stream_(streams_->new_stream()),
      chunk_bytes_(chunk_bytes),
      departures_(max_leaving_bytes) {
  TORCH_CHECK(chunk_bytes > 0, "memswap: chunk_bytes must be positive");
}

// Edge 2: who drops a source need not know that it was read here.
std::pair<StorageRefPtr, std::vector<size_t>> StreamLane::gather(
    const std::vector<StorageRefPtr>& storages) {
  const c10::Stream compute = streams_->current();
  auto gathered = memswap::gather(storages);
  for (const StorageRefPtr& ref : storages) {
    streams_->tell_allocator(ref->storage, compute);
  }
  return gathered;
}

template <class CopyChunk>
void StreamLane::submit(const std::shared_ptr<StreamTransfer>& ticket, c10::Stream lane_stream,
                        Block& block, const Tickets& after, CopyChunk&& copy_chunk) {
  streams_->order(lane_stream, ticket->compute());  // edges 1 and 4
  order_after(block.uses(), lane_stream);           // edges 3 and 7
  order_after(after, lane_stream);                  // edge 8
  const auto take_note = [&] {
    ticket->record(lane_stream);
    block.used_by(ticket);
  };
  try {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    const WithoutModes without_modes;
    const c10::StreamGuard guard(lane_stream);
    for (size_t begin = 0; begin < block.nbytes(); begin += chunk_bytes_) {
      copy_chunk(begin, std::min(chunk_bytes_, block.nbytes() - begin));
    }
  } catch (...) {
    take_note();  // some chunks may be under way
    throw;
  }
  take_note();
}

void StreamLane::check(const Block& block) const {
  TORCH_CHECK(block.data() || block.nbytes() == 0,
              "memswap: this lane serves host memory, and the block of ", block.nbytes(),
              " bytes is not in host memory");
}

void StreamLane::check(const StorageRef& storage, const Block& block) const {
  check(block);
  TORCH_CHECK(storage.storage.device() == streams_->device(), "memswap: this lane serves ",
              streams_->device(), ", the storage is on ", storage.storage.device());
}

TicketPtr StreamLane::start_send(StorageRefPtr storage, size_t offset, BlockPtr block,
                                 Tickets after) {
  const c10::DeviceGuard device_guard(streams_->device());
  departures_.make_room(*storage);
  auto ticket =
      std::make_shared<StreamTransfer>(streams_, Direction::kAway, storage, departures_.leaving());
  submit(ticket, send_stream_, *block, after, [&](size_t begin, size_t nbytes) {
    DeviceStreams::host_bytes(*block, begin, nbytes)
        .copy_(streams_->device_bytes(storage->storage, offset + begin, nbytes),
               /*non_blocking=*/block->pinned());
  });
  departures_.add(ticket);
  return ticket;
}

StorageRefPtr StreamLane::allocate(size_t nbytes) {
  const c10::DeviceGuard device_guard(streams_->device());
  departures_.reap();  // first: it may free memory
  return std::make_shared<StorageRef>(streams_->new_bytes(nbytes).storage());
}

TicketPtr StreamLane::start_fetch(BlockPtr block, StorageRefPtr storage, size_t offset,
                                  Tickets after) {
  const c10::DeviceGuard device_guard(streams_->device());
  auto ticket = std::make_shared<StreamTransfer>(streams_, Direction::kBack, storage);
  submit(ticket, fetch_stream_, *block, after, [&](size_t begin, size_t nbytes) {
    streams_->device_bytes(storage->storage, offset + begin, nbytes)
        .copy_(DeviceStreams::host_bytes(*block, begin, nbytes),
               /*non_blocking=*/block->pinned());
  });
  return ticket;
}

}  // namespace memswap
