#include "device_streams.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <utility>

#include "gather.h"

namespace memswap {
namespace {

at::Tensor new_bytes_on(c10::Device device, size_t nbytes) {
  const WithoutModes without_modes;
  return at::empty({static_cast<int64_t>(nbytes)}, at::TensorOptions(device).dtype(at::kByte));
}

c10::Device with_streams(c10::Device device) {
  TORCH_CHECK(device.has_index() && !device.is_cpu(),
              "memswap: a lane of streams needs an accelerator with an index, found ", device);
  return device;
}

}  // namespace

DeviceStreams::DeviceStreams(c10::Device device)
    : device_(with_streams(device)),
      backend_(device.type()),
      keys_(new_bytes_on(device, 0).key_set()),
      default_(backend_.getDefaultStream(device).id()) {}

c10::Stream DeviceStreams::current() {
  const c10::Stream stream = backend_.getStream(device_);
  if (stream.id() != default_) {
    several_compute_ = true;
  }
  return stream;
}

void DeviceStreams::tell_allocator(const c10::Storage& storage, c10::Stream user) {
  if (several_compute_) {
    // Torch's allocators pass over memory that they did not hand out themselves, a part's as well.
    backend_.recordDataPtrOnStream(owner_of(storage).data_ptr(), user);
  }
}

c10::Event DeviceStreams::take_event() {
  std::lock_guard lock(mutex_);
  if (idle_events_.empty()) {
    return c10::Event(device_.type());
  }
  c10::Event event = std::move(idle_events_.back());
  idle_events_.pop_back();
  return event;
}

void DeviceStreams::give_event(c10::Event event) {
  std::lock_guard lock(mutex_);
  idle_events_.push_back(std::move(event));
}

void DeviceStreams::order(c10::Stream later, c10::Stream earlier) {
  c10::Event ready = take_event();
  ready.record(earlier);
  ready.block(later);
  give_event(std::move(ready));  // a wait binds to the recording it saw, so the event is free
}

at::Tensor DeviceStreams::new_bytes(size_t nbytes) const { return new_bytes_on(device_, nbytes); }

at::Tensor DeviceStreams::device_bytes(const c10::Storage& storage, size_t offset,
                                       size_t nbytes) const {
  return byte_view(storage, keys_, offset, nbytes);
}

at::Tensor DeviceStreams::host_bytes(const Block& block, size_t offset, size_t nbytes) {
  // A backend may take memory for pinned only where a storage begins where its allocator's piece
  // does, and let the host wait for copies to and from any other (torch_npu): hence the whole
  // piece.
  return at::for_blob(static_cast<char*>(block.data()) - block.offset(),
                      {static_cast<int64_t>(nbytes)})
      .strides({1})
      .storage_offset(static_cast<int64_t>(block.offset() + offset))
      .options(at::TensorOptions().dtype(at::kByte))
      .make_tensor();
}

void order_after(const Tickets& tickets, c10::Stream stream) {
  for (const TicketPtr& ticket : tickets) {
    if (auto* on_stream = dynamic_cast<StreamTicket*>(ticket.get())) {
      on_stream->order_before(stream);
    } else {
      ticket->synchronize();
    }
  }
}

}  // namespace memswap
