#include "host_memory.h"

#include <c10/core/CPUAllocator.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <utility>

#include "memswap/frame.h"
#include "pool/host_slabs.h"

namespace memswap {
namespace {

void drop_block(void* context) { delete static_cast<BlockPtr*>(context); }

c10::DataPtr from_system(size_t nbytes) {
  constexpr size_t kAlignment = frame::kAlignmentBytes;
  const size_t rounded = (nbytes + kAlignment - 1) / kAlignment * kAlignment;
  void* bytes = std::aligned_alloc(kAlignment, rounded == 0 ? kAlignment : rounded);
  if (bytes == nullptr) {
    throw std::bad_alloc();
  }
  return {bytes, bytes, &std::free, c10::Device(c10::kCPU)};
}

// Bytes that the spare pool may hold.
size_t spare_budget() {
  constexpr size_t kGiB = size_t{1} << 30;
  const long pages = sysconf(_SC_PHYS_PAGES);
  const long page_bytes = sysconf(_SC_PAGESIZE);
  const size_t memory = pages > 0 && page_bytes > 0
                            ? static_cast<size_t>(pages) * static_cast<size_t>(page_bytes)
                            : 0;
  return std::clamp(memory / 8, kGiB, 4 * kGiB);
}

}  // namespace

c10::DataPtr host_bytes(Pool* pool, size_t nbytes) {
  BlockPtr block = pool != nullptr && nbytes > 0 ? pool->allocate(nbytes) : nullptr;
  if (block == nullptr || block->data() == nullptr) {
    return from_system(nbytes);
  }
  for (const TicketPtr& use : block->uses()) {
    use->synchronize();
  }
  void* bytes = block->data();
  return {bytes, new BlockPtr(std::move(block)), &drop_block, c10::Device(c10::kCPU)};
}

c10::Storage host_storage(Pool* pool, size_t nbytes) {
  return c10::Storage(c10::Storage::use_byte_size_t(), nbytes, host_bytes(pool, nbytes),
                      c10::GetCPUAllocator(), /*resizable=*/true);
}

BlockPtr block_behind(const c10::DataPtr& bytes) {
  return bytes.get_deleter() == &drop_block ? *static_cast<BlockPtr*>(bytes.get_context())
                                            : nullptr;
}

std::shared_ptr<Pool> spare_pool() {
  struct Spare {
    std::mutex mutex;
    std::shared_ptr<Pool> pool;
  };
  // Leaked: tensors may be dropped after every static object is.
  static auto& spare = *new Spare;  // NOLINT
  const std::lock_guard lock(spare.mutex);
  if (spare.pool == nullptr || spare.pool->forked()) {
    spare.pool = std::make_shared<Pool>(
        std::make_shared<BudgetedSlabs>(std::make_shared<OrdinarySlabs>(), spare_budget()),
        PoolOptions{.slab_bytes = size_t{4} << 20, .alignment = 512, .grow_ahead_bytes = 0});
  }
  return spare.pool;
}

}  // namespace memswap
