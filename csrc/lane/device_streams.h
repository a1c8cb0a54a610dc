// What everything needs that runs on streams of its own on one device: events, ordering, memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <atomic>
#include <mutex>
#include <vector>

#include "lane.h"
#include "work/ticket.h"

namespace memswap {

// Transfers are not operators of the user's program: a TorchDispatchMode (a FLOP counter, fake
// tensors, selective checkpointing) must not see, count or replace them.
struct WithoutModes {
  c10::impl::ExcludeDispatchKeyGuard guard{
      c10::DispatchKeySet(std::initializer_list<c10::DispatchKey>{
          c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
};

// [Note: One compute stream]
//
// record_stream tells the caching allocator that a stream has used memory which may belong to
// another. For the stream that owns the memory it changes nothing, but it need not be free:
// torch_npu records an event for the owner as well, puts the free off until that has passed, and
// ends the process where the device is lost. So while the device's default stream is the only
// compute stream that a lane has met, it says nothing: what is allocated, used and dropped in the
// order of one stream needs no more. From the first other stream on, each storage that is let go of
// is told of the streams that used it.
//
// Memory that the program has allocated on another stream, and hands to the default one before the
// lane has met the other, is the program's to tell, as torch's own rule has it.

// Shared by a lane and its tickets, which may live longer. Thread-safe.
class DeviceStreams {
 public:
  explicit DeviceStreams(c10::Device device);

  c10::Device device() const { return device_; }
  c10::Stream new_stream() const { return backend_.getNewStream(device_); }

  // "Compute": whatever is current for the calling thread. Asked for anew each time.
  c10::Stream current();

  // Events are made once and used again.
  c10::Event take_event();
  void give_event(c10::Event event);

  // What is submitted to `later` from now on comes after what was submitted to `earlier` so far.
  void order(c10::Stream later, c10::Stream earlier);

  // The caching allocator learns that the compute stream `user` has used the storage's memory
  // ([Note: One compute stream]).
  void tell_allocator(const c10::Storage& storage, c10::Stream user);

  // Allocated on the current stream.
  at::Tensor new_bytes(size_t nbytes) const;

  // Bytes of a storage on the device, as a tensor; and of a block in host memory.
  at::Tensor device_bytes(const c10::Storage& storage, size_t offset, size_t nbytes) const;
  static at::Tensor host_bytes(const Block& block, size_t offset, size_t nbytes);

 private:
  const c10::Device device_;
  const c10::impl::VirtualGuardImpl backend_;
  const c10::DispatchKeySet keys_;  // of a tensor on the device
  const c10::StreamId default_;
  std::atomic<bool> several_compute_{false};  // another than the default was met
  std::mutex mutex_;
  std::vector<c10::Event> idle_events_;
};

// The completion of work on a stream. Other streams can come after it without the host waiting for
// anything.
class StreamTicket : public Ticket {
 public:
  // What is submitted to `stream` from now on comes after the work. A stream of another kind of
  // device cannot wait for it: then the calling thread blocks.
  virtual void order_before(c10::Stream stream) = 0;
};

// `stream` comes after the work behind these tickets; the host waits for those that are no
// stream's.
void order_after(const Tickets& tickets, c10::Stream stream);

}  // namespace memswap
