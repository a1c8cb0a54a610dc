#include "stream_lane.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <exception>
#include <utility>
#include <vector>

#include "work/without_gil.h"

namespace memswap {
namespace {

// Without a question to storages that refuse one.
const void* memory_of(const StorageRef& storage) {
  return storage.storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get();
}

}  // namespace

// --- tickets -------------------------------------------------------------------------------------

StreamTransfer::StreamTransfer(std::shared_ptr<DeviceStreams> streams, Direction direction,
                               StorageRefPtr storage, std::shared_ptr<LeavingStorages> leaving)
    : streams_(std::move(streams)),
      direction_(direction),
      compute_(streams_->current()),
      identity_(*storage),
      memory_(memory_of(*storage)),
      leaving_(std::move(leaving)),
      event_(streams_->take_event()) {
  if (leaving_) {
    leaving_->add(*storage);
  }
  owned_.storages.push_back(std::move(storage));
}

StreamTransfer::~StreamTransfer() {
  abandon();
  streams_->give_event(std::move(event_));
}

void StreamTransfer::record(c10::Stream stream) {
  std::lock_guard lock(mutex_);
  event_.record(stream);
}

void StreamTransfer::order_before(c10::Stream stream) {
  if (stream.device_type() != streams_->device().type()) {
    synchronize();
    return;
  }
  const WithoutGil without_gil;
  std::lock_guard lock(mutex_);
  event_.block(stream);
}

void StreamTransfer::wait() {
  const WithoutGil without_gil;
  Owned owned;  // destroyed outside the lock: that may run arbitrary code
  std::lock_guard lock(mutex_);
  const c10::Stream compute = streams_->current();
  if (std::find(ordered_.begin(), ordered_.end(), compute) != ordered_.end()) {
    return;
  }
  if (!ended_) {
    event_.block(compute);
  }
  ordered_.push_back(compute);
  owned = let_go();
  for (const StorageRefPtr& storage : owned.storages) {
    streams_->tell_allocator(storage->storage, compute);
    if (compute != compute_) {
      streams_->tell_allocator(storage->storage, compute_);
    }
  }
  if (owned.storages.empty() && direction_ == Direction::kBack) {
    // Not the first to wait. (What was sent away is not used by who waits.)
    if (StorageRefPtr storage = identity_.lock()) {
      streams_->tell_allocator(storage->storage, compute);
      owned.storages.push_back(std::move(storage));
    }
  }
}

bool StreamTransfer::done() {
  const WithoutGil without_gil;
  Owned owned;
  std::lock_guard lock(mutex_);
  if (!ended_ && !event_.query()) {
    return false;
  }
  owned = known_to_have_ended();
  return true;
}

void StreamTransfer::synchronize() {
  const WithoutGil without_gil;
  Owned owned;
  std::lock_guard lock(mutex_);
  event_.synchronize();
  owned = known_to_have_ended();
}

void StreamTransfer::abandon() noexcept {
  try {
    if (owns_storage()) {
      wait();
    }
  } catch (const std::exception& error) {
    TORCH_WARN("memswap: a transfer could not be ordered before its memory is reused: ",
               error.what());
  }
}

// The lock is held below; the caller drops what is returned after it.
StreamTransfer::Owned StreamTransfer::let_go() {
  if (leaving_ && owns_storage_) {
    const StorageRefPtr& sent = owned_.storages.front();
    leaving_->remove(*sent);
    if (memory_of(*sent) != memory_) {
      kept_ = sent;
    }
  }
  owns_storage_ = false;
  return std::exchange(owned_, {});
}

// The host knows that the work has ended. What compute submitted before it may still run.
StreamTransfer::Owned StreamTransfer::known_to_have_ended() {
  ended_ = true;
  for (const StorageRefPtr& storage : owned_.storages) {
    streams_->tell_allocator(storage->storage, compute_);
  }
  return let_go();
}

std::shared_ptr<StreamTransfer> StreamDepartures::oldest() {
  std::vector<std::shared_ptr<StreamTransfer>> ended;  // destroyed outside the lock
  std::lock_guard lock(mutex_);
  while (!transfers_.empty() && !transfers_.front()->owns_storage()) {
    ended.push_back(std::move(transfers_.front()));
    transfers_.pop_front();
  }
  return transfers_.empty() ? nullptr : transfers_.front();
}

void StreamDepartures::reap() {
  for (auto first = oldest(); first && first->done(); first = oldest()) {
  }
}

void StreamDepartures::make_room(const StorageRef& storage) {
  reap();
  const size_t bound = bound_.load();
  while (bound != 0 && !leaving_->contains(storage) &&
         leaving_->nbytes() + storage.storage.nbytes() > bound) {
    const auto first = oldest();
    if (!first) {
      return;
    }
    first->wait();
  }
}

void StreamDepartures::add(std::shared_ptr<StreamTransfer> transfer) {
  std::lock_guard lock(mutex_);
  transfers_.push_back(std::move(transfer));
}

void StreamDepartures::settle() {
  std::deque<std::shared_ptr<StreamTransfer>> transfers;
  {
    std::lock_guard lock(mutex_);
    transfers.swap(transfers_);
  }
  for (const auto& transfer : transfers) {
    transfer->wait();
  }
}

// --- the lane ------------------------------------------------------------------------------------

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
