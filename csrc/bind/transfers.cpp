// What storages leave by, as what, and what is expected of their frames.
#include "engine/transfers.h"

#include <utility>

#include "bind.h"
#include "engine/block_form.h"

namespace memswap {

template <>
inline constexpr std::tuple kMembers<Leaving>{&Leaving::away, &Leaving::departure};
template <>
inline constexpr std::tuple kMembers<Returning>{&Returning::storage, &Returning::arrival};
template <>
inline constexpr std::tuple kMembers<TensorKey>{&TensorKey::unit, &TensorKey::ordinal,
                                                &TensorKey::nbytes, &TensorKey::dtype};
template <>
inline constexpr std::tuple kMembers<FrameSizes>{&FrameSizes::used, &FrameSizes::held,
                                                 &FrameSizes::overflow};

template <>
inline constexpr std::tuple kMembers<Transfers::Traits>{
    &Transfers::Traits::action, &Transfers::Traits::without_recipe,
    &Transfers::Traits::arena_nbytes, &Transfers::Traits::arena_share};

void bind_transfers(py::module_& module) {
  Bound<AwayForm, AwayFormPtr>(module, "AwayForm")
      .calls<&AwayForm::bring, &AwayForm::wait_sent>()
      .reads<&AwayForm::device_nbytes, &AwayForm::pool_nbytes, &AwayForm::can_fetch_ahead>();
  py::class_<BlockForm, AwayForm, std::shared_ptr<BlockForm>>(module, "BlockForm")
      .def("bring_into", &BlockForm::bring_into, "leaving"_a.none(false),
           "departure"_a.none(false));
  Bound<ExpectationLimits>(module, "ExpectationLimits")
      .writes<&ExpectationLimits::worth, &ExpectationLimits::retry_after,
              &ExpectationLimits::trial_share, &ExpectationLimits::margin,
              &ExpectationLimits::margin_units>()
      .def(py::init<>());
  Bound<Expectations, ExpectationsPtr>(module, "Expectations")
      .calls<&Expectations::begin_iteration, &Expectations::sizes>()
      .def(py::init(&Expectations::of_device), "device"_a, "limits"_a = ExpectationLimits{})
      .def("__len__", &Expectations::size);
  py::native_enum<Form>(module, "Form", "enum.Enum")
      .value("BLOCK", Form::kBlock)
      .value("FRAME", Form::kFrame)
      .value("POOLED_FRAME", Form::kPooledFrame)
      .finalize();
  py::class_<BlockSender, std::shared_ptr<BlockSender>>(module, "BlockSender")
      .def(py::init<std::shared_ptr<Lane>, std::shared_ptr<Pool>>(), "lane"_a, "pool"_a);
  py::class_<FrameSender, std::shared_ptr<FrameSender>>(module, "FrameSender")
      .def(py::init<std::shared_ptr<CodecLane>, bool, std::shared_ptr<Lane>,
                    std::shared_ptr<Pool>>(),
           "lane"_a, "works_ahead"_a, "copies"_a = py::none(), "pool"_a = py::none());
  Bound<Refused>(module, "Refused").reads<&Refused::reason, &Refused::why>();
  Bound<Transfers, TransfersPtr>(module, "Transfers")
      .calls<&Transfers::learn, &Transfers::captures, &Transfers::set_blocks,
             &Transfers::set_frames, &Transfers::begin, &Transfers::set_overflow_room,
             &Transfers::arena_bytes, &Transfers::trim_arena>()
      .reads<&Transfers::awaited_reports, &Transfers::overflow_room>()
      .def(py::init<c10::Device, ExpectationsPtr, Transfers::Traits>(), "device"_a,
           "expectations"_a.none(false), "traits"_a)
      .def("check_decodes", &Transfers::check_decodes, "wait"_a = false)
      .def("send", &Transfers::send, "form"_a, "storage"_a.none(false), "key"_a);
}

}  // namespace memswap
