#include "raw_tensor.h"

#include <c10/core/TensorImpl.h>

#include <thread>

namespace simdev {
namespace {

const at::ThreadLocalState& fresh_state() {
  static const at::ThreadLocalState* state = [] {
    at::ThreadLocalState* captured = nullptr;
    std::thread([&] { captured = new at::ThreadLocalState(); }).join();
    return captured;
  }();
  return *state;
}

}  // namespace

FreshThreadState::FreshThreadState() : fresh_(fresh_state()) {}

RawTensor describe(const at::Tensor& tensor) {
  RawTensor raw;
  raw.sizes = tensor.sizes();
  raw.strides = tensor.strides();
  raw.dtype = tensor.scalar_type();
  raw.wrapped_number = tensor.unsafeGetTensorImpl()->is_wrapped_number();
  raw.conj = tensor.is_conj();
  raw.neg = tensor.is_neg();
  if (tensor.numel() == 0) return raw;
  const auto* storage = tensor.storage().unsafeGetStorageImpl();
  auto* base = static_cast<char*>(const_cast<void*>(storage->data()));
  int64_t last = 0;
  for (size_t i = 0; i < raw.sizes.size(); ++i) last += (raw.sizes[i] - 1) * raw.strides[i];
  const size_t item = tensor.element_size();
  const size_t offset = static_cast<size_t>(tensor.storage_offset()) * item;
  const size_t end = offset + (static_cast<size_t>(last) + 1) * item;
  TORCH_CHECK(base && end <= storage->nbytes(), "sim: illegal memory access: a tensor of shape ",
              tensor.sizes(), " needs ", end, " bytes of a storage that has ", storage->nbytes());
  raw.data = base + offset;
  raw.begin = reinterpret_cast<uintptr_t>(raw.data);
  raw.end = reinterpret_cast<uintptr_t>(base) + end;
  return raw;
}

// By hand rather than by from_blob, which costs several times as much.
at::Tensor as_cpu(const RawTensor& raw) {
  const c10::Device cpu(c10::DeviceType::CPU);
  c10::Storage storage(c10::Storage::use_byte_size_t(), static_cast<size_t>(raw.end - raw.begin),
                       c10::DataPtr(raw.data, cpu), nullptr, false);
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
      c10::scalarTypeToTypeMeta(raw.dtype));
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(raw.sizes, raw.strides);
  if (raw.wrapped_number) impl->set_wrapped_number(true);
  if (raw.conj) tensor._set_conj(true);
  if (raw.neg) tensor._set_neg(true);
  return tensor;
}

}  // namespace simdev
