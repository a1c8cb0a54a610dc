// Making tensors, and changing what storage they have.
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "ops.h"

namespace simdev {
namespace {

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

void check_not_pinned(std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
}

at::Tensor empty_memory_format(c10::IntArrayRef size, std::optional<at::ScalarType> dtype,
                               std::optional<c10::Layout>, std::optional<c10::Device> device,
                               std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  check_not_pinned(pin);
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, c10::GetAllocator(kDeviceType), kKeys,
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided_op(c10::IntArrayRef size, c10::IntArrayRef stride,
                            std::optional<at::ScalarType> dtype, std::optional<c10::Layout>,
                            std::optional<c10::Device> device, std::optional<bool> pin) {
  check_not_pinned(pin);
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, c10::GetAllocator(kDeviceType), kKeys,
                                           c10::dtype_or_default(dtype));
}

// Not ATen's: its helpers for the CPU copy the old bytes on the host, out of stream order.
const at::Tensor& resize_op(const at::Tensor& self, c10::SymIntArrayRef symbolic_size,
                            std::optional<at::MemoryFormat> format) {
  const auto size = C10_AS_INTARRAYREF_SLOW(symbolic_size);
  if (self.sizes() == size) return self;
  const size_t bytes =
      at::detail::computeStorageNbytesContiguous(size, self.element_size(), self.storage_offset());
  const bool empty = std::find(size.begin(), size.end(), 0) != size.end();
  if (!empty && bytes > self.storage().nbytes()) resize_storage(self.storage(), bytes);
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Contiguous) impl->empty_tensor_restride(*format);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage) {
  return at::native::set_(self, std::move(storage));
}
at::Tensor& set_storage_offset(at::Tensor& self, at::Storage storage, int64_t offset,
                               c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::cpu::set_(self, std::move(storage), offset, size, stride);
}
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return at::native::set_tensor_(self, source);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty_memory_format);
  m.impl("empty_strided", empty_strided_op);
  m.impl("resize_", resize_op);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_offset);
  m.impl("set_.source_Tensor", set_tensor);
}

}  // namespace

at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, at::ScalarType dtype,
                         c10::Device device) {
  return empty_strided_op(sizes, strides, dtype, std::nullopt, device, std::nullopt);
}

}  // namespace simdev
