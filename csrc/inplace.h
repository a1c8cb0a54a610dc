// Taking the bytes out of a tensor that keeps its identity, and putting them back.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <string>

#include "storage.h"

namespace memswap {

// References to a tensor and to its storage. Views, aliases, autograd graphs and Python objects all
// hold one, so a tensor that has more of either than a new one has is shared with somebody.
struct Holders {
  size_t of_tensor;
  size_t of_storage;
};
Holders count_holders(const at::Tensor& tensor);

// Moves the memory of the tensor's storage into a storage of its own and leaves the tensor without
// bytes: its size, stride and version stay, reading it raises `message`. The returned storage is
// the only owner of the memory.
StorageRefPtr take_bytes(const at::Tensor& tensor, const std::string& message);

// Moves the memory of `bytes` into the tensor's storage, which take_bytes emptied. `bytes` is
// empty afterwards. Sizes and device must agree.
void give_bytes(const at::Tensor& tensor, StorageRef& bytes);

}  // namespace memswap
