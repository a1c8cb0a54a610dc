// Lanes, as Python sees them. The worker lane is bound with the pools, whose life it shares.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "stream_lane.h"

namespace memswap {
namespace py = pybind11;
using without_gil = py::call_guard<py::gil_scoped_release>;

namespace {

// What torch.Stream(stream_id=..., device_index=..., device_type=...) takes.
std::tuple<int64_t, int64_t, int64_t> packed(c10::Stream stream) {
  const auto parts = stream.pack3();
  return {parts.stream_id, parts.device_index, static_cast<int64_t>(parts.device_type)};
}

}  // namespace

void bind_lanes(py::module_& module) {
  py::class_<Lane, std::shared_ptr<Lane>>(module, "Lane", "Where transfers run, in order.")
      .def("send", &Lane::send, py::arg("storage"), py::arg("block"), without_gil())
      .def("fetch", &Lane::fetch, py::arg("block"), without_gil())
      .def("settle", &Lane::settle, without_gil())
      .def("leaving_bytes", &Lane::leaving_bytes)
      .def("set_max_leaving_bytes", &Lane::set_max_leaving_bytes, py::arg("nbytes"));

  py::class_<StreamLane, Lane, std::shared_ptr<StreamLane>>(
      module, "StreamLane", "Transfers between an accelerator and pinned memory, in stream order.")
      .def(py::init([](const c10::Device& device, size_t max_leaving_bytes, size_t chunk_bytes) {
             return std::make_shared<StreamLane>(device, max_leaving_bytes, chunk_bytes);
           }),
           py::arg("device"), py::arg("max_leaving_bytes"), py::arg("chunk_bytes"))
      .def_property_readonly("send_stream",
                             [](const StreamLane& lane) { return packed(lane.send_stream()); })
      .def_property_readonly("fetch_stream",
                             [](const StreamLane& lane) { return packed(lane.fetch_stream()); });
}

}  // namespace memswap
