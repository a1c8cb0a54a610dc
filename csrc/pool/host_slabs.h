// Slabs of host memory.
#pragma once

#include <cstddef>

#include "slab_source.h"

namespace memswap {

// Ordinary memory, straight from the system: starts on a page, costs nothing until it is touched,
// goes back for good when the slab goes. Throws std::system_error.
class OrdinarySlabs final : public SlabSource {
 public:
  // What becomes of pages that nobody uses while their slab lives. Kept ones are there already for
  // the next block; of returned ones the process has as many as its blocks take.
  enum class Unused { kKept, kReturned };

  explicit OrdinarySlabs(Unused unused = Unused::kKept) : unused_(unused) {}

  SlabResult acquire(size_t nbytes) override;
  size_t granted(size_t nbytes) const override;

 private:
  const Unused unused_;
};

}  // namespace memswap
