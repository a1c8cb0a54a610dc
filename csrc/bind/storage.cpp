// Weak storages, lent memory and in-place moves, as Python sees them.
#include "storage/storage.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>

#include "lane/gather.h"
#include "storage/inplace.h"
#include "storage/lend.h"
#include "storage/saved_view.h"
#include "storage_ref.h"

namespace memswap {
namespace py = pybind11;

namespace {
uintptr_t as_int(const void* key) { return reinterpret_cast<uintptr_t>(key); }
}  // namespace

void bind_storage(py::module_& module) {
  py::class_<WeakStorage>(module, "WeakStorage", "A storage's identity; owns no memory.")
      .def(py::init<const StorageRef&>())
      .def_property_readonly("key", [](const WeakStorage& weak) { return as_int(weak.key()); })
      .def("expired", &WeakStorage::expired)
      .def("lock", &WeakStorage::lock);

  module.attr("can_lend") = can_lend();
  module.def(
      "lend",
      [](StorageRef& shell, const StorageRef& memory, size_t offset, size_t nbytes) {
        lend(shell, memory, offset, nbytes);
      },
      py::arg("shell"), py::arg("memory"), py::arg("offset"), py::arg("nbytes"),
      "Put nbytes of memory, from offset, under a storage that has none.");
  module.def(
      "take_back", [](StorageRef& shell, const std::string& message) { take_back(shell, message); },
      py::arg("shell"), py::arg("message"),
      "Take the memory away; using the storage then raises the message.");
  module.def(
      "is_lent",
      [](const at::Tensor& tensor) {
        return tensor.unsafeGetTensorImpl()->has_storage() &&
               is_lent(*tensor.storage().unsafeGetStorageImpl());
      },
      py::arg("tensor"), "Whether the tensor's storage has lent memory now.");
  module.def("storage_key", [](const at::Tensor& tensor) {
    return as_int(tensor.unsafeGetTensorImpl()->has_storage()
                      ? tensor.storage().unsafeGetStorageImpl()
                      : nullptr);
  });

  module.def(
      "accumulator_has_hooks",
      [](const at::Tensor& leaf) {
        const auto node = torch::autograd::impl::try_get_grad_accumulator(leaf);
        return node && !(node->pre_hooks().empty() && node->post_hooks().empty());
      },
      py::arg("leaf"),
      "Whether the node that accumulates the leaf's gradient has hooks, as of DDP. Python knows "
      "the "
      "leaf's own ones alone.");

  py::class_<VersionGuard>(module, "VersionGuard", "Notices in-place edits; owns no memory.")
      .def(py::init<const at::Tensor&>())
      .def_property_readonly("edited", &VersionGuard::edited)
      .def_property_readonly("version", &VersionGuard::version)
      .def_property_readonly("current_version", &VersionGuard::current_version);

  module.def("part", &part, py::arg("whole"), py::arg("offset"), py::arg("nbytes"));

  module.def(
      "count_holders",
      [](const at::Tensor& tensor) {
        const Holders holders = count_holders(tensor);
        return py::make_tuple(holders.of_tensor, holders.of_storage);
      },
      py::arg("tensor"));
  module.def(
      "take_bytes",
      [](const at::Tensor& tensor, const std::string& message) {
        Taken taken = take_bytes(tensor, message);
        return py::make_tuple(taken.bytes, taken.shell);
      },
      py::arg("tensor"), py::arg("message"));
  module.def(
      "give_bytes",
      [](const at::Tensor& tensor, StorageRef& shell, StorageRef& bytes) {
        give_bytes(tensor, shell, bytes);
      },
      py::arg("tensor"), py::arg("shell"), py::arg("bytes"));
}

}  // namespace memswap
