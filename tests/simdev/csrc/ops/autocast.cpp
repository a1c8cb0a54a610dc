// Autocast for the renamed backend.
//
// Boxed, and with two functions of ATen/autocast_mode.h declared here: that header includes every
// operator and takes eight seconds to compile.
#include <torch/library.h>

#include "arguments.h"
#include "ops.h"

namespace at::autocast {
TORCH_API Tensor cached_cast(ScalarType to_type, const Tensor& arg, DeviceType device_type);
TORCH_API ScalarType get_autocast_dtype(DeviceType device_type);
}  // namespace at::autocast

namespace simdev {
namespace {

template <bool kLower>
void cast_arguments(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastPrivateUse1);
  const auto dtype = kLower ? at::autocast::get_autocast_dtype(kDeviceType) : at::kFloat;
  const size_t count = op.schema().arguments().size(), base = stack->size() - count;
  const auto cast = [&](size_t, int, const at::Tensor& tensor) {
    return at::autocast::cached_cast(dtype, tensor, kDeviceType);
  };
  for (size_t i = base; i < stack->size(); ++i) {
    c10::IValue& value = (*stack)[i];
    if (value.isTensor() || value.isTensorList())
      value = map_arguments(&value, 1, c10::Device(kDeviceType), cast)[0];
  }
  op.callBoxed(stack);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

// The operators of CUDA's lists that models use.
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  for (const char* name :
       {"linear", "mm", "bmm", "addmm", "baddbmm", "matmul", "mv", "conv1d", "conv2d", "conv3d",
        "_convolution", "scaled_dot_product_attention", "prelu", "einsum"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&cast_arguments<true>>());
  for (const char* name :
       {"layer_norm", "native_layer_norm", "group_norm", "softmax.int", "log_softmax.int",
        "cross_entropy_loss", "nll_loss_nd", "mse_loss", "l1_loss", "exp", "log", "rsqrt",
        "pow.Tensor_Scalar", "pow.Tensor_Tensor", "cumsum", "norm.Scalar"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&cast_arguments<false>>());
}

}  // namespace
}  // namespace simdev
