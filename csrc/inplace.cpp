#include "inplace.h"

#include <c10/core/StorageImpl.h>
#include <c10/util/Exception.h>

namespace memswap {

Holders count_holders(const at::Tensor& tensor) {
  return {tensor.use_count(), tensor.storage().use_count()};
}

StorageRefPtr take_bytes(const at::Tensor& tensor, const std::string& message) {
  c10::StorageImpl* impl = tensor.storage().unsafeGetStorageImpl();
  const size_t nbytes = impl->nbytes();
  const c10::Device device = impl->device();
  c10::Allocator* allocator = impl->allocator();
  // The storage keeps its size in bytes: backends that describe a storage's layout beside it
  // (torch_npu) then have nothing to forget.
  c10::DataPtr bytes =
      impl->set_data_ptr(c10::DataPtr(nullptr, nullptr, &c10::detail::deleteNothing, device));
  impl->release_data_and_set_meta_custom_data_ptr_error_msg_(message);
  return std::make_shared<StorageRef>(c10::Storage(c10::Storage::use_byte_size_t(), nbytes,
                                                   std::move(bytes), allocator,
                                                   /*resizable=*/false));
}

void give_bytes(const at::Tensor& tensor, StorageRef& bytes) {
  c10::StorageImpl* impl = tensor.storage().unsafeGetStorageImpl();
  c10::StorageImpl* source = bytes.storage.unsafeGetStorageImpl();
  TORCH_CHECK(impl->nbytes() == source->nbytes() && impl->device() == source->device(),
              "memswap: cannot put ", source->nbytes(), " bytes on ", source->device(),
              " into a storage of ", impl->nbytes(), " bytes on ", impl->device());
  impl->clear_data_ptr_access_error_msg_();
  const c10::Device device = source->device();
  impl->set_data_ptr_noswap(
      source->set_data_ptr(c10::DataPtr(nullptr, nullptr, &c10::detail::deleteNothing, device)));
}

}  // namespace memswap
