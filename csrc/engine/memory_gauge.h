// How much memory a device's allocator has handed out, or how much a process has of a host's.
#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <memory>

namespace memswap {

// Bytes now, and the most of them since somebody began to look. What is read is the system's own
// figure and not memswap's: of an accelerator the allocator's allocated bytes and their peak, of a
// CPU the process' resident memory and its high-water mark (/proc/self/status).
//
// Beginning to look resets the peak that others read as well (`torch.cuda.max_memory_allocated`),
// because an allocator has one.
class MemoryGauge {
 public:
  MemoryGauge() = default;
  MemoryGauge(const MemoryGauge&) = delete;
  MemoryGauge& operator=(const MemoryGauge&) = delete;
  virtual ~MemoryGauge() = default;

  virtual int64_t now() const = 0;
  virtual int64_t peak() const = 0;
  // Look from here on: `peak` is what `now` is.
  virtual void begin() = 0;
  // Memory that was allocated, and that a thread may be filling, counts as a whole from here on: of
  // a CPU the pages that nobody has written are not there. No byte changes.
  virtual void count_all_of(void* first, size_t nbytes) const = 0;

  // Throws std::runtime_error where the device's allocator or the system tells no such figures.
  static std::unique_ptr<MemoryGauge> of(c10::Device device);
};

}  // namespace memswap
