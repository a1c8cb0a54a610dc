// Device memory and pinned host memory, as the driver gives them: no cache, no streams.
//
// The caches above are torch_npu's own. What the machine's runtime.h says of memory is implemented
// here in terms of the driver's allocations.
#include <algorithm>
#include <cstring>

#include "../../simdev/csrc/runtime/machine.h"
#include "calls.h"
#include "streams.h"

namespace fake_acl {
namespace {

using simdev::Block;
using simdev::Machine;

constexpr size_t kDeviceGranularityBytes = 512;
constexpr size_t kPageBytes = 4096;

size_t round_up(size_t bytes, size_t granularity) {
  return std::max<size_t>((bytes + granularity - 1) / granularity * granularity, granularity);
}

// No access is remembered: memory from the driver is new to every stream.
void* allocate_device(size_t requested) {
  const int device = current_device();
  Machine& machine = Machine::get();
  const std::lock_guard lock(machine.mutex);
  simdev::DeviceMemory& memory = machine.device(device);
  if (memory.good_requests_before_failure > 0) {
    --memory.good_requests_before_failure;
  } else if (memory.failing_requests > 0) {
    --memory.failing_requests;
    throw Failure{kOutOfMemory, "no device memory is left: injected"};
  }
  simdev::MemoryStats& stats = memory.stats;
  const size_t bytes = round_up(requested, kDeviceGranularityBytes);
  if (stats.reserved + bytes > stats.capacity) {
    ++stats.out_of_memory;
    throw Failure{kOutOfMemory, "no device memory is left: asked for " + std::to_string(requested) +
                                    " bytes, " + std::to_string(stats.reserved) + " of " +
                                    std::to_string(stats.capacity) + " are taken"};
  }
  Block& block = machine.blocks.map(bytes, false);
  block.stream = {device, 0};
  machine.blocks.begin_life(block, bytes);
  stats.reserved += bytes;
  stats.allocated += bytes;
  stats.peak = std::max(stats.peak, stats.allocated);
  ++stats.requests;
  ++machine.counters.device_allocations;
  return block.pointer();
}

void* allocate_pinned(size_t requested) {
  Machine& machine = Machine::get();
  const std::lock_guard lock(machine.mutex);
  simdev::PinnedMemory& memory = machine.pinned;
  const size_t bytes = round_up(requested, kPageBytes);
  if (memory.budget && memory.stats.allocated + bytes > *memory.budget)
    throw Failure{kOutOfMemory, "the host lets no more memory be pinned"};
  if (memory.good_requests_before_failure > 0) {
    --memory.good_requests_before_failure;
  } else if (memory.failing_requests > 0) {
    --memory.failing_requests;
    throw Failure{kOutOfMemory, "pinning fails: injected"};
  }
  Block& block = machine.blocks.map(bytes, true);
  machine.blocks.begin_life(block, bytes);
  memory.stats.allocated += bytes;
  memory.stats.reserved += bytes;
  memory.stats.peak = std::max(memory.stats.peak, memory.stats.allocated);
  ++memory.stats.requests;
  ++machine.counters.pinned_allocations;
  return block.pointer();
}

// [Note: freeing in use]
// The driver does not wait for streams: who frees memory that a stream still uses is in the wrong,
// and the detector says so. The machine is brought to rest before the pages go, so that such a
// program ends with a report and not with a segmentation fault.
void release(void* pointer, bool pinned) {
  Machine& machine = Machine::get();
  simdev::Scheduler::Lock lock(machine.mutex);
  Block* block = machine.blocks.find(reinterpret_cast<uintptr_t>(pointer));
  if (!block || block->pinned != pinned || block->pointer() != pointer)
    throw Failure{kParameterInvalid, "free of a pointer that was not allocated"};
  if (machine.detector.on()) {
    const simdev::Access access{simdev::kHost, 0, pinned ? "aclrtFreeHost" : "aclrtFree",
                                machine.scheduler.enqueued()};
    machine.detector.check(block->accesses, block->bytes, block->whole(true), access,
                           machine.host_clock, true);
  }
  const simdev::VectorClock known = machine.host_clock;
  for (int device = 0; device < simdev::kDevices; ++device)
    machine.synchronize_device(lock, device);
  machine.host_clock = known;  // the program has not synchronised
  const size_t bytes = block->bytes;
  if (pinned) {
    machine.pinned.stats.allocated -= bytes;
    machine.pinned.stats.reserved -= bytes;
  } else {
    simdev::MemoryStats& stats = machine.device(block->stream.device).stats;
    stats.reserved -= bytes;
    stats.allocated -= bytes;
    ++stats.frees;
  }
  machine.blocks.unmap(*block);
}

simdev::Span span_of(const void* begin, size_t bytes, bool write) {
  const auto address = reinterpret_cast<uintptr_t>(begin);
  return {address, address + bytes, write, false};
}

void check_kind(const void* destination, const void* source, int kind) {
  const bool to_device = simdev::device_of(destination) >= 0;
  const bool from_device = simdev::device_of(source) >= 0;
  const int found = from_device ? (to_device ? kDeviceToDevice : kDeviceToHost)
                                : (to_device ? kHostToDevice : kHostToHost);
  if (kind != found)
    throw Failure{kParameterInvalid, "a copy of kind " + std::to_string(kind) +
                                         " between memory of kind " + std::to_string(found)};
}

void check_length(size_t capacity, size_t bytes) {
  if (bytes > capacity)
    throw Failure{kParameterInvalid, "more bytes than the destination was said to hold"};
}

// Pageable memory: the call returns when the bytes have been read or are there.
void copy_async(void* destination, const void* source, size_t bytes, int kind,
                simdev::StreamId stream) {
  check_kind(destination, source, kind);
  simdev::Launch launch;
  launch.name = kind == kHostToDevice   ? "memcpy_h2d"
                : kind == kDeviceToHost ? "memcpy_d2h"
                                        : "memcpy";
  launch.engine = kind == kHostToDevice   ? simdev::Engine::kHostToDevice
                  : kind == kDeviceToHost ? simdev::Engine::kDeviceToHost
                                          : simdev::Engine::kCompute;
  launch.spans = {span_of(source, bytes, false), span_of(destination, bytes, true)};
  launch.bytes = static_cast<double>(bytes) * (kind == kDeviceToDevice ? 2 : 1);
  simdev::enqueue(stream, launch, simdev::make_work([=] {
                    if (!device_lost()) std::memcpy(destination, source, bytes);
                  }));
  const bool pageable = (kind == kHostToDevice && !simdev::is_pinned(source)) ||
                        (kind == kDeviceToHost && !simdev::is_pinned(destination));
  if (pageable) simdev::synchronize_stream(stream);
}

}  // namespace
}  // namespace fake_acl

using namespace fake_acl;

// ---------------------------------------------------------------- allocation
FAKE_ACL_EXPORT aclError aclrtMalloc(void** pointer, size_t bytes, int) {
  return call("aclrtMalloc", [&] { *pointer = allocate_device(bytes); });
}
FAKE_ACL_EXPORT aclError aclrtMallocAlign32(void** pointer, size_t bytes, int policy) {
  return aclrtMalloc(pointer, bytes, policy);
}
FAKE_ACL_EXPORT aclError aclrtFree(void* pointer) {
  return call("aclrtFree", [&] { release(pointer, false); });
}
FAKE_ACL_EXPORT aclError aclrtMallocHost(void** pointer, size_t bytes) {
  return call("aclrtMallocHost", [&] { *pointer = allocate_pinned(bytes); });
}
FAKE_ACL_EXPORT aclError aclrtMallocHostWithCfg(void** pointer, uint64_t bytes, void*) {
  return aclrtMallocHost(pointer, bytes);
}
FAKE_ACL_EXPORT aclError aclrtFreeHost(void* pointer) {
  return call("aclrtFreeHost", [&] { release(pointer, true); });
}
FAKE_ACL_EXPORT aclError aclrtGetMemInfo(int, size_t* free, size_t* total) {
  return call("aclrtGetMemInfo", [&] {
    const simdev::MemoryStats stats = simdev::memory_stats(current_device());
    *total = stats.capacity;
    *free = stats.capacity > stats.reserved ? stats.capacity - stats.reserved : 0;
  });
}

// ---------------------------------------------------------------- copies
FAKE_ACL_EXPORT aclError aclrtMemcpy(void* destination, size_t capacity, const void* source,
                                     size_t bytes, int kind) {
  return call("aclrtMemcpy", [&] {
    check_length(capacity, bytes);
    const simdev::StreamId stream{current_device(), 0};
    copy_async(destination, source, bytes, kind, stream);
    simdev::synchronize_stream(stream);
  });
}
FAKE_ACL_EXPORT aclError aclrtMemcpyAsync(void* destination, size_t capacity, const void* source,
                                          size_t bytes, int kind, aclrtStream stream) {
  return call("aclrtMemcpyAsync", [&] {
    check_length(capacity, bytes);
    copy_async(destination, source, bytes, kind, stream_id(stream));
  });
}
FAKE_ACL_EXPORT aclError aclrtMemcpyAsyncWithCondition(void* destination, size_t capacity,
                                                       const void* source, size_t bytes, int kind,
                                                       aclrtStream stream) {
  return aclrtMemcpyAsync(destination, capacity, source, bytes, kind, stream);
}
FAKE_ACL_EXPORT aclError aclrtMemset(void* destination, size_t capacity, int value, size_t bytes) {
  return call("aclrtMemset", [&] {
    check_length(capacity, bytes);
    simdev::synchronize_device(current_device());
    std::memset(destination, value, bytes);
  });
}
FAKE_ACL_EXPORT aclError aclrtMemsetAsync(void* destination, size_t capacity, int value,
                                          size_t bytes, aclrtStream stream) {
  return call("aclrtMemsetAsync", [&] {
    check_length(capacity, bytes);
    simdev::Launch launch;
    launch.name = "memset";
    launch.spans = {span_of(destination, bytes, true)};
    launch.bytes = static_cast<double>(bytes);
    simdev::enqueue(stream_id(stream), launch, simdev::make_work([=] {
                      if (!device_lost()) std::memset(destination, value, bytes);
                    }));
  });
}

// ---------------------------------------------------------------- runtime.h, on the driver's
// memory
namespace simdev {

int device_of(const void* pointer) {
  Machine& machine = Machine::get();
  const std::lock_guard lock(machine.mutex);
  Block* block = machine.blocks.find(reinterpret_cast<uintptr_t>(pointer));
  return block && !block->pinned ? block->stream.device : -1;
}

bool is_pinned(const void* pointer) {
  Machine& machine = Machine::get();
  const std::lock_guard lock(machine.mutex);
  Block* block = machine.blocks.find(reinterpret_cast<uintptr_t>(pointer));
  return block && block->pinned;
}

void set_capacity(int device, size_t bytes) {
  Machine& machine = Machine::get();
  const std::lock_guard lock(machine.mutex);
  machine.device(device).stats.capacity = bytes;
}

MemoryStats memory_stats(int device) {
  Machine& machine = Machine::get();
  const std::lock_guard lock(machine.mutex);
  return machine.device(device).stats;
}

void reset_peak(int device) {
  Machine& machine = Machine::get();
  const std::lock_guard lock(machine.mutex);
  MemoryStats& stats = machine.device(device).stats;
  stats.peak = stats.allocated;
}

PinnedStats pinned_stats() {
  Machine& machine = Machine::get();
  const std::lock_guard lock(machine.mutex);
  return machine.pinned.stats;
}

void fail_device_requests(int device, uint64_t skip, uint64_t count) {
  Machine& machine = Machine::get();
  const std::lock_guard lock(machine.mutex);
  machine.device(device).good_requests_before_failure = skip;
  machine.device(device).failing_requests = count;
}

void fail_pinned_requests(uint64_t skip, uint64_t count) {
  Machine& machine = Machine::get();
  const std::lock_guard lock(machine.mutex);
  machine.pinned.good_requests_before_failure = skip;
  machine.pinned.failing_requests = count;
}

void set_pinned_budget(std::optional<size_t> bytes) {
  Machine& machine = Machine::get();
  const std::lock_guard lock(machine.mutex);
  machine.pinned.budget = bytes;
}

void host_access(const void* pointer, size_t bytes, bool write, const char* name) {
  Machine& machine = Machine::get();
  const std::lock_guard lock(machine.mutex);
  if (!machine.detector.on()) return;
  const auto begin = reinterpret_cast<uintptr_t>(pointer);
  Block* block = machine.blocks.find(begin);
  if (!block) return;
  const Access access{kHost, 0, name, machine.scheduler.enqueued()};
  machine.detector.check(block->accesses, block->bytes, {begin, begin + bytes, write, false},
                         access, machine.host_clock, false);
}

}  // namespace simdev
