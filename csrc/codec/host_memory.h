// Memory of this process for frames and decoded tensors: a block of a pool behind a torch storage.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>

#include <cstddef>

#include "pool/pool.h"

namespace memswap {

// At least `nbytes` bytes, aligned for a frame. Pages of a pool's block are warm, which memory
// fresh from the system is not: touching that for the first time takes longer than encoding into
// it. Where the pool refuses, or is none, the bytes come from the system. The DataPtr owns them.
c10::DataPtr host_bytes(Pool* pool, size_t nbytes);

// A storage of exactly `nbytes` bytes of such memory. Resizing it moves it to torch's own.
c10::Storage host_storage(Pool* pool, size_t nbytes);

// The block behind a DataPtr of host_bytes, or nullptr where a pool did not serve it.
BlockPtr block_behind(const c10::DataPtr& bytes);

// A pool for what has no other: tensors of `encode` and `decode` that no lane and no engine asked
// for. It holds no more than an eighth of the machine's memory, at least 1 and at most 4 GiB; the
// rest comes from the system. (Two incompressible tensors of 256 MiB, their frames and the holes
// between them take 2 GiB.) One per process: it holds memory and nothing else, so nobody can tell
// whether it is shared. A forked child begins with a pool of its own.
std::shared_ptr<Pool> spare_pool();

}  // namespace memswap
