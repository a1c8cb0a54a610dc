// Lanes, as Python sees them. The worker lane is bound with the pools, whose life it shares.
#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <utility>
#include <variant>
#include <vector>

#include "lane/staged_lane.h"
#include "lane/stream_lane.h"
#include "lane_around.h"
#include "packed_stream.h"
#include "storage_ref.h"

namespace memswap {
namespace py = pybind11;
using without_gil = py::call_guard<py::gil_scoped_release>;

namespace {

// One ticket, several, or None; also None among several, where there was nothing to wait for.
using After = std::variant<TicketPtr, Tickets>;

Tickets tickets_of(After after) {
  Tickets tickets = std::holds_alternative<Tickets>(after)
                        ? std::get<Tickets>(std::move(after))
                        : Tickets{std::get<TicketPtr>(std::move(after))};
  std::erase(tickets, nullptr);
  return tickets;
}

TicketPtr send(Lane& lane, StorageRefPtr storage, BlockPtr block, size_t offset,
               std::optional<size_t> nbytes, After after) {
  const ByteRange range{offset, nbytes.value_or(ByteRange::kToTheEnd)};
  return lane.send(std::move(storage), std::move(block), range, tickets_of(std::move(after)));
}

std::pair<StorageRefPtr, TicketPtr> fetch(Lane& lane, BlockPtr block, After after) {
  return lane.fetch(std::move(block), tickets_of(std::move(after)));
}

TicketPtr fetch_into(Lane& lane, BlockPtr block, StorageRefPtr storage, size_t offset,
                     After after) {
  return lane.fetch_into(std::move(block), std::move(storage), offset,
                         tickets_of(std::move(after)));
}

// Calls what a class of Python's overrides. Memory that it lacks is what any lane says of it.
template <class... Arguments>
py::object call(const py::function& own, Arguments&&... arguments) {
  try {
    return own(std::forward<Arguments>(arguments)...);
  } catch (const py::error_already_set& error) {
    if (error.matches(py::module_::import("torch").attr("OutOfMemoryError"))) {
      throw c10::OutOfMemoryError({__func__, __FILE__, __LINE__}, error.what());
    }
    throw;
  }
}

}  // namespace

TicketPtr OverriddenLane::send(StorageRefPtr storage, BlockPtr block, ByteRange range,
                               Tickets after) {
  {
    const py::gil_scoped_acquire gil;
    if (const py::function own = py::get_override(static_cast<const LaneAround*>(this), "send")) {
      return call(own, std::move(storage), std::move(block)).cast<TicketPtr>();
    }
  }
  return LaneAround::send(std::move(storage), std::move(block), range, std::move(after));
}

std::pair<StorageRefPtr, TicketPtr> OverriddenLane::fetch(BlockPtr block, Tickets after) {
  {
    const py::gil_scoped_acquire gil;
    if (const py::function own = py::get_override(static_cast<const LaneAround*>(this), "fetch")) {
      return call(own, std::move(block)).cast<std::pair<StorageRefPtr, TicketPtr>>();
    }
  }
  return LaneAround::fetch(std::move(block), std::move(after));
}

void OverriddenLane::set_max_leaving_bytes(size_t bytes) {
  {
    const py::gil_scoped_acquire gil;
    if (const py::function own =
            py::get_override(static_cast<const LaneAround*>(this), "set_max_leaving_bytes")) {
      own(bytes);
      return;
    }
  }
  LaneAround::set_max_leaving_bytes(bytes);
}

void bind_lanes(py::module_& module) {
  py::class_<Lane, std::shared_ptr<Lane>>(module, "Lane", "Where transfers run, in order.")
      .def("send", &send, py::arg("storage"), py::arg("block"), py::arg("offset") = 0,
           py::arg("nbytes") = py::none(), py::arg("after") = py::none(), without_gil())
      .def("fetch", &fetch, py::arg("block"), py::arg("after") = py::none(), without_gil())
      .def("fetch_into", &fetch_into, py::arg("block"), py::arg("storage"), py::arg("offset"),
           py::arg("after") = py::none(), without_gil())
      .def("gather", &Lane::gather, py::arg("storages"), without_gil())
      .def("meet_stream", &Lane::meet_stream)
      .def("settle", &Lane::settle, without_gil())
      .def("leaving_bytes", &Lane::leaving_bytes)
      .def("set_max_leaving_bytes", &Lane::set_max_leaving_bytes, py::arg("nbytes"));

  py::class_<LaneAround, Lane, OverriddenLane, std::shared_ptr<LaneAround>>(
      module, "LaneAround", "A lane around another one, to be derived from (lane_around.h).")
      .def(py::init<std::shared_ptr<Lane>>(), py::arg("lane").none(false));

  py::class_<StillLane, Lane, std::shared_ptr<StillLane>>(
      module, "StillLane", "A lane that moves nothing, for benchmarks (lane_around.h).")
      .def(py::init<std::shared_ptr<Lane>, StorageRefPtr, TicketPtr>(), py::arg("lane").none(false),
           py::arg("storage"), py::arg("ticket").none(false));

  py::class_<StreamLane, Lane, std::shared_ptr<StreamLane>>(
      module, "StreamLane", "Transfers between an accelerator and pinned memory, in stream order.")
      .def(py::init([](const c10::Device& device, size_t max_leaving_bytes, size_t chunk_bytes) {
             const py::gil_scoped_release release;
             return std::make_shared<StreamLane>(device, max_leaving_bytes, chunk_bytes);
           }),
           py::arg("device"), py::arg("max_leaving_bytes"), py::arg("chunk_bytes"))
      .def_property_readonly("send_stream",
                             [](const StreamLane& lane) { return packed(lane.send_stream()); })
      .def_property_readonly("fetch_stream",
                             [](const StreamLane& lane) { return packed(lane.fetch_stream()); });

  py::class_<StagedLane, Lane, std::shared_ptr<StagedLane>>(
      module, "StagedLane", "Transfers between an accelerator and a file, through pinned memory.")
      .def(py::init([](std::shared_ptr<StreamLane> copies, std::shared_ptr<WorkerLane> files,
                       std::shared_ptr<Pool> pinned, std::shared_ptr<Pool> pageable,
                       const c10::Device& device, size_t max_staging_bytes) {
             return std::make_shared<StagedLane>(
                 std::move(copies), std::move(files), std::move(pinned), std::move(pageable),
                 device, StagedLane::Options{.max_staging_bytes = max_staging_bytes});
           }),
           py::arg("copies").none(false), py::arg("files").none(false),
           py::arg("pinned").none(false), py::arg("pageable").none(false), py::arg("device"),
           py::arg("max_staging_bytes"))
      .def_property_readonly("send_stream",
                             [](const StagedLane& lane) { return packed(lane.send_stream()); })
      .def_property_readonly("fetch_stream",
                             [](const StagedLane& lane) { return packed(lane.fetch_stream()); })
      .def("staged_bytes", &StagedLane::staged_nbytes, without_gil(),
           "Host memory of what is on its way, and of what could not be written.")
      .def("finish_writes", &StagedLane::finish_writes, without_gil(),
           "Block until every write has ended, well or badly.")
      .def("take_failure", &StagedLane::take_failure, without_gil(),
           "What the first write that failed said, once; empty where none has failed since.");
}

}  // namespace memswap
