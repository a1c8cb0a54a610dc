// A share of a storage's memory, beside the storage.
#pragma once

#include <c10/core/Storage.h>

#include "storage.h"

namespace memswap {

// [Note: Memory that is taken away]
// Who owns a storage does not own its memory: `untyped_storage().resize_(0)` frees it at once.
// Schemes that compute an output again do that with what operators have saved, and give the storage
// memory again before backward reads it. A send that is under way would read what is not there.
//
// In host memory, which a thread reads, a send owns the memory itself. An accelerator's memory
// belongs to its allocator alone: a send whose storage has other memory by the time it would let go
// of it keeps the storage, so that backward finds what autograd would have found. What is sent
// later than it was saved and has lost its memory by then is not sent.

// Has the storage share its memory with whoever holds `storage->memory`. Where the memory is not
// simply its allocator's (a file's, numpy's), nothing is shared. The caller holds the GIL: two
// threads may send one storage.
void share_memory(StorageRef& storage);

}  // namespace memswap
