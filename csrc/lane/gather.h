// Several storages in one: small ones travel together.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>

#include <cstddef>
#include <utility>
#include <vector>

#include "pool/block.h"
#include "storage/storage.h"

namespace memswap {

// Where each part begins, bytes: a multiple of what torch's allocators align storages to.
constexpr size_t kPartAlignment = 512;

// Copies of storages of one device, one behind another, on the calling thread's current stream:
// a storage allocated there, and where in it each part begins. Sources whose memory belongs to that
// stream may be dropped as soon as the call has returned; Lane::gather sees to the others. Throws
// std::invalid_argument for storages of different devices, or none.
std::pair<StorageRefPtr, std::vector<size_t>> gather(const std::vector<StorageRefPtr>& storages);

// Bytes of a storage as a tensor of bytes, without a copy and without asking its device. `keys`: of
// a tensor there.
at::Tensor byte_view(const c10::Storage& storage, c10::DispatchKeySet keys, size_t offset,
                     size_t nbytes);

// The first byte of a tensor that a whole block is written from or read into. Throws
// std::invalid_argument unless it is contiguous, in host memory and as long as the block.
void* bytes_for(const Block& block, const at::Tensor& tensor);

// Bytes of a storage as a storage of its own, without a copy. It keeps the whole one alive; its
// memory cannot be resized. Throws std::invalid_argument where it reaches beyond the end.
StorageRefPtr part(const StorageRef& whole, size_t offset, size_t nbytes);

// The storage that the memory of a part belongs to, or the storage itself: what an allocator knows.
const c10::Storage& owner_of(const c10::Storage& storage);

}  // namespace memswap
