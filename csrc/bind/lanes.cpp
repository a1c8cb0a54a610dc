// Lanes of raw bytes.
#include <vector>

#include "bind.h"
#include "lane/lane.h"
#include "lane/lane_around.h"
#include "lane/staged_lane.h"
#include "lane/stream_lane.h"
#include "lane/worker_lane.h"
#include "work/stop_at_exit.h"

namespace memswap {

namespace {

using Fetched = std::pair<StorageRefPtr, TicketPtr>;

TicketPtr send(Lane& lane, StorageRefPtr storage, BlockPtr block, size_t offset,
               std::optional<size_t> nbytes, Tickets after) {
  const ByteRange range{offset, nbytes.value_or(ByteRange::kToTheEnd)};
  return lane.send(std::move(storage), std::move(block), range, std::move(after));
}

// What a class of Python's overrides: what an engine asks of a lane for one storage, and its bound.
class OverriddenLane final : public LaneAround {
 public:
  using LaneAround::LaneAround;

  TicketPtr send(StorageRefPtr storage, BlockPtr block, ByteRange range, Tickets after) override {
    PYBIND11_OVERRIDE_IMPL(TicketPtr, LaneAround, "send", storage, block);
    return LaneAround::send(std::move(storage), std::move(block), range, std::move(after));
  }
  Fetched fetch(BlockPtr block, Tickets after) override {
    PYBIND11_OVERRIDE_IMPL(Fetched, LaneAround, "fetch", block);
    return LaneAround::fetch(std::move(block), std::move(after));
  }
  void set_max_leaving_bytes(size_t bytes) override {
    PYBIND11_OVERRIDE(void, LaneAround, set_max_leaving_bytes, bytes);
  }
};

}  // namespace

void bind_lanes(py::module_& module) {
  py::class_<Lane, std::shared_ptr<Lane>>(module, "Lane")
      .def("send", &send, "storage"_a, "block"_a, "offset"_a = 0, "nbytes"_a = py::none(),
           "after"_a = Tickets{}, without_gil())
      .def("fetch", &Lane::fetch, "block"_a, "after"_a = Tickets{}, without_gil())
      .def("fetch_into", &Lane::fetch_into, "block"_a, "storage"_a, "offset"_a,
           "after"_a = Tickets{}, without_gil())
      .def("gather", &Lane::gather, "storages"_a, without_gil())
      .def("settle", &Lane::settle, without_gil())
      .def("leaving_bytes", &Lane::leaving_bytes)
      .def("set_max_leaving_bytes", &Lane::set_max_leaving_bytes, "nbytes"_a);
  py::class_<LaneAround, Lane, OverriddenLane, std::shared_ptr<LaneAround>>(module, "LaneAround")
      .def(py::init<std::shared_ptr<Lane>>(), "lane"_a.none(false));
  py::class_<StillLane, Lane, std::shared_ptr<StillLane>>(module, "StillLane")
      .def(py::init<std::shared_ptr<Lane>, StorageRefPtr, TicketPtr>(), "lane"_a.none(false),
           "storage"_a, "ticket"_a.none(false));
  py::class_<WorkerLane, Lane, std::shared_ptr<WorkerLane>>(module, "WorkerLane")
      .def(py::init([](size_t workers, size_t max_leaving_bytes) {
             return stop_at_exit().add(std::make_shared<WorkerLane>(workers, max_leaving_bytes),
                                       &WorkerLane::stop);
           }),
           "workers"_a = 1, "max_leaving_bytes"_a = 0)
      .def("stop", &WorkerLane::stop);
  py::class_<StreamLane, Lane, std::shared_ptr<StreamLane>>(module, "StreamLane")
      .def(py::init<c10::Device, size_t, size_t>(), "device"_a, "max_leaving_bytes"_a,
           "chunk_bytes"_a, without_gil())
      .def_property_readonly("send_stream", &StreamLane::send_stream)
      .def_property_readonly("fetch_stream", &StreamLane::fetch_stream);
  py::class_<StagedLane, Lane, std::shared_ptr<StagedLane>>(module, "StagedLane")
      .def(py::init([](std::shared_ptr<StreamLane> copies, std::shared_ptr<WorkerLane> files,
                       std::shared_ptr<Pool> pinned, std::shared_ptr<Pool> pageable,
                       const c10::Device& device, size_t max_staging_bytes) {
             return std::make_shared<StagedLane>(
                 std::move(copies), std::move(files), std::move(pinned), std::move(pageable),
                 device, StagedLane::Options{.max_staging_bytes = max_staging_bytes});
           }),
           "copies"_a.none(false), "files"_a.none(false), "pinned"_a.none(false),
           "pageable"_a.none(false), "device"_a, "max_staging_bytes"_a)
      .def_property_readonly("send_stream", &StagedLane::send_stream)
      .def_property_readonly("fetch_stream", &StagedLane::fetch_stream)
      .def("staged_bytes", &StagedLane::staged_nbytes, without_gil())
      .def("finish_writes", &StagedLane::finish_writes, without_gil())
      .def("take_failure", &StagedLane::take_failure, without_gil());
}

}  // namespace memswap
