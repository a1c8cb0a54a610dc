// The pools that users make: what their slabs are, and what bounds them.
#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <string>

#include "pool.h"

namespace memswap {

// Host memory: pinned for an accelerator, ordinary for the CPU. `budget` in bytes; nothing: none.
// `numa_node`; nothing: any. `pageable`: ordinary memory serves an accelerator where none can be
// pinned. `keeps_pages`: of the CPU's, what blocks leave behind stays with the pool.
std::shared_ptr<Pool> open_host_pool(c10::Device device, std::optional<size_t> budget,
                                     size_t slab_bytes, std::optional<int> numa_node, bool pageable,
                                     bool keeps_pages);

// One nameless file in a folder. Throws std::system_error if none can be made.
std::shared_ptr<Pool> open_disk_pool(const std::string& folder, std::optional<size_t> budget,
                                     size_t extent_bytes);

}  // namespace memswap
