// [Note: the allocator's stream order]
// The driver sees segments of megabytes and none of the reuse inside them. So every allocation and
// every free of torch_npu's caching allocator is made a task of the block's stream, a write of the
// whole block, and a free poisons it: who uses memory before its allocation or after its free, on
// another stream and without a wait, is reported, and reads NaN. The tasks travel through the task
// queue like all others, for their place among them is what counts.
#include "allocator_trace.h"

#include <torch_npu/csrc/core/npu/NPUCachingAllocator.h>
#include <torch_npu/csrc/framework/OpCommand.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <exception>
#include <map>
#include <mutex>
#include <string_view>
#include <utility>

#include "../../simdev/csrc/runtime/clock.h"
#include "../acl/launch.h"

namespace fake_acl {
namespace {

using Entry = c10_npu::NPUCachingAllocator::TraceEntry;

struct Book {
  std::mutex mutex;
  std::map<int64_t, LiveTensor> live;
  std::array<size_t, simdev::kDevices> deferred{};
  uint64_t serial = 0;
};

Book& book() {
  static Book* the_book = new Book();  // tensors are freed while the process ends
  return *the_book;
}

void note(const Entry& entry) {
  Book& b = book();
  const std::lock_guard lock(b.mutex);
  size_t& deferred = b.deferred[static_cast<size_t>(entry.device_)];
  switch (entry.action_) {
    case Entry::ALLOC:
      b.live[entry.addr_] = {static_cast<size_t>(entry.size_), ++b.serial, entry.device_};
      break;
    case Entry::FREE_REQUESTED:
      b.live.erase(entry.addr_);
      ++deferred;
      break;
    case Entry::FREE_COMPLETED:
      deferred -= std::min<size_t>(deferred, 1);
      break;
    default:
      break;
  }
}

// A failed task queue says so once, to whoever comes next. A free may be that one, and it is called
// by destructors: it keeps the error for the next who may throw.
std::mutex kept_mutex;
std::exception_ptr kept_error;

// [Note: no GIL under the allocator's lock]
// This is called under the allocator's lock. Where the task queue is off, torch_npu lets go of the
// GIL around each launch and takes it back: a thread that frees a tensor in Python would wait for
// the GIL with that lock, and another one for the lock with the GIL. So the machine is told
// directly then, which is the same place in the order.
bool queue_is_off() {
  static const bool off = [] {
    const char* queue = std::getenv("TASK_QUEUE_ENABLE");
    const char* blocking = std::getenv("ASCEND_LAUNCH_BLOCKING");
    return (queue && std::string_view(queue) == "0") ||
           (blocking && std::string_view(blocking) == "1");
  }();
  return off;
}

void on_entry(const Entry& entry) {
  note(entry);
  if (entry.action_ != Entry::ALLOC && entry.action_ != Entry::FREE_COMPLETED) return;
  const bool poison = entry.action_ == Entry::FREE_COMPLETED;
  if (!poison) rethrow_kept_error();
  auto* begin = reinterpret_cast<void*>(entry.addr_);
  if (queue_is_off()) {
    fake_acl_change_owner(entry.stream_, begin, static_cast<size_t>(entry.size_), poison);
    return;
  }
  try {
    at_npu::native::OpCommand::RunOpApiV2(
        poison ? "free" : "allocate",
        [stream = entry.stream_, begin, bytes = static_cast<size_t>(entry.size_), poison]() -> int {
          fake_acl_change_owner(stream, begin, bytes, poison);
          return 0;
        });
  } catch (const std::exception&) {
    if (!poison) throw;
    const std::lock_guard lock(kept_mutex);
    if (!kept_error) kept_error = std::current_exception();
  }
}

}  // namespace

void rethrow_kept_error() {
  std::exception_ptr error;
  {
    const std::lock_guard lock(kept_mutex);
    error = std::exchange(kept_error, nullptr);
  }
  if (error) std::rethrow_exception(error);
}

void trace_allocator() { c10_npu::NPUCachingAllocator::attachAllocatorTraceTracker(&on_entry); }

std::vector<LiveTensor> live_tensors(uint64_t after_serial) {
  Book& b = book();
  const std::lock_guard lock(b.mutex);
  std::vector<LiveTensor> found;
  for (const auto& [address, tensor] : b.live)
    if (tensor.serial > after_serial) found.push_back(tensor);
  return found;
}

uint64_t last_tensor_serial() {
  Book& b = book();
  const std::lock_guard lock(b.mutex);
  return b.serial;
}

size_t deferred_frees(int device) {
  Book& b = book();
  const std::lock_guard lock(b.mutex);
  return b.deferred.at(static_cast<size_t>(device));
}

}  // namespace fake_acl
