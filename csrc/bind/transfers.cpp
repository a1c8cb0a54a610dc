// What storages leave by, as what, and what is expected of their frames.
#include "engine/transfers.h"

#include <pybind11/operators.h>

#include <stdexcept>
#include <vector>

#include "bind.h"
#include "codec/backends.h"
#include "engine/block_form.h"
#include "engine/frame_form.h"

template <>
struct py::detail::type_caster<memswap::Leaving>
    : memswap::TupleCaster<memswap::Leaving, &memswap::Leaving::away,
                           &memswap::Leaving::departure> {};
template <>
struct py::detail::type_caster<memswap::Returning>
    : memswap::TupleCaster<memswap::Returning, &memswap::Returning::storage,
                           &memswap::Returning::arrival> {};
template <>
struct py::detail::type_caster<memswap::TensorKey>
    : memswap::TupleCaster<memswap::TensorKey, &memswap::TensorKey::unit,
                           &memswap::TensorKey::ordinal, &memswap::TensorKey::nbytes,
                           &memswap::TensorKey::dtype> {};

namespace memswap {

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

template <auto member>
auto option(const Expectation& expectation) {
  return expectation.options.*member;
}

void bind_forms(py::module_& module) {
  py::class_<AwayForm, AwayFormPtr>(module, "AwayForm")
      .def("bring", &AwayForm::bring)
      .def_property_readonly("device_nbytes", &AwayForm::device_nbytes)
      .def_property_readonly("pool_nbytes", &AwayForm::pool_nbytes)
      .def_property_readonly("works_ahead", &AwayForm::works_ahead)
      .def("wait_sent", &AwayForm::wait_sent);
  py::class_<BlockForm, AwayForm, std::shared_ptr<BlockForm>>(module, "BlockForm")
      .def("bring_into", &BlockForm::bring_into, "leaving"_a.none(false),
           "departure"_a.none(false));
  py::class_<FrameForm, AwayForm, std::shared_ptr<FrameForm>>(module, "FrameForm")
      .def("watch", &FrameForm::watch);
  py::class_<BlockSender, std::shared_ptr<BlockSender>>(module, "BlockSender")
      .def(py::init<std::shared_ptr<Lane>, std::shared_ptr<Pool>>(), "lane"_a.none(false),
           "pool"_a.none(false))
      .def_property_readonly("lane", &BlockSender::lane)
      .def_property_readonly("pool", &BlockSender::pool)
      .def_property_readonly("short_of", [](const BlockSender&) { return BlockForm::kShortOf; })
      .def("why_refused", &BlockSender::why_refused, without_gil())
      .def("send", &BlockSender::send, "storage"_a.none(false));
  py::class_<FrameSender, std::shared_ptr<FrameSender>>(module, "FrameSender")
      .def(py::init<std::shared_ptr<CodecLane>, bool, std::shared_ptr<Lane>,
                    std::shared_ptr<Pool>>(),
           "lane"_a.none(false), "works_ahead"_a, "copies"_a = py::none(), "pool"_a = py::none())
      .def_property_readonly("works_ahead", &FrameSender::works_ahead)
      .def_property_readonly("short_of", [](const FrameSender&) { return FrameForm::kShortOf; })
      .def("why_refused", &FrameSender::why_refused)
      .def("send", &FrameSender::send, "storage"_a.none(false), "options"_a);
}

void bind_expectations(py::module_& module) {
  py::class_<FrameSizes>(module, "FrameSizes")
      .def(py::init<int64_t, int64_t, int64_t>(), "used"_a, "held"_a, "overflow"_a)
      .def_readonly("used", &FrameSizes::used)
      .def_readonly("held", &FrameSizes::held)
      .def_readonly("overflow", &FrameSizes::overflow);
  py::class_<FrameFacts>(module, "FrameFacts")
      .def(py::init<>())
      .def(py::init<const FrameReport&>(), "report"_a)
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
  py::class_<ExpectationLimits>(module, "ExpectationLimits")
      .def(py::init<>())
      .def_readwrite("worth", &ExpectationLimits::worth)
      .def_readwrite("retry_after", &ExpectationLimits::retry_after)
      .def_readwrite("trial_share", &ExpectationLimits::trial_share)
      .def_readwrite("margin", &ExpectationLimits::margin)
      .def_readwrite("margin_units", &ExpectationLimits::margin_units)
      .def_readwrite("most_keys", &ExpectationLimits::most_keys);
  py::class_<Expectation>(module, "Expectation")
      .def(py::self == py::self)  // NOLINT(misc-redundant-expression)
      .def_readonly("pays", &Expectation::pays)
      .def_readonly("options", &Expectation::options)
      .def_property_readonly("dtype", &option<&FrameOptions::dtype>)
      .def_property_readonly("shape", &option<&FrameOptions::shape>)
      .def_property_readonly("var_capacity", &option<&FrameOptions::var_capacity>)
      .def_property_readonly("profile", &option<&FrameOptions::profile>)
      .def_property_readonly("center", &option<&FrameOptions::center>)
      .def_readonly("trial", &Expectation::trial)
      .def_readonly("fault", &Expectation::fault);
  py::class_<Expectations, ExpectationsPtr>(module, "Expectations")
      .def(py::init([](const ExpectationLimits& limits, bool worst_case, uint32_t spare_tiles) {
             return std::make_shared<Expectations>(
                 Expectations::Device{.worst_case = worst_case, .spare_tiles = spare_tiles},
                 limits);
           }),
           "limits"_a, "worst_case"_a = false, "spare_tiles"_a = 0)
      .def_static("of_device", &Expectations::of_device, "device"_a, "limits"_a)
      .def("__len__", &Expectations::size)
      .def("begin_iteration", &Expectations::begin_iteration)
      .def("of", &Expectations::of, "key"_a, "most_nbytes"_a = py::none())
      .def("settled", &Expectations::settled, "trial"_a)
      .def("learn", &Expectations::learn, "expectation"_a, "facts"_a)
      .def("sizes", &Expectations::sizes, "key"_a);
  module.def("first_layout", [](int dtype) {
    return static_cast<int>(first_layout(static_cast<frame::Dtype>(dtype)));
  });
}

}  // namespace

void bind_transfers(py::module_& module) {
  bind_forms(module);
  bind_expectations(module);
  py::native_enum<Form>(module, "Form", "enum.Enum")
      .value("BLOCK", Form::kBlock)
      .value("FRAME", Form::kFrame)
      .value("POOLED_FRAME", Form::kPooledFrame)
      .finalize();
  py::class_<Transfers, TransfersPtr>(module, "Transfers")
      .def(py::init([](c10::Device device, ExpectationsPtr expectations, const py::object& opener,
                       Action action, Action without_recipe, std::function<bool()> captures) {
             return std::make_shared<Transfers>(
                 device, std::move(expectations), std::make_unique<PythonOpener>(opener),
                 Transfers::Policy{action, without_recipe, std::move(captures)});
           }),
           "device"_a, "expectations"_a.none(false), "opener"_a, "action"_a, "without_recipe"_a,
           "captures"_a)
      .def_property_readonly("blocks", &Transfers::blocks)
      .def("frames", &Transfers::frames, "form"_a);
}

}  // namespace memswap
