#include "memory_share.h"

#include <c10/core/Allocator.h>
#include <c10/core/StorageImpl.h>

#include <memory>
#include <utility>

namespace memswap {
namespace {

// The deleter is also how shared memory is recognised.
void drop_share(void* share) { delete static_cast<MemoryShare*>(share); }

// As allocators give it, and as all of them can take it back.
bool simple(const c10::DataPtr& memory, const c10::Allocator* allocator) {
  return allocator != nullptr && memory.get_context() == memory.get() &&
         memory.get_deleter() == allocator->raw_deleter();
}

}  // namespace

void share_memory(StorageRef& ref) {
  c10::StorageImpl& storage = *ref.storage.unsafeGetStorageImpl();
  c10::DataPtr& memory = storage._mutable_data_ptr_no_checks();
  if (memory.get_deleter() == &drop_share) {
    ref.memory = *static_cast<const MemoryShare*>(memory.get_context());
    return;
  }
  if (memory.get() == nullptr || !storage.resizable() || !simple(memory, storage.allocator())) {
    return;
  }
  auto share = std::make_unique<MemoryShare>();
  const c10::DeleterFnPtr free = memory.get_deleter();
  const c10::Device device = memory.device();
  void* const data = memory.get();
  // The storage is readable all the time, for other threads.
  *share = std::make_shared<c10::DataPtr>(data, memory.release_context(), free, device);
  ref.memory = *share;
  memory = c10::DataPtr(data, share.release(), &drop_share, device);
}

}  // namespace memswap
