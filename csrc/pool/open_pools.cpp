#include "open_pools.h"

#include <utility>

#include "file_slabs.h"
#include "host_slabs.h"
#include "numa.h"
#include "pinned_slabs.h"
#include "slab_source.h"
#include "spare_slabs.h"
#include "work/stop_at_exit.h"
#include "work/without_gil.h"

namespace memswap {

namespace {

constexpr size_t kHostAlignment = 512;  // bytes

std::shared_ptr<Pool> open_pool(SlabSourcePtr source, std::optional<size_t> budget,
                                const PoolOptions& options) {
  if (budget) {
    source = std::make_shared<BudgetedSlabs>(std::move(source), *budget);
  }
  // Dropping a pool may wait for its background thread and for copies: not with the GIL.
  std::shared_ptr<Pool> pool(new Pool(std::move(source), options), [](Pool* dropped) {
    const WithoutGil without;
    std::unique_ptr<Pool>(dropped).reset();
  });
  return stop_at_exit().add(std::move(pool), &Pool::stop_background);
}

SlabSourcePtr pinned_source(c10::Device device, bool pageable) {
  using Memory = SpareSlabs::Memory;
  SlabSourcePtr pinned = std::make_shared<SpareSlabs>(
      std::make_shared<PinnedSlabs>(device), SpareSlabs::Options{.memory = Memory::kPinned});
  if (!pageable) {
    return pinned;
  }
  return std::make_shared<PageableSlabs>(
      std::move(pinned),
      std::make_shared<SpareSlabs>(std::make_shared<OrdinarySlabs>(),
                                   SpareSlabs::Options{.memory = Memory::kOrdinary}));
}

}  // namespace

std::shared_ptr<Pool> open_host_pool(c10::Device device, std::optional<size_t> budget,
                                     size_t slab_bytes, std::optional<int> numa_node, bool pageable,
                                     bool keeps_pages) {
  using Unused = OrdinarySlabs::Unused;
  SlabSourcePtr source;
  if (device.is_cpu()) {
    source = std::make_shared<OrdinarySlabs>(keeps_pages ? Unused::kKept : Unused::kReturned);
  } else {
    source = pinned_source(device, pageable);
  }
  if (numa_node) {
    source = std::make_shared<NumaSlabs>(std::move(source), *numa_node);
  }
  return open_pool(std::move(source), budget,
                   {.slab_bytes = slab_bytes,
                    .alignment = kHostAlignment,
                    .grow_ahead_bytes = device.is_cpu() ? 0 : slab_bytes / 4});
}

std::shared_ptr<Pool> open_disk_pool(const std::string& folder, std::optional<size_t> budget,
                                     size_t extent_bytes) {
  return open_pool(std::make_shared<FileSlabs>(folder), budget,
                   {.slab_bytes = extent_bytes, .alignment = FileSlabs::kAlignment});
}

}  // namespace memswap
