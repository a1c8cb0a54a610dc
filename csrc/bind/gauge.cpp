// MemoryGauge, as Python sees it.
#include <pybind11/pybind11.h>
#include <torch/csrc/utils/pybind.h>

#include "engine/memory_gauge.h"

namespace memswap {
namespace py = pybind11;

void bind_gauge(py::module_& module) {
  py::class_<MemoryGauge>(module, "MemoryGauge",
                          "What a device's allocator has handed out, or a process has of a host's "
                          "memory (memory_gauge.h).")
      .def(py::init(&MemoryGauge::of), py::arg("device"))
      .def_property_readonly("now", &MemoryGauge::now, "Bytes.")
      .def_property_readonly("peak", &MemoryGauge::peak, "The most since `begin`.")
      .def("begin", &MemoryGauge::begin, "Look from here on.");
}

}  // namespace memswap
