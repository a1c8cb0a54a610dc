// What the operator files offer to each other.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "../backend/state.h"
#include "raw_tensor.h"

namespace simdev {

using Stack = torch::jit::Stack;

// Factories: on the current stream of the device.
at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, at::ScalarType dtype,
                         c10::Device device);
inline at::Tensor empty_like_meta(const at::Tensor& meta, c10::Device device) {
  return empty_strided(meta.sizes(), meta.strides(), meta.scalar_type(), device);
}

// Copies between any two of pageable, pinned and device memory, as CUDA orders them.
at::Tensor copy_from(const at::Tensor& source, const at::Tensor& destination, bool non_blocking);

// Runs any operator that has a CPU kernel, in stream order.
void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack);

// Operators that the fallback alone would get wrong.
void convolution(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack);
void convolution_backward(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack);
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p,
                                                  std::optional<bool> train);

}  // namespace simdev
