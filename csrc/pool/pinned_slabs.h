// Slabs of page-locked host memory, which devices copy to and from without the processor.
#pragma once

#include <c10/core/Device.h>

#include <cstddef>

#include "slab_source.h"

namespace memswap {

// Memory from the pinned allocator that torch's backend for `device` brings: CUDA, NPU and any
// PrivateUse1 backend alike. That allocator rounds to powers of two, which granted() says. A slab
// goes back to that allocator; trim() has it return what it caches to the system.
//
// Returned slabs may be reused by torch at once and without regard to copies of ours, so the owner
// of a slab first waits for them; the pool does. Throws std::runtime_error with torch's words: no
// such backend, no pinned memory left.
class PinnedSlabs final : public SlabSource {
 public:
  explicit PinnedSlabs(c10::Device device);

  SlabResult acquire(size_t nbytes) override;
  size_t granted(size_t nbytes) const override;
  void trim() override;

 private:
  c10::Device device_;
};

}  // namespace memswap
