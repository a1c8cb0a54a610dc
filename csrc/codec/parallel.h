// The CPU codec on torch's own threads.
#pragma once

#include "memswap/codec.h"

namespace memswap {

// A launch whose tasks run on torch's intra-op threads, as many as torch.set_num_threads allows.
// Inside a parallel region of torch's everything runs on the calling thread.
memswap_launch on_torch_threads();

}  // namespace memswap
