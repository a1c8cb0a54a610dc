// What storages leave by, as what, and what is expected of their frames.
#include "engine/transfers.h"

#include <tuple>
#include <utility>

#include "bind.h"
#include "engine/block_form.h"

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
template <>
struct py::detail::type_caster<memswap::FrameSizes>
    : memswap::TupleCaster<memswap::FrameSizes, &memswap::FrameSizes::used,
                           &memswap::FrameSizes::held, &memswap::FrameSizes::overflow> {};
template <>
struct py::detail::type_caster<memswap::ExpectationLimits>
    : memswap::TupleCaster<
          memswap::ExpectationLimits, &memswap::ExpectationLimits::worth,
          &memswap::ExpectationLimits::retry_after, &memswap::ExpectationLimits::trial_share,
          &memswap::ExpectationLimits::margin, &memswap::ExpectationLimits::margin_units> {};

namespace memswap {

namespace {

// The object of Python's that opens lanes and pools. It owns the transfers, and is not kept alive.
class PythonOpener final : public Transfers::Opener {
 public:
  PythonOpener(const py::object& opener, c10::Device device)
      : opener_(opener), works_ahead_(!device.is_cpu()) {}

  std::shared_ptr<BlockSender> open_blocks() override {
    using Blocks = std::pair<std::shared_ptr<Lane>, std::shared_ptr<Pool>>;
    auto [lane, pool] = opener_().attr("open_blocks")().cast<Blocks>();
    return std::make_shared<BlockSender>(std::move(lane), std::move(pool));
  }
  std::shared_ptr<FrameSender> open_frames(Form form) override {
    using Frames =
        std::tuple<std::shared_ptr<CodecLane>, std::shared_ptr<Lane>, std::shared_ptr<Pool>>;
    auto opened = opener_().attr("open_frames")(form).cast<std::optional<Frames>>();
    if (!opened) {
      return nullptr;
    }
    auto& [codec, lane, pool] = *opened;
    return std::make_shared<FrameSender>(std::move(codec), works_ahead_, std::move(lane),
                                         std::move(pool));
  }
  void begin(int64_t leaving_bytes, int64_t nbytes) override {
    opener_().attr("begin_iteration")(leaving_bytes, nbytes);
  }

 private:
  const py::weakref opener_;
  const bool works_ahead_;
};

}  // namespace

void bind_transfers(py::module_& module) {
  py::class_<AwayForm, AwayFormPtr>(module, "AwayForm")
      .def("bring", &AwayForm::bring)
      .def_property_readonly("device_nbytes", &AwayForm::device_nbytes)
      .def_property_readonly("pool_nbytes", &AwayForm::pool_nbytes)
      .def_property_readonly("works_ahead", &AwayForm::works_ahead)
      .def("wait_sent", &AwayForm::wait_sent);
  py::class_<BlockForm, AwayForm, std::shared_ptr<BlockForm>>(module, "BlockForm")
      .def("bring_into", &BlockForm::bring_into, "leaving"_a.none(false),
           "departure"_a.none(false));
  module.attr("EXPECTATION_LIMITS") = ExpectationLimits{};
  py::class_<Expectations, ExpectationsPtr>(module, "Expectations")
      .def(py::init(&Expectations::of_device), "device"_a, "limits"_a)
      .def("__len__", &Expectations::size)
      .def("begin_iteration", &Expectations::begin_iteration)
      .def("sizes", &Expectations::sizes, "key"_a);
  py::native_enum<Form>(module, "Form", "enum.Enum")
      .value("BLOCK", Form::kBlock)
      .value("FRAME", Form::kFrame)
      .value("POOLED_FRAME", Form::kPooledFrame)
      .finalize();
  py::class_<Refused>(module, "Refused")
      .def_readonly("reason", &Refused::reason)
      .def_readonly("why", &Refused::why);
  py::class_<Transfers, TransfersPtr>(module, "Transfers")
      .def(py::init([](c10::Device device, ExpectationsPtr expectations, const py::object& opener,
                       Action action, Action without_recipe, std::function<bool()> captures) {
             return std::make_shared<Transfers>(
                 device, std::move(expectations), std::make_unique<PythonOpener>(opener, device),
                 Transfers::Policy{action, without_recipe, std::move(captures)});
           }),
           "device"_a, "expectations"_a.none(false), "opener"_a, "action"_a, "without_recipe"_a,
           "captures"_a)
      .def("send", &Transfers::send, "form"_a, "storage"_a.none(false), "key"_a)
      .def("learn", &Transfers::learn)
      .def_property_readonly("awaited_reports", &Transfers::awaited_reports);
}

}  // namespace memswap
