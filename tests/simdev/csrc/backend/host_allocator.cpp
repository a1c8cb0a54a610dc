// The pinned allocator as torch sees it.
#include <ATen/core/CachingHostAllocator.h>

#include <cstring>

#include "backend.h"

namespace simdev {
namespace {

class HostAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* pointer = nullptr;
    try {
      pointer = pinned_allocate(bytes);
    } catch (const PinFailure& failure) {
      // What cudaHostAlloc's failure becomes: an AcceleratorError, which is a c10::Error.
      constexpr int32_t kOutOfMemory = 2;  // cudaErrorMemoryAllocation
      throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, kOutOfMemory, failure.what());
    }
    return {pointer, pointer, &pinned_free, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &pinned_free; }
  void copy_data(void* destination, const void* source, size_t bytes) const override {
    std::memcpy(destination, source, bytes);
  }
  bool record_event(void* pointer, void* context, c10::Stream stream) override {
    return pinned_record(context, stream_id(stream)) || pinned_record(pointer, stream_id(stream));
  }
  void empty_cache() override { pinned_empty_cache(); }
  at::HostStats get_stats() override {
    const PinnedStats stats = pinned_stats();
    at::HostStats result;
    result.allocated_bytes.current = static_cast<int64_t>(stats.reserved);
    result.active_bytes.current = static_cast<int64_t>(stats.allocated);
    result.active_bytes.peak = static_cast<int64_t>(stats.peak);
    result.num_host_alloc = static_cast<int64_t>(counters().pinned_allocations);
    return result;
  }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

HostAllocator host_allocator;
REGISTER_HOST_ALLOCATOR(kDeviceType, &host_allocator)

}  // namespace
}  // namespace simdev
