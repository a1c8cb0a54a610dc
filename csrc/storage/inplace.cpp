#include "inplace.h"

#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/Exception.h>

#include <utility>

namespace memswap {
namespace {

// Neither a version nor an autograd graph notices: the tensor will see the same bytes again.
void set_storage(const at::Tensor& tensor, c10::Storage storage) {
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  impl->set_allow_tensor_metadata_change(true);  // a detached tensor forbids it by default
  impl->set_storage_keep_dtype(std::move(storage));
}

}  // namespace

Holders count_holders(const at::Tensor& tensor) {
  return {tensor.use_count(), tensor.storage().use_count()};
}

Taken take_bytes(const at::Tensor& tensor, const std::string& message) {
  auto shell = std::make_shared<StorageRef>(tensor.storage());
  c10::StorageImpl* impl = shell->storage.unsafeGetStorageImpl();
  const c10::Device device = impl->device();
  const size_t nbytes = impl->nbytes();
  const auto storage_of = [&](c10::DataPtr data) {
    return c10::Storage(c10::Storage::use_byte_size_t(), nbytes, std::move(data), impl->allocator(),
                        /*resizable=*/false);
  };
  const auto nothing = [&] {
    return c10::DataPtr(nullptr, nullptr, &c10::detail::deleteNothing, device);
  };
  c10::Storage refusing = storage_of(nothing());
  refusing.unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(message);
  set_storage(tensor, std::move(refusing));
  auto bytes = std::make_shared<StorageRef>(storage_of(impl->set_data_ptr(nothing())));
  return {std::move(bytes), std::move(shell)};
}

void give_bytes(const at::Tensor& tensor, StorageRef& shell, StorageRef& bytes) {
  c10::StorageImpl* impl = shell.storage.unsafeGetStorageImpl();
  c10::StorageImpl* source = bytes.storage.unsafeGetStorageImpl();
  TORCH_CHECK(impl->nbytes() == source->nbytes() && impl->device() == source->device(),
              "memswap: cannot put ", source->nbytes(), " bytes on ", source->device(),
              " into a storage of ", impl->nbytes(), " bytes on ", impl->device());
  impl->set_data_ptr_noswap(source->set_data_ptr(
      c10::DataPtr(nullptr, nullptr, &c10::detail::deleteNothing, source->device())));
  set_storage(tensor, shell.storage);
}

}  // namespace memswap
