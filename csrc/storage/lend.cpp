#include "lend.h"

#include <c10/core/Storage.h>
#include <c10/util/Exception.h>

#include <memory>
#include <utility>

namespace memswap {
namespace {

// The deleter is also how lent memory is recognised.
void return_slot(void* owner) { delete static_cast<c10::Storage*>(owner); }

template <class Impl>
constexpr bool forgives = requires(Impl impl) { impl.clear_data_ptr_access_error_msg_(); };

template <class Impl>
void let_be_used(Impl& impl) {
  if constexpr (forgives<Impl>) {
    impl.clear_data_ptr_access_error_msg_();
  } else {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "memswap: lend() needs a newer torch; see can_lend()");
  }
}

}  // namespace

bool can_lend() { return forgives<c10::StorageImpl>; }

void lend(StorageRef& shell, const StorageRef& memory, size_t offset, size_t nbytes) {
  c10::StorageImpl* impl = shell.storage.unsafeGetStorageImpl();
  c10::StorageImpl* source = memory.storage.unsafeGetStorageImpl();
  TORCH_CHECK(!is_lent(*impl), "memswap: lend(): the storage has memory already");
  TORCH_CHECK(impl->device() == source->device(), "memswap: lend(): memory on ", source->device(),
              " for a storage on ", impl->device());
  TORCH_CHECK(offset <= source->nbytes() && nbytes <= source->nbytes() - offset,
              "memswap: lend(): ", nbytes, " bytes at ", offset, " of ", source->nbytes());
  auto owner = std::make_unique<c10::Storage>(memory.storage);
  auto* data = static_cast<char*>(source->mutable_data()) + offset;
  let_be_used(*impl);
  impl->set_data_ptr_noswap(c10::DataPtr(data, owner.release(), &return_slot, source->device()));
  impl->set_nbytes(nbytes);
}

void take_back(StorageRef& shell, const std::string& message) {
  c10::StorageImpl* impl = shell.storage.unsafeGetStorageImpl();
  impl->set_data_ptr_noswap(
      c10::DataPtr(nullptr, nullptr, &c10::detail::deleteNothing, impl->device()));
  impl->release_data_and_set_meta_custom_data_ptr_error_msg_(message);
}

bool is_lent(const at::Tensor& tensor) {
  const c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  return impl->has_storage() && is_lent(*impl->storage().unsafeGetStorageImpl());
}

bool is_lent(c10::StorageImpl& storage) {
  // The one accessor that never materialises a copy-on-write storage nor raises.
  return storage._mutable_data_ptr_no_checks().get_deleter() == &return_slot;
}

bool owns_memory(c10::StorageImpl& storage, size_t nbytes) {
  const bool has_memory = storage._mutable_data_ptr_no_checks().get() != nullptr;
  return storage.nbytes() >= nbytes && (has_memory || nbytes == 0) && !is_lent(storage);
}

}  // namespace memswap
