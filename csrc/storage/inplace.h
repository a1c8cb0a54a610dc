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

// What take_bytes took: the memory, in a storage that owns it alone, and the tensor's own storage,
// which is without memory until give_bytes.
struct Taken {
  StorageRefPtr bytes;
  StorageRefPtr shell;
};

// Takes the memory from a tensor that nobody shares its storage with. The tensor keeps its size,
// stride, version and place in Python; until give_bytes, reading or writing it raises `message`.
Taken take_bytes(const at::Tensor& tensor, const std::string& message);

// Moves the memory of `bytes`, which is empty afterwards, into `shell`, and gives the tensor its
// storage back. Bytes and device must agree.
void give_bytes(const at::Tensor& tensor, StorageRef& shell, StorageRef& bytes);

}  // namespace memswap
