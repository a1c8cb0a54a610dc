// Slabs of host memory.
#pragma once

#include <cstddef>

#include "slab_source.h"

namespace memswap {

// Ordinary memory, straight from the system: starts on a page, costs nothing until it is touched,
// goes back for good when the slab goes. Throws std::system_error.
class OrdinarySlabs final : public SlabSource {
 public:
  SlabResult acquire(size_t nbytes) override;
  size_t granted(size_t nbytes) const override;
};

}  // namespace memswap
