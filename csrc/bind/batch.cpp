// Batch, as Python sees it.
#include "engine/batch.h"

#include <pybind11/native_enum.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/utils/pybind.h>

#include <exception>
#include <memory>
#include <string>
#include <utility>

#include "errors.h"

namespace memswap {
namespace py = pybind11;

namespace {

constexpr const char* kOnDemand = "on_demand";

// What is to be called when backward reaches a batch is an attribute of its object, where Python's
// collector sees it: it may own what owns the batch.
BatchPtr make_batch(EnginePtr engine, std::string name, IterationPtr iteration) {
  auto made = std::make_shared<Batch>(std::move(engine), std::move(name), std::move(iteration));
  made->on_demand = [batch = made.get()] {
    const py::gil_scoped_acquire gil;
    const py::object self = py::cast(batch->shared_from_this());
    const py::object reached = self.attr(kOnDemand);
    if (!reached.is_none()) {
      reached(self);
    }
  };
  return made;
}

void translate(std::exception_ptr thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (const BatchError& error) {
    set_error("GroupError", error.what());
  }
}

}  // namespace

void bind_batch(py::module_& module) {
  py::register_local_exception_translator(translate);

  module.attr("SMALL_BYTES") = BatchLimits{}.small_bytes;
  module.attr("BUCKET_BYTES") = BatchLimits{}.bucket_bytes;

  py::native_enum<Batch::Phase>(module, "Phase", "enum.Enum", "What a batch was told last.")
      .value("COLLECTED", Batch::Phase::kCollected)
      .value("OFFLOADING", Batch::Phase::kOffloading)
      .value("OFFLOADED", Batch::Phase::kOffloaded)
      .value("LOADING", Batch::Phase::kLoading)
      .value("LOADED", Batch::Phase::kLoaded)
      .finalize();

  py::class_<Batch, BatchPtr> batch(
      module, "Batch", py::dynamic_attr(),
      "What one block of a group saved, and the four calls that move it (csrc/engine/batch.h).\n\n"
      "Any order of calls is legal in which nothing is waited for that was not launched and "
      "nothing is loaded that was not offloaded; each call may be repeated. Loading may follow at "
      "once, before the offload was waited for: what has not gone away yet then stays. After a "
      "load everything may be offloaded again, which copies nothing. Calls order the calling "
      "thread's current stream and are ordered behind it.");
  batch.attr(kOnDemand) = py::none();
  batch
      .def(py::init(&make_batch), py::arg("engine").none(false), py::arg("name"),
           py::arg("iteration").none(false))
      .def("__repr__",
           [](const Batch& self) {
             return "<batch of group '" + self.name + "', " + word_of(self.phase()) + ">";
           })
      .def_readonly("name", &Batch::name)
      .def_readonly("iteration", &Batch::iteration)
      .def_property_readonly("phase", &Batch::phase)
      .def_property_readonly("alive", &Batch::alive,
                             "Whether any of its saved tensors may still be demanded.")
      .def_property_readonly(
          "launched", [](const Batch& self) { return self.phase() != Batch::Phase::kCollected; },
          "Whether `launch_offload` was called.")
      .def_property_readonly("nbytes", &Batch::nbytes, "Bytes of the storages that it can move.")
      .def("launch_offload", &Batch::launch_offload,
           "Start sending the storages away. The forward may still use them.")
      .def("wait_offload", &Batch::wait_offload,
           "What follows comes after the send, and the memory of what was sent is free for it.\n\n"
           "Raises:\n    GroupError: `launch_offload` was not called.")
      .def("launch_load", &Batch::launch_load, py::arg("readings") = 1,
           "Start bringing the storages back, each into memory of the calling thread's stream.\n\n"
           "Once a backward pass has read some and let go of them, they may be loaded again for "
           "another.\n\n"
           "Args:\n    readings: how many backward passes will read them before they are let go of "
           "again: 2 where gradients of inputs and of weights are computed apart.\n\n"
           "Raises:\n    GroupError: `launch_offload` was not called.")
      .def("wait_load", &Batch::wait_load,
           "What follows on this stream may use the storages.\n\n"
           "Raises:\n    GroupError: `launch_load` was not called.\n"
           "    TransferError: the pool cannot give bytes back.")
      .def("close", &Batch::close,
           "Nobody may call it any more. What is away still returns when backward demands it.");
}

}  // namespace memswap
