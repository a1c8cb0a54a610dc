// Away forms and what puts storages into them, as Python sees them.
#include "engine/away.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/block_form.h"
#include "engine/bucket.h"
#include "engine/frame_form.h"
#include "storage_ref.h"

namespace memswap {
namespace py = pybind11;

namespace {

using Pair = std::pair<AwayFormPtr, TicketPtr>;

Pair as_pair(Leaving leaving) { return {std::move(leaving.away), std::move(leaving.departure)}; }

std::optional<Pair> as_pair(std::optional<Leaving> leaving) {
  return leaving ? std::optional(as_pair(std::move(*leaving))) : std::nullopt;
}

std::optional<std::vector<Pair>> send_all(BlockSender& sender,
                                          const std::vector<StorageRefPtr>& storages) {
  std::optional<std::vector<Leaving>> sent = send_together(sender, storages);
  if (!sent) {
    return std::nullopt;
  }
  std::vector<Pair> pairs;
  for (Leaving& leaving : *sent) {
    pairs.push_back(as_pair(std::move(leaving)));
  }
  return pairs;
}

void bind_forms(py::module_& module) {
  py::class_<AwayForm, AwayFormPtr>(module, "AwayForm", "Where a storage's bytes wait (away.h).")
      .def(
          "bring",
          [](AwayForm& form) {
            Returning back = form.bring();
            return std::pair(std::move(back.storage), std::move(back.arrival));
          },
          "Start bringing the bytes back: a new storage, and the ticket.")
      .def_property_readonly("device_nbytes", &AwayForm::device_nbytes)
      .def_property_readonly("pool_nbytes", &AwayForm::pool_nbytes)
      .def_property_readonly("works_ahead", &AwayForm::works_ahead)
      .def_property_readonly("short_of", &AwayForm::short_of)
      .def(
          "wait_sent", &AwayForm::wait_sent,
          "Order the caller after everything that takes the device's memory on the way to a pool.");
  py::class_<BlockForm, AwayForm, std::shared_ptr<BlockForm>>(module, "BlockForm",
                                                              "Raw bytes in a block of a pool.")
      .def_property_readonly("lane", &BlockForm::lane);
  py::class_<BucketPart, AwayForm, std::shared_ptr<BucketPart>>(
      module, "BucketPart", "Raw bytes in a block that other storages share.");
  py::class_<FrameForm, AwayForm, std::shared_ptr<FrameForm>>(
      module, "FrameForm", "A frame, on the device or in a pool.")
      .def_property_readonly("lane", &FrameForm::lane)
      .def_property_readonly("swapped", &FrameForm::swapped)
      .def("watch", &FrameForm::watch, "What the encoder found, as soon as that is known.");
}

void bind_senders(py::module_& module) {
  py::class_<BlockSender, std::shared_ptr<BlockSender>>(
      module, "BlockSender", "Sends storages into blocks of a pool (block_form.h).")
      .def(py::init<std::shared_ptr<Lane>, std::shared_ptr<Pool>>(), py::arg("lane").none(false),
           py::arg("pool").none(false))
      .def_property_readonly("lane", &BlockSender::lane)
      .def_property_readonly("pool", &BlockSender::pool)
      .def_property_readonly("short_of", [](const BlockSender&) { return BlockForm::kShortOf; })
      .def("why_refused", &BlockSender::why_refused, py::call_guard<py::gil_scoped_release>())
      .def(
          "send",
          [](BlockSender& sender, const StorageRefPtr& storage) {
            return as_pair(sender.send(some(storage)));
          },
          py::arg("storage"),
          "Start sending a storage. The away form and the ticket; None: there is no room, and "
          "nothing was started.")
      .def("send_together", &send_all, py::arg("storages"),
           "The same for several storages of one device, which travel as one (bucket.h).");
  py::class_<FrameSender, std::shared_ptr<FrameSender>>(
      module, "FrameSender", "Encodes storages, into a pool or where they are (frame_form.h).")
      .def(py::init<std::shared_ptr<CodecLane>, bool, std::shared_ptr<Lane>,
                    std::shared_ptr<Pool>>(),
           py::arg("lane").none(false), py::arg("works_ahead"), py::arg("copies") = py::none(),
           py::arg("pool") = py::none())
      .def_property_readonly("lane", &FrameSender::lane)
      .def_property_readonly("works_ahead", &FrameSender::works_ahead)
      .def_property_readonly("short_of", [](const FrameSender&) { return FrameForm::kShortOf; })
      .def("why_refused", &FrameSender::why_refused)
      .def(
          "send",
          [](FrameSender& sender, const StorageRefPtr& storage, uint8_t dtype,
             std::optional<uint8_t> shape, std::optional<uint64_t> var_capacity, uint8_t profile,
             uint8_t center) {
            return as_pair(sender.send(some(storage), {.dtype = dtype,
                                                       .shape = shape,
                                                       .var_capacity = var_capacity,
                                                       .profile = profile,
                                                       .center = center}));
          },
          py::arg("storage"), py::arg("dtype"), py::arg("shape"),
          py::arg("var_capacity") = py::none(), py::arg("profile") = 0, py::arg("center") = 0,
          "Start encoding a storage. The away form and the ticket; None: there is no room, and "
          "nothing was started.");
}

}  // namespace

void bind_away(py::module_& module) {
  bind_forms(module);
  bind_senders(module);
}

}  // namespace memswap
