#include "stream_lane.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <exception>

#include "pool/without_gil.h"

namespace memswap {
namespace {

// Transfers are not operators of the user's program: a TorchDispatchMode (a FLOP counter, fake
// tensors, selective checkpointing) must not see, count or replace them.
struct WithoutModes {
  c10::impl::ExcludeDispatchKeyGuard guard{
      c10::DispatchKeySet(std::initializer_list<c10::DispatchKey>{
          c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
};

// Allocated on the current stream.
at::Tensor new_bytes(c10::Device device, size_t nbytes) {
  const WithoutModes without_modes;
  return at::empty({static_cast<int64_t>(nbytes)}, at::TensorOptions(device).dtype(at::kByte));
}

}  // namespace

// [Note: No lock while holding the GIL]
// A backend may let go of the GIL and take it back inside a call that is made under one of the
// locks below (an event query that runs a queue of tasks, a destructor of Python's). A thread that
// held the GIL and waited for that lock would then wait for ever, so every way in lets go of the
// GIL first: the bindings do for calls, and what a destructor can reach does it here.

// What both directions share: the event behind the copy and the storage that must outlive it.
class StreamLane::Transfer : public Ticket {
 public:
  Transfer(std::shared_ptr<StreamLane> lane, StorageRefPtr storage, c10::Stream compute)
      : lane_(std::move(lane)),
        compute_(compute),
        event_(lane_->take_event()),
        storage_(std::move(storage)) {}

  // A ticket may be dropped anywhere, including while the process ends.
  ~Transfer() override {
    const WithoutGil without_gil;
    lane_->give_event(std::move(event_));
  }

  void record(c10::Stream stream) {
    std::lock_guard lock(mutex_);
    event_.record(stream);
  }

  // A lane's stream, not compute, comes after this transfer.
  void order(c10::Stream stream) {
    const WithoutGil without_gil;
    std::lock_guard lock(mutex_);
    event_.block(stream);
  }

  bool done() override {
    const WithoutGil without_gil;
    {
      std::lock_guard lock(mutex_);
      if (!event_.query()) {
        return false;
      }
    }
    forget();
    return true;
  }

  void synchronize() override {
    const WithoutGil without_gil;
    {
      std::lock_guard lock(mutex_);
      event_.synchronize();
    }
    forget();
  }

  void abandon() noexcept override {
    try {
      wait();
    } catch (const std::exception& error) {
      TORCH_WARN("memswap: a transfer could not be ordered before its memory is reused: ",
                 error.what());
    }
  }

 protected:
  // The host knows that the copy has ended. What compute submitted before it may still run.
  void forget() {
    StorageRefPtr storage;  // destroyed outside the lock: that may run arbitrary code
    std::lock_guard lock(mutex_);
    storage.swap(storage_);
    if (storage) {
      lane_->tell_allocator(storage->storage, compute_);
    }
  }

  const std::shared_ptr<StreamLane> lane_;
  const c10::Stream compute_;  // the stream that was current at submission
  std::mutex mutex_;           // guards the event and the storage
  c10::Event event_;
  StorageRefPtr storage_;
};

class StreamLane::Send final : public Transfer {
 public:
  Send(std::shared_ptr<StreamLane> lane, StorageRefPtr storage, c10::Stream compute)
      : Transfer(std::move(lane), std::move(storage), compute),
        nbytes_(storage_->storage.nbytes()) {}
  ~Send() override { abandon(); }

  // Edge 2: compute waits for the send, then the storage is dropped.
  void wait() override {
    const WithoutGil without_gil;
    StorageRefPtr storage;
    {
      std::lock_guard lock(mutex_);
      if (!storage_) {
        return;
      }
      storage.swap(storage_);
      const c10::Stream compute = lane_->current_stream();
      event_.block(compute);
      lane_->tell_allocator(storage->storage, compute);
      if (compute != compute_) {
        lane_->tell_allocator(storage->storage, compute_);
      }
    }
  }

  size_t owned_bytes() {
    std::lock_guard lock(mutex_);
    return storage_ ? nbytes_ : 0;
  }

 private:
  const size_t nbytes_;
};

class StreamLane::Fetch final : public Transfer {
 public:
  Fetch(std::shared_ptr<StreamLane> lane, StorageRefPtr storage, c10::Stream compute)
      : Transfer(std::move(lane), std::move(storage), compute), identity_(*storage_) {}
  ~Fetch() override { abandon(); }

  // Edge 5. Called at every use, because each may come from another stream.
  void wait() override {
    const WithoutGil without_gil;
    StorageRefPtr storage;
    {
      std::lock_guard lock(mutex_);
      const c10::Stream compute = lane_->current_stream();
      if (std::find(ordered_.begin(), ordered_.end(), compute) != ordered_.end()) {
        return;
      }
      storage.swap(storage_);
      if (!storage && !(storage = identity_.lock())) {
        return;  // waited for before, and nobody holds the bytes any more
      }
      event_.block(compute);
      ordered_.push_back(compute);
      if (compute != compute_) {
        lane_->tell_allocator(storage->storage, compute);
      }
    }
  }

 private:
  const WeakStorage identity_;
  c10::SmallVector<c10::Stream, 2> ordered_;
};

StreamLane::StreamLane(c10::Device device, size_t max_leaving_bytes, size_t chunk_bytes)
    : device_(device),
      backend_(device.type()),
      send_stream_(backend_.getNewStream(device)),
      fetch_stream_(backend_.getNewStream(device)),
      chunk_bytes_(chunk_bytes),
      device_keys_(new_bytes(device, 0).key_set()),
      max_leaving_bytes_(max_leaving_bytes) {
  TORCH_CHECK(device.has_index() && !device.is_cpu(),
              "memswap: a stream lane needs an accelerator with an index, found ", device);
  TORCH_CHECK(chunk_bytes > 0, "memswap: chunk_bytes must be positive");
}

// Every ticket holds the lane, so none is left.
StreamLane::~StreamLane() = default;

c10::Event StreamLane::take_event() {
  std::lock_guard lock(mutex_);
  if (idle_events_.empty()) {
    return c10::Event(device_.type());
  }
  c10::Event event = std::move(idle_events_.back());
  idle_events_.pop_back();
  return event;
}

void StreamLane::give_event(c10::Event event) {
  std::lock_guard lock(mutex_);
  idle_events_.push_back(std::move(event));
}

void StreamLane::tell_allocator(const c10::Storage& storage, c10::Stream user) const {
  backend_.recordDataPtrOnStream(storage.data_ptr(), user);
}

void StreamLane::order_after_compute(c10::Stream lane_stream, c10::Stream compute) {
  c10::Event ready = take_event();
  ready.record(compute);
  ready.block(lane_stream);
  give_event(std::move(ready));  // a wait binds to the recording it saw, so the event is free
}

at::Tensor StreamLane::device_bytes(const c10::Storage& storage, size_t offset,
                                    size_t nbytes) const {
  auto tensor =
      at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(storage),
                                               device_keys_, caffe2::TypeMeta::Make<uint8_t>());
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_offset(static_cast<int64_t>(offset));
  impl->set_sizes_contiguous({static_cast<int64_t>(nbytes)});
  return tensor;
}

template <class CopyChunk>
void StreamLane::in_chunks(c10::Stream stream, size_t nbytes, CopyChunk&& copy_chunk) const {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const WithoutModes without_modes;
  c10::StreamGuard guard(stream);
  for (size_t offset = 0; offset < nbytes; offset += chunk_bytes_) {
    copy_chunk(offset, std::min(chunk_bytes_, nbytes - offset));
  }
}

namespace {

at::Tensor host_bytes(const Block& block, size_t offset, size_t nbytes) {
  return at::from_blob(static_cast<char*>(block.data()) + offset, {static_cast<int64_t>(nbytes)},
                       at::TensorOptions().dtype(at::kByte));
}

}  // namespace

TicketPtr StreamLane::send(StorageRefPtr storage, BlockPtr block) {
  const size_t nbytes = storage->storage.nbytes();
  TORCH_CHECK(block->data() && block->nbytes() == nbytes, "memswap: a storage of ", nbytes,
              " bytes cannot be sent into a block of ", block->nbytes(), " bytes",
              block->data() ? "" : " that is not in host memory");
  TORCH_CHECK(storage->storage.device() == device_, "memswap: this lane serves ", device_,
              ", the storage is on ", storage->storage.device());
  const c10::DeviceGuard device_guard(device_);
  const c10::Stream compute = current_stream();
  make_room(nbytes);

  auto ticket = std::make_shared<Send>(shared_from_this(), storage, compute);
  order_after_compute(send_stream_, compute);   // edge 1
  for (const TicketPtr& use : block->uses()) {  // edge 7
    if (auto* transfer = dynamic_cast<Transfer*>(use.get())) {
      transfer->order(send_stream_);
    } else {
      use->synchronize();
    }
  }
  try {
    in_chunks(send_stream_, nbytes, [&](size_t offset, size_t length) {
      host_bytes(*block, offset, length)
          .copy_(device_bytes(storage->storage, offset, length), /*non_blocking=*/true);
    });
  } catch (...) {
    ticket->record(send_stream_);
    block->used_by(ticket);
    throw;
  }
  ticket->record(send_stream_);
  block->used_by(ticket);
  {
    std::lock_guard lock(mutex_);
    sends_.push_back(ticket);
  }
  return ticket;
}

std::pair<StorageRefPtr, TicketPtr> StreamLane::fetch(BlockPtr block) {
  const size_t nbytes = block->nbytes();
  TORCH_CHECK(block->data(), "memswap: this lane fetches from host memory, and the block of ",
              nbytes, " bytes is not in host memory");
  const c10::DeviceGuard device_guard(device_);
  const c10::Stream compute = current_stream();
  reap();

  auto storage = std::make_shared<StorageRef>(new_bytes(device_, nbytes).storage());
  auto ticket = std::make_shared<Fetch>(shared_from_this(), storage, compute);
  order_after_compute(fetch_stream_, compute);  // edge 4
  for (const TicketPtr& use : block->uses()) {  // edge 3
    if (auto* transfer = dynamic_cast<Transfer*>(use.get())) {
      transfer->order(fetch_stream_);
    } else {
      use->synchronize();
    }
  }
  try {
    in_chunks(fetch_stream_, nbytes, [&](size_t offset, size_t length) {
      device_bytes(storage->storage, offset, length)
          .copy_(host_bytes(*block, offset, length), /*non_blocking=*/true);
    });
  } catch (...) {
    ticket->record(fetch_stream_);
    block->used_by(ticket);
    throw;
  }
  ticket->record(fetch_stream_);
  block->used_by(ticket);
  return {std::move(storage), std::move(ticket)};
}

std::shared_ptr<StreamLane::Send> StreamLane::oldest_send() {
  std::vector<std::shared_ptr<Send>> ended;  // destroyed outside the lock
  std::lock_guard lock(mutex_);
  while (!sends_.empty() && sends_.front()->owned_bytes() == 0) {
    ended.push_back(std::move(sends_.front()));
    sends_.pop_front();
  }
  return sends_.empty() ? nullptr : sends_.front();
}

void StreamLane::reap() {
  for (auto oldest = oldest_send(); oldest && oldest->done(); oldest = oldest_send()) {
  }
}

void StreamLane::make_room(size_t nbytes) {
  reap();
  const size_t bound = max_leaving_bytes_.load();
  while (bound != 0 && leaving_bytes() + nbytes > bound) {
    const auto oldest = oldest_send();
    if (!oldest) {
      return;
    }
    oldest->wait();
  }
}

void StreamLane::settle() {
  std::deque<std::shared_ptr<Send>> sends;
  {
    std::lock_guard lock(mutex_);
    sends.swap(sends_);
  }
  for (const auto& send : sends) {
    send->wait();
  }
}

size_t StreamLane::leaving_bytes() {
  const WithoutGil without_gil;
  std::lock_guard lock(mutex_);
  size_t bytes = 0;
  for (const auto& send : sends_) {
    bytes += send->owned_bytes();
  }
  return bytes;
}

}  // namespace memswap
