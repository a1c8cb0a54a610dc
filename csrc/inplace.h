// Taking the bytes out of a tensor that keeps its identity, and putting them back.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "storage.h"

namespace memswap {

// Who else could see the bytes of `tensor`: an empty string when nobody, otherwise a sentence for
// the user. Holders are counted, so a holder anywhere (a view, an autograd graph, a Python
// UntypedStorage) is found. `known_holders` is the number of references to the tensor that the
// caller knows to be its own.
std::string why_shared(const at::Tensor& tensor, size_t known_holders);

// Moves the memory of the tensor's storage into a storage of its own and leaves the tensor without
// bytes: its size, stride and version stay, reading it raises `message`. The returned storage is
// the only owner of the memory.
StorageRefPtr take_bytes(const at::Tensor& tensor, const std::string& message);

// Moves the memory of `bytes` into the tensor's storage, which take_bytes emptied. `bytes` is
// empty afterwards. Sizes and device must agree.
void give_bytes(const at::Tensor& tensor, StorageRef& bytes);

}  // namespace memswap
