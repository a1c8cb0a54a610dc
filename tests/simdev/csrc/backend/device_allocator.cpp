// The device allocator as torch sees it, and the resizing of storages.
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>

#include "backend.h"

namespace simdev {
namespace {

class DeviceAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(kDeviceType, current_device());
    void* pointer = nullptr;
    try {
      pointer = device_allocate(current_stream(), bytes);
    } catch (const OutOfMemory& error) {
      TORCH_CHECK_WITH(OutOfMemoryError, false, error.what());
    }
    return {pointer, pointer, &device_free, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &device_free; }
  void copy_data(void* destination, const void* source, size_t bytes) const override {
    copy_bytes(destination, source, bytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    for (int device = 0; device < kDevices; ++device) empty_cache(device);
  }
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    if (pointer.get_deleter() == &device_free) record_stream(pointer.get(), stream_id(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const MemoryStats stats = memory_stats(device);
    c10::CachingDeviceAllocator::DeviceStats result;
    constexpr size_t kAggregate = 0;
    auto& allocated = result.allocated_bytes[kAggregate];
    allocated.current = static_cast<int64_t>(stats.allocated);
    allocated.peak = static_cast<int64_t>(stats.peak);
    result.active_bytes[kAggregate] = allocated;
    result.reserved_bytes[kAggregate].current = static_cast<int64_t>(stats.reserved);
    result.reserved_bytes[kAggregate].peak = static_cast<int64_t>(stats.reserved);
    result.num_ooms = static_cast<int64_t>(stats.out_of_memory);
    return result;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { reset_peak(device); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    const MemoryStats stats = memory_stats(device);
    return {stats.capacity - std::min(stats.capacity, stats.reserved), stats.capacity};
  }
};

DeviceAllocator device_allocator;
REGISTER_ALLOCATOR(kDeviceType, &device_allocator)

}  // namespace

void resize_storage(const c10::Storage& storage, size_t bytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  TORCH_CHECK(impl->resizable(), "sim: this storage is not resizable");
  const c10::DeviceGuard guard(impl->device());
  c10::DataPtr fresh(nullptr, impl->device());
  if (bytes) fresh = device_allocator.allocate(bytes);
  const size_t kept = std::min(bytes, impl->nbytes());
  if (kept && impl->data()) copy_bytes(fresh.get(), impl->data(), kept);
  impl->set_data_ptr_noswap(std::move(fresh));
  impl->set_nbytes(bytes);
}

}  // namespace simdev
