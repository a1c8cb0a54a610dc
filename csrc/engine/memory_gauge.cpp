#include "memory_gauge.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <fstream>
#include <stdexcept>
#include <string>

// Of Linux 5.14, which the C library's headers may be older than.
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace memswap {

namespace {

class AllocatorGauge final : public MemoryGauge {
 public:
  explicit AllocatorGauge(c10::Device device)
      : allocator_(dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(device.type()))),
        index_(device.index()) {
    if (allocator_ == nullptr) {
      throw std::runtime_error("the allocator of " + device.str() +
                               " tells nobody how much it has handed out");
    }
  }

  int64_t now() const override { return allocated().current; }
  int64_t peak() const override { return allocated().peak; }
  void begin() override { allocator_->resetPeakStats(index_); }
  void count_all_of(void*, size_t) const override {}  // what is allocated counts

 private:
  c10::CachingAllocator::Stat allocated() const {
    constexpr size_t kAggregate = 0;
    return allocator_->getDeviceStats(index_).allocated_bytes[kAggregate];
  }

  c10::DeviceAllocator* allocator_;
  c10::DeviceIndex index_;
};

class ProcessGauge final : public MemoryGauge {
 public:
  ProcessGauge() {
    if (peak() == 0) {
      throw std::runtime_error("/proc/self/status tells no VmHWM on this system");
    }
  }

  int64_t now() const override { return figure("VmRSS:"); }
  int64_t peak() const override { return figure("VmHWM:"); }
  void begin() override {
    // "5" resets the high-water mark (proc_pid_clear_refs(5)). Where a container forbids that, the
    // mark is that of the process' life, which is no less.
    std::ofstream("/proc/self/clear_refs") << "5";
  }
  // A kernel that does not know it counts pages as they come.
  void count_all_of(void* first, size_t nbytes) const override {
    const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
    const auto begins = (reinterpret_cast<std::uintptr_t>(first) + page - 1) / page * page;
    const auto ends = (reinterpret_cast<std::uintptr_t>(first) + nbytes) / page * page;
    if (begins < ends) {
      (void)madvise(reinterpret_cast<void*>(begins), ends - begins, MADV_POPULATE_WRITE);
    }
  }

 private:
  static int64_t figure(const std::string& name) {
    std::ifstream status("/proc/self/status");
    std::string word;
    while (status >> word) {
      if (word == name) {
        int64_t kilobytes = 0;
        status >> kilobytes;
        return kilobytes * 1024;
      }
    }
    return 0;
  }
};

}  // namespace

std::unique_ptr<MemoryGauge> MemoryGauge::of(c10::Device device) {
  if (device.is_cpu()) {
    return std::make_unique<ProcessGauge>();
  }
  return std::make_unique<AllocatorGauge>(device);
}

}  // namespace memswap
