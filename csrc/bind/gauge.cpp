// What else is on a device, as Python sees it: a gauge of its memory, and what a recorder takes
// down.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "engine/iteration.h"
#include "engine/memory_gauge.h"
#include "engine/workspace.h"

namespace memswap {
namespace py = pybind11;

void bind_gauge(py::module_& module) {
  py::class_<MemoryGauge, std::shared_ptr<MemoryGauge>>(
      module, "MemoryGauge",
      "What a device's allocator has handed out, or a process has of a host's memory "
      "(memory_gauge.h).")
      .def(py::init([](const c10::Device& device) -> std::shared_ptr<MemoryGauge> {
             return MemoryGauge::of(device);
           }),
           py::arg("device"))
      .def_property_readonly("now", &MemoryGauge::now, "Bytes.")
      .def_property_readonly("peak", &MemoryGauge::peak, "The most since `begin`.")
      .def("begin", &MemoryGauge::begin, "Look from here on.");

  py::class_<Workspace, std::shared_ptr<Workspace>>(
      module, "Workspace", "What is on a device beside saved activations (workspace.h).")
      .def(py::init<std::shared_ptr<MemoryGauge>, std::vector<at::Tensor>, int64_t, int64_t,
                    int64_t>(),
           py::arg("gauge"), py::arg("parameters"), py::arg("granularity"), py::arg("other_nbytes"),
           py::arg("baseline_nbytes"))
      .def("watch", &Workspace::watch, py::arg("iteration"),
           "The storages of an iteration that is in flight count as saved.")
      .def("arrive", &Workspace::arrive, "Somebody is about to begin the gauge anew.")
      .def("end", &Workspace::end, "Nothing more is taken down.")
      .def("extra_nbytes", &Workspace::extra_nbytes, py::arg("marks"),
           "From each mark to the next, the most bytes.")
      .def("gradient_nbytes", &Workspace::gradient_nbytes, py::arg("marks"),
           "Of these, gradients of parameters when the mark was over.")
      .def_property_readonly("baseline_nbytes", &Workspace::baseline_nbytes,
                             "What was there when the iteration began.");
}

}  // namespace memswap
