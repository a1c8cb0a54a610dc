#include "pinned_slabs.h"

#include <ATen/Context.h>
#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <bit>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <utility>

namespace memswap {

namespace {

class PinnedSlab final : public Slab {
 public:
  PinnedSlab(c10::DataPtr memory, size_t nbytes, c10::Device device)
      : memory_(std::move(memory)), size_(nbytes), device_(device) {}

  // [Note: Pinned memory of a lost device]
  // Torch's allocator records an event for each stream that used the memory when it gets it back.
  // Where the device does not answer any more, that throws out of a destructor and ends the
  // process, before the program has heard what happened. The memory is let go of instead.
  ~PinnedSlab() override {
    try {
      c10::Event answer(device_.type());
      answer.record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
    } catch (const std::exception&) {
      memory_.release_context();
    }
  }

  size_t size() const override { return size_; }
  void* data() const override { return memory_.get(); }
  bool pinned() const override { return true; }
  void write(size_t offset, const void* source, size_t nbytes) override {
    std::memcpy(static_cast<std::byte*>(memory_.get()) + offset, source, nbytes);
  }
  void read(size_t offset, void* destination, size_t nbytes) override {
    std::memcpy(destination, static_cast<const std::byte*>(memory_.get()) + offset, nbytes);
  }

 private:
  c10::DataPtr memory_;
  size_t size_;
  c10::Device device_;
};

}  // namespace

PinnedSlabs::PinnedSlabs(c10::Device device) : device_(device) {
  TORCH_CHECK_VALUE(!device.is_cpu(), "pinned memory belongs to an accelerator, found device ",
                    device);
}

SlabResult PinnedSlabs::acquire(size_t nbytes) {
  nbytes = granted(nbytes);
  try {
    // Not at::empty: a dispatch mode of the user (fake tensors, selective checkpointing) would
    // catch it. This is what at::empty(pinned_memory) calls in the end.
    c10::Allocator* allocator = at::globalContext().getPinnedMemoryAllocator(device_.type());
    TORCH_CHECK(allocator != nullptr, "the backend of ", device_, " has no pinned memory");
    // Some backends pin for the current device, and the pool's background thread has chosen none.
    const c10::DeviceGuard guard(device_);
    c10::DataPtr memory = allocator->allocate(nbytes);
    TORCH_CHECK(memory.get() != nullptr, "the pinned allocator of ", device_, " returned nothing");
    return {std::make_unique<PinnedSlab>(std::move(memory), nbytes, device_), {}};
  } catch (const c10::Error& error) {
    throw std::runtime_error(error.what_without_backtrace());  // a user reads it
  }
}

size_t PinnedSlabs::granted(size_t nbytes) const { return std::bit_ceil(nbytes); }

void PinnedSlabs::trim() {
  try {
    at::getHostAllocator(device_.type())->empty_cache();
  } catch (const c10::Error&) {
    // Older backends register no such allocator and keep their cache to themselves.
  }
}

}  // namespace memswap
