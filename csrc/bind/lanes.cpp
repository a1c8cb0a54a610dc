// Lanes of raw bytes.
#include <vector>

#include "bind.h"
#include "lane/lane.h"
#include "lane/lane_around.h"
#include "lane/staged_lane.h"
#include "lane/stream_lane.h"
#include "lane/worker_lane.h"

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
  Bound<Lane, std::shared_ptr<Lane>>(module, "Lane")
      .calls<&Lane::gather, &Lane::settle>(without_gil())
      .calls<&Lane::leaving_bytes, &Lane::set_max_leaving_bytes>()
      .def("send", &send, "storage"_a, "block"_a, "offset"_a = 0, "nbytes"_a = py::none(),
           "after"_a = Tickets{}, without_gil())
      .def("fetch", &Lane::fetch, "block"_a, "after"_a = Tickets{}, without_gil())
      .def("fetch_into", &Lane::fetch_into, "block"_a, "storage"_a, "offset"_a,
           "after"_a = Tickets{}, without_gil());
  py::class_<LaneAround, Lane, OverriddenLane, std::shared_ptr<LaneAround>>(module, "LaneAround")
      .def(py::init<std::shared_ptr<Lane>>(), "lane"_a.none(false));
  py::class_<StillLane, Lane, std::shared_ptr<StillLane>>(module, "StillLane")
      .def(py::init<std::shared_ptr<Lane>, StorageRefPtr, TicketPtr>(), "lane"_a.none(false),
           "storage"_a, "ticket"_a.none(false));
  Bound<WorkerLane, Lane, std::shared_ptr<WorkerLane>>(module, "WorkerLane")
      .calls<&WorkerLane::stop>()
      .def(py::init(&opened<WorkerLane, size_t, size_t>), "workers"_a = 1,
           "max_leaving_bytes"_a = 0);
  Bound<StreamLane, Lane, std::shared_ptr<StreamLane>>(module, "StreamLane")
      .reads<&StreamLane::send_stream, &StreamLane::fetch_stream>()
      .def(py::init<c10::Device, size_t, size_t>(), "device"_a, "max_leaving_bytes"_a,
           "chunk_bytes"_a, without_gil());
  Bound<StagedLane, Lane, std::shared_ptr<StagedLane>>(module, "StagedLane")
      .reads<&StagedLane::send_stream, &StagedLane::fetch_stream>()
      .calls<&StagedLane::finish_writes, &StagedLane::take_failure>(without_gil())
      .def(py::init<std::shared_ptr<StreamLane>, std::shared_ptr<WorkerLane>, std::shared_ptr<Pool>,
                    std::shared_ptr<Pool>, c10::Device, size_t>(),
           "copies"_a.none(false), "files"_a.none(false), "pinned"_a.none(false),
           "pageable"_a.none(false), "device"_a, "max_staging_bytes"_a)
      .def("staged_bytes", &StagedLane::staged_nbytes, without_gil());
}

}  // namespace memswap
