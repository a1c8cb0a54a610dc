#include "gather.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StorageImpl.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>

#include "device_streams.h"

namespace memswap {
namespace {

// The deleter is also how a part is recognised.
void drop_owner(void* owner) { delete static_cast<c10::Storage*>(owner); }

}  // namespace

at::Tensor byte_view(const c10::Storage& storage, c10::DispatchKeySet keys, size_t offset,
                     size_t nbytes) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(storage), keys, caffe2::TypeMeta::Make<uint8_t>());
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_offset(static_cast<int64_t>(offset));
  impl->set_sizes_contiguous({static_cast<int64_t>(nbytes)});
  return tensor;
}

void* bytes_for(const Block& block, const at::Tensor& tensor) {
  if (!tensor.device().is_cpu() || !tensor.is_contiguous()) {
    throw std::invalid_argument("needs a contiguous tensor in host memory");
  }
  if (tensor.nbytes() != block.nbytes()) {
    throw std::invalid_argument("needs a tensor as long as the block: expected " +
                                std::to_string(block.nbytes()) + " bytes, found " +
                                std::to_string(tensor.nbytes()));
  }
  return tensor.data_ptr();
}

std::pair<StorageRefPtr, std::vector<size_t>> gather(const std::vector<StorageRefPtr>& storages) {
  if (storages.empty() || std::ranges::find(storages, nullptr) != storages.end()) {
    throw std::invalid_argument("memswap: found " +
                                std::string(storages.empty() ? "no storages" : "None") +
                                " to gather; expected storages, at least one");
  }
  const c10::Device device = storages.front()->storage.device();
  std::vector<size_t> offsets;
  size_t end = 0;
  for (const StorageRefPtr& ref : storages) {
    if (ref->storage.device() != device) {
      throw std::invalid_argument("memswap: storages that are gathered are on one device; found " +
                                  device.str() + " and " + ref->storage.device().str());
    }
    // What lies between two parts is never read, but it is copied: a machine that checks sees bytes
    // that nobody wrote.
    const size_t begin = (end + kPartAlignment - 1) / kPartAlignment * kPartAlignment;
    offsets.push_back(begin);
    end = begin + ref->storage.nbytes();
  }

  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const WithoutModes without_modes;
  const c10::DeviceGuard guard(device);
  const at::Tensor whole =
      at::empty({static_cast<int64_t>(end)}, at::TensorOptions().dtype(at::kByte).device(device));
  std::vector<at::Tensor> from, to;
  for (size_t i = 0; i < storages.size(); ++i) {
    const size_t nbytes = storages[i]->storage.nbytes();
    from.push_back(byte_view(storages[i]->storage, whole.key_set(), 0, nbytes));
    to.push_back(byte_view(whole.storage(), whole.key_set(), offsets[i], nbytes));
  }
  at::_foreach_copy_(to, from, /*non_blocking=*/true);
  return {std::make_shared<StorageRef>(whole.storage()), std::move(offsets)};
}

StorageRefPtr part(const StorageRef& whole, size_t offset, size_t nbytes) {
  const c10::Storage& storage = whole.storage;
  if (offset > storage.nbytes() || nbytes > storage.nbytes() - offset) {
    throw std::invalid_argument("memswap: found a part of " + std::to_string(nbytes) +
                                " bytes at " + std::to_string(offset) + " of a storage of " +
                                std::to_string(storage.nbytes()) + "; expected it inside");
  }
  auto owner = std::make_unique<c10::Storage>(storage);
  void* data = static_cast<char*>(storage.mutable_data()) + offset;
  c10::DataPtr memory(data, owner.release(), &drop_owner, storage.device());
  auto impl = c10::make_storage_impl(c10::StorageImpl::use_byte_size_t(), nbytes, std::move(memory),
                                     /*allocator=*/nullptr,
                                     /*resizable=*/false, storage.device());
  return std::make_shared<StorageRef>(c10::Storage(std::move(impl)));
}

const c10::Storage& owner_of(const c10::Storage& storage) {
  // A storage without memory to be had (copy-on-write, a shell) is asked nothing.
  const c10::DataPtr& memory = storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  return memory.get_deleter() == &drop_owner
             ? owner_of(*static_cast<const c10::Storage*>(memory.get_context()))
             : storage;
}

}  // namespace memswap
