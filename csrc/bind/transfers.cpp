// Transfers, and what is expected of their frames, as Python sees them.
#include "engine/transfers.h"

#include <pybind11/native_enum.h>
#include <pybind11/operators.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include "codec/backends.h"

namespace memswap {
namespace py = pybind11;

namespace {

// The object of Python's that opens lanes and pools. It owns the transfers, and is not kept alive.
class PythonOpener final : public Transfers::Opener {
 public:
  explicit PythonOpener(const py::object& opener) : opener_(opener) {}

  std::shared_ptr<BlockSender> open_blocks() override {
    return alive().attr("open_blocks")().cast<std::shared_ptr<BlockSender>>();
  }
  std::shared_ptr<FrameSender> open_frames(Form form) override {
    return alive().attr("open_frames")(form).cast<std::shared_ptr<FrameSender>>();
  }
  void begin(int64_t leaving_bytes, int64_t nbytes) override {
    alive().attr("begin_iteration")(leaving_bytes, nbytes);
  }

 private:
  py::object alive() const {
    py::object opener = opener_();
    if (opener.is_none()) {
      throw std::logic_error("lanes of an engine that is gone; this is a bug in memswap");
    }
    return opener;
  }

  const py::weakref opener_;
};

// A key of Python's: (unit, ordinal, nbytes, dtype).
using Key = std::tuple<std::string, int64_t, int64_t, at::ScalarType>;

TensorKey key_of(Key key) {
  auto& [unit, ordinal, nbytes, dtype] = key;
  return {std::move(unit), ordinal, nbytes, dtype};
}

bool alike(const Expectation& one, const Expectation& other) {
  const auto options = [](const FrameOptions& all) {
    return std::tuple(all.dtype, all.shape, all.var_capacity, all.profile, all.center);
  };
  return one.key == other.key && one.pays == other.pays && one.trial == other.trial &&
         one.most_bytes == other.most_bytes && one.fault == other.fault &&
         options(one.options) == options(other.options);
}

void bind_frame_facts(py::module_& module) {
  py::class_<FrameSizes>(module, "FrameSizes", "Bytes of a tensor's frame, as it was last seen.")
      .def(py::init<int64_t, int64_t, int64_t>(), py::arg("used"), py::arg("held"),
           py::arg("overflow"))
      .def_readonly("used", &FrameSizes::used)
      .def_readonly("held", &FrameSizes::held,
                    "With the capacity that the next one gets: on the device, on the link and in a "
                    "pool.")
      .def_readonly("overflow", &FrameSizes::overflow,
                    "What the next one sets aside for elements that are not like the last ones.");

  py::class_<FrameFacts>(module, "FrameFacts", "What matters of what an encoder found.")
      .def(py::init<>())
      .def(py::init<const FrameReport&>(), py::arg("report"))
      .def_readwrite("frame_nbytes", &FrameFacts::frame_nbytes)
      .def_readwrite("elements", &FrameFacts::elements)
      .def_readwrite("blocks", &FrameFacts::blocks)
      .def_readwrite("var_used", &FrameFacts::var_used)
      .def_readwrite("overflow_used", &FrameFacts::overflow_used)
      .def_readwrite("zeros", &FrameFacts::zeros)
      .def_readwrite("center_sum", &FrameFacts::center_sum)
      .def_readwrite("lq2_blocks", &FrameFacts::lq2_blocks)
      .def_readwrite("fw2_blocks", &FrameFacts::fw2_blocks)
      .def_readwrite("status", &FrameFacts::status)
      .def_readwrite("layout", &FrameFacts::layout);
  py::implicitly_convertible<FrameReport, FrameFacts>();
}

void bind_expectations(py::module_& module) {
  py::class_<ExpectationLimits>(module, "ExpectationLimits",
                                "What decides where nothing is known for sure (expectations.h).")
      .def(py::init<>())
      .def_readwrite("worth", &ExpectationLimits::worth)
      .def_readwrite("retry_after", &ExpectationLimits::retry_after)
      .def_readwrite("trial_share", &ExpectationLimits::trial_share)
      .def_readwrite("margin", &ExpectationLimits::margin)
      .def_readwrite("margin_units", &ExpectationLimits::margin_units)
      .def_readwrite("most_keys", &ExpectationLimits::most_keys);

  py::class_<Expectation>(module, "Expectation", "How to encode one tensor now, and whether to.")
      .def("__eq__", &alike, py::is_operator())
      .def_property_readonly("key",
                             [](const Expectation& self) {
                               const TensorKey& key = self.key;
                               return Key(key.unit, key.ordinal, key.nbytes, key.dtype);
                             })
      .def_readonly("pays", &Expectation::pays)
      .def_property_readonly("dtype", [](const Expectation& self) { return self.options.dtype; })
      .def_property_readonly(
          "shape", [](const Expectation& self) { return self.options.shape; },
          "None: the one that a sample chooses. In host memory alone.")
      .def_property_readonly(
          "var_capacity", [](const Expectation& self) { return self.options.var_capacity; },
          "Units of 8 bytes; None: the worst case, where what is left over is given back at once.")
      .def_property_readonly("profile",
                             [](const Expectation& self) { return self.options.profile; })
      .def_property_readonly("center", [](const Expectation& self) { return self.options.center; })
      .def_readonly("trial", &Expectation::trial, "Whether the layout is a guess.")
      .def_readonly("fault", &Expectation::fault,
                    "Why the codec must not encode such a tensor; empty where it may.")
      .def_property_readonly(
          "options",
          [](const Expectation& self) {
            const FrameOptions& all = self.options;
            return std::tuple(all.dtype, all.shape, all.var_capacity, all.profile, all.center);
          },
          "What a FrameSender is told of the frame.");

  py::class_<Expectations, ExpectationsPtr>(module, "Expectations",
                                            "What is expected of the tensors of one device "
                                            "(csrc/engine/expectations.h).")
      .def(py::init([](const ExpectationLimits& limits, bool worst_case, uint32_t spare_tiles) {
             return std::make_shared<Expectations>(
                 Expectations::Device{.worst_case = worst_case, .spare_tiles = spare_tiles},
                 limits);
           }),
           py::arg("limits"), py::arg("worst_case") = false, py::arg("spare_tiles") = 0)
      .def_static("of_device", &Expectations::of_device, py::arg("device"), py::arg("limits"),
                  "Of the codec that serves a device.")
      .def("__len__", &Expectations::size)
      .def("begin_iteration", &Expectations::begin_iteration,
           "What follows belongs to a new forward.")
      .def(
          "of",
          [](Expectations& self, std::string unit, int64_t ordinal, int64_t nbytes,
             at::ScalarType dtype, std::optional<int64_t> most_nbytes) {
            return self.of({std::move(unit), ordinal, nbytes, dtype}, most_nbytes);
          },
          py::arg("unit"), py::arg("ordinal"), py::arg("nbytes"), py::arg("dtype"),
          py::arg("most_nbytes") = py::none(), "What to do with a tensor that is about to leave.")
      .def("settled", &Expectations::settled, py::arg("trial"),
           "What to do instead of a trial for which there is no room.")
      .def("learn", &Expectations::learn, py::arg("expectation"), py::arg("facts"),
           "What the encoder found out about a frame that was made as expected.")
      .def(
          "sizes", [](Expectations& self, Key key) { return self.sizes(key_of(std::move(key))); },
          py::arg("key"),
          "Bytes of a tensor's frame, present and next. None: none has been seen, of any size. "
          "From any thread.");
  module.def(
      "first_layout",
      [](int dtype) { return static_cast<int>(first_layout(static_cast<frame::Dtype>(dtype))); },
      py::arg("dtype"), "The layout for a frame dtype of which nothing else is known.");
}

}  // namespace

void bind_transfers(py::module_& module) {
  bind_frame_facts(module);
  bind_expectations(module);

  py::native_enum<Form>(module, "Form", "enum.Enum", "What a storage is sent as (transfers.h).")
      .value("BLOCK", Form::kBlock)
      .value("FRAME", Form::kFrame)
      .value("POOLED_FRAME", Form::kPooledFrame)
      .finalize();

  py::class_<Transfers, TransfersPtr>(module, "Transfers",
                                      "What an engine sends by on one device (transfers.h).")
      .def(py::init([](c10::Device device, ExpectationsPtr expectations, const py::object& opener) {
             return std::make_shared<Transfers>(device, std::move(expectations),
                                                std::make_unique<PythonOpener>(opener));
           }),
           py::arg("device"), py::arg("expectations").none(false), py::arg("opener"))
      .def_property_readonly("blocks", &Transfers::blocks, "Sends storages as raw bytes.")
      .def("frames", &Transfers::frames, py::arg("form"),
           "Sends storages as frames; None where no codec serves the device.")
      .def_readonly("device", &Transfers::device)
      .def_readonly("expectations", &Transfers::expectations);

  py::class_<LeaveOrder>(module, "LeaveOrder",
                         "How a storage leaves: by what, as what, and which tensor's it is.")
      .def(py::init([](TransfersPtr transfers, Form form, Key key) {
             return LeaveOrder{std::move(transfers), form, key_of(std::move(key))};
           }),
           py::arg("transfers").none(false), py::arg("form"), py::arg("key"));
}

}  // namespace memswap
