// What the codec asks of the ACL runtime.
#pragma once

#include <stdint.h>

namespace memswap::ascend {

// Vector cores of the calling thread's current device, or the runtime's error.
int vector_cores(uint32_t* cores);

}  // namespace memswap::ascend
