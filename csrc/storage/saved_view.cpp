#include "saved_view.h"

#include <c10/core/TensorImpl.h>

#include <sstream>

#include "lend.h"
#include "torch_npu.h"

namespace memswap {
namespace {

// Keys under which a tensor is more than a strided look at a storage.
bool is_wrapped(c10::DispatchKeySet keys) {
  using c10::DispatchKey;
  static const c10::DispatchKeySet wrappers(std::initializer_list<DispatchKey>{
      DispatchKey::Python,
      DispatchKey::PythonTLSSnapshot,
      DispatchKey::Functionalize,
      DispatchKey::FuncTorchGradWrapper,
      DispatchKey::FuncTorchBatched,
      DispatchKey::FuncTorchBatchedDecomposition,
      DispatchKey::ZeroTensor,
      DispatchKey::BatchedNestedTensor,
      DispatchKey::NestedTensor,
      DispatchKey::AutogradNestedTensor,
      DispatchKey::Batched,
  });
  return keys.has_any(wrappers);
}

// Below this a whole storage is sent for any part of it.
constexpr size_t kLargeData = size_t{64} << 20;  // bytes
constexpr size_t kSmallShare = 8;                // less than one in so many bytes

// Not every supported torch still has named tensors.
template <class Impl>
bool is_named(const Impl* impl) {
  if constexpr (requires { impl->has_named_tensor_meta(); }) {
    return impl->has_named_tensor_meta();
  } else {
    return false;
  }
}

}  // namespace

std::optional<SavedView> SavedView::capture(const at::Tensor& tensor) {
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  const auto keys = impl->key_set();
  if (!impl->has_storage() || impl->layout() != c10::kStrided || is_wrapped(keys) ||
      impl->has_symbolic_sizes_strides() || tensor.is_inference() || tensor.is_quantized() ||
      tensor.is_meta() || is_named(impl)) {
    return std::nullopt;
  }
  const c10::Storage& storage = impl->storage();
  const size_t storage_nbytes = storage.nbytes();
  const size_t element = impl->itemsize();
  if (storage_nbytes == 0 || impl->numel() == 0) {
    return std::nullopt;
  }
  int64_t last = impl->storage_offset();
  for (int64_t d = 0; d < impl->dim(); ++d) {
    last += (impl->size(d) - 1) * impl->stride(d);
  }
  if ((static_cast<size_t>(last) + 1) * element > storage_nbytes) {
    return std::nullopt;
  }

  SavedView view;
  view.sizes_.assign(impl->sizes().begin(), impl->sizes().end());
  view.strides_.assign(impl->strides().begin(), impl->strides().end());
  view.offset_ = impl->storage_offset();
  view.dtype_ = impl->dtype();
  view.keys_ = keys;
  view.counter_ = impl->version_counter();
  view.version_ = view.counter_.current_version();
  view.device_ = impl->device();
  view.private_format_ = has_private_format(tensor);
  view.key_ = storage.unsafeGetStorageImpl();
  view.storage_nbytes_ = storage_nbytes;
  view.nbytes_ = static_cast<size_t>(impl->numel()) * element;
  view.begin_ = static_cast<size_t>(impl->storage_offset()) * element;
  view.end_ = (static_cast<size_t>(last) + 1) * element;
  view.computed_ = !tensor.is_leaf();
  if ((tensor.requires_grad() && tensor.is_leaf()) || is_lent(*storage.unsafeGetStorageImpl())) {
    view.of_leaf_ = true;  // lent memory holds gathered parameters, frozen ones too
  } else if (tensor.is_view()) {
    const at::TensorBase& base = tensor._base();
    view.of_leaf_ = base.requires_grad() && base.is_leaf();
    view.computed_ = !base.is_leaf();
  } else {
    view.edited_part_ = view.version_ != 0 && view.nbytes_ < storage_nbytes;
  }
  view.part_of_data_ = !view.computed_ && storage_nbytes >= kLargeData &&
                       view.nbytes_ < storage_nbytes / kSmallShare;
  return view;
}

at::Tensor SavedView::rebuild(const StorageRef& storage, bool shares_counter) const {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(storage.storage), keys_, dtype_);
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_offset(offset_);
  impl->set_sizes_and_strides(sizes_, strides_);
  impl->set_version_counter(shares_counter ? counter_ : storage.version);
  return tensor;
}

std::string SavedView::describe() const {
  std::ostringstream out;
  out << c10::scalarTypeToTypeMeta(dtype_.toScalarType()).name() << " [";
  for (size_t d = 0; d < sizes_.size(); ++d) {
    out << (d ? ", " : "") << sizes_[d];
  }
  out << "] on " << device_;
  return out.str();
}

VersionGuard::VersionGuard(const at::Tensor& tensor)
    : counter_(tensor.unsafeGetTensorImpl()->version_counter()),
      version_(counter_.enabled() ? counter_.current_version() : 0) {}

}  // namespace memswap
