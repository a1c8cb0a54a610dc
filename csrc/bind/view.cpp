// StorageRef and SavedView, as Python sees them.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>

#include "storage/saved_view.h"
#include "storage/storage.h"

namespace memswap {
namespace py = pybind11;

namespace {

uintptr_t as_int(const void* key) { return reinterpret_cast<uintptr_t>(key); }

}  // namespace

void bind_view(py::module_& module) {
  py::class_<StorageRef, StorageRefPtr>(module, "StorageRef", "A share of one tensor storage.")
      .def(py::init([](const at::Tensor& tensor) {
             return std::make_shared<StorageRef>(tensor.storage());
           }),
           py::arg("tensor"))
      .def_property_readonly("nbytes", [](const StorageRef& ref) { return ref.storage.nbytes(); })
      .def_property_readonly(
          "key", [](const StorageRef& ref) { return as_int(ref.storage.unsafeGetStorageImpl()); })
      .def_property_readonly("use_count",
                             [](const StorageRef& ref) { return ref.storage.use_count(); })
      .def_property_readonly(
          "edited", [](const StorageRef& ref) { return ref.version.current_version() != 0; });

  py::class_<SavedView>(module, "SavedView", "How a saved tensor looks at its storage.")
      .def("rebuild", &SavedView::rebuild, py::arg("storage"), py::arg("shares_counter"),
           "A new tensor of this look on a storage.")
      .def("describe", &SavedView::describe, "Dtype, size and device, in words.")
      .def_property_readonly("edited", &SavedView::edited)
      .def_property_readonly("of_leaf", &SavedView::of_leaf)
      .def_property_readonly("device", &SavedView::device)
      .def_property_readonly("private_format", &SavedView::private_format)
      .def_property_readonly("edited_part", &SavedView::edited_part)
      .def_property_readonly("part_of_data", &SavedView::part_of_data)
      .def_property_readonly("computed", &SavedView::computed)
      .def_property_readonly("version", &SavedView::version)
      .def_property_readonly("current_version", &SavedView::current_version)
      .def_property_readonly("storage_nbytes", &SavedView::storage_nbytes)
      .def_property_readonly("nbytes", &SavedView::nbytes)
      .def_property_readonly("key",
                             [](const SavedView& view) { return as_int(view.storage_key()); });
  module.def("capture", &SavedView::capture, py::arg("tensor"),
             "The SavedView of a plain strided tensor, or None.");
}

}  // namespace memswap
