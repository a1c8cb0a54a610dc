// Storages, how saved tensors look at them, lent memory and in-place moves.
#include "storage/storage.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include "bind.h"
#include "lane/gather.h"
#include "storage/inplace.h"
#include "storage/lend.h"
#include "storage/saved_view.h"

namespace memswap {

template <>
inline constexpr std::tuple kMembers<Holders>{&Holders::of_tensor, &Holders::of_storage};
template <>
inline constexpr std::tuple kMembers<Taken>{&Taken::bytes, &Taken::shell};

namespace {

uintptr_t storage_key(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->has_storage()
             ? as_int(tensor.storage().unsafeGetStorageImpl())
             : 0;
}

// Whether the node that accumulates a leaf's gradient has hooks, as of DDP. Python knows the leaf's
// own ones alone.
bool accumulator_has_hooks(const at::Tensor& leaf) {
  const auto node = torch::autograd::impl::try_get_grad_accumulator(leaf);
  return node && !(node->pre_hooks().empty() && node->post_hooks().empty());
}

}  // namespace

void bind_storage(py::module_& module) {
  py::class_<StorageRef, StorageRefPtr>(module, "StorageRef")
      .def(py::init([](const at::Tensor& tensor) {
             return std::make_shared<StorageRef>(tensor.storage());
           }),
           "tensor"_a)
      .def_property_readonly("nbytes", [](const StorageRef& ref) { return ref.storage.nbytes(); })
      .def_property_readonly(
          "key", [](const StorageRef& ref) { return as_int(ref.storage.unsafeGetStorageImpl()); });
  Bound<WeakStorage>(module, "WeakStorage")
      .calls<&WeakStorage::expired, &WeakStorage::lock>()
      .def(py::init<const StorageRef&>())
      .def_property_readonly("key", [](const WeakStorage& weak) { return as_int(weak.key()); });
  bind_functions<&storage_key, &part, &SavedView::capture, &accumulator_has_hooks, &lend,
                 &take_back, &count_holders, &take_bytes, &give_bytes>(module);

  Bound<SavedView>(module, "SavedView")
      .reads<&SavedView::of_leaf, &SavedView::storage_nbytes>()
      .def("rebuild", &SavedView::rebuild, "storage"_a, "shares_counter"_a)
      .def_property_readonly("key",
                             [](const SavedView& view) { return as_int(view.storage_key()); });
  Bound<VersionGuard>(module, "VersionGuard")
      .reads<&VersionGuard::edited, &VersionGuard::version, &VersionGuard::current_version>()
      .def(py::init<const at::Tensor&>());

  module.attr("can_lend") = can_lend();
  module.def("is_lent", py::overload_cast<const at::Tensor&>(&is_lent), "tensor"_a);
}

}  // namespace memswap
