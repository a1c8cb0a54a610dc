// What storages leave by, as what, and what is expected of their frames.
#include "engine/transfers.h"

#include <stdexcept>
#include <vector>

#include "bind.h"
#include "codec/backends.h"
#include "engine/block_form.h"
#include "engine/bucket.h"
#include "engine/frame_form.h"

namespace memswap {

namespace {

using Pair = std::pair<AwayFormPtr, TicketPtr>;

std::optional<Pair> as_pair(std::optional<Leaving> leaving) {
  return leaving ? std::optional(Pair(std::move(leaving->away), std::move(leaving->departure)))
                 : std::nullopt;
}

std::optional<std::vector<Pair>> send_all(BlockSender& sender,
                                          const std::vector<StorageRefPtr>& storages) {
  std::optional<std::vector<Leaving>> sent = send_together(sender, storages);
  if (!sent) {
    return std::nullopt;
  }
  std::vector<Pair> pairs;
  for (Leaving& leaving : *sent) {
    pairs.emplace_back(std::move(leaving.away), std::move(leaving.departure));
  }
  return pairs;
}

std::optional<Pair> send_frame(FrameSender& sender, const StorageRefPtr& storage, uint8_t dtype,
                               std::optional<uint8_t> shape, std::optional<uint64_t> var_capacity,
                               uint8_t profile, uint8_t center) {
  return as_pair(sender.send(some(storage), {.dtype = dtype,
                                             .shape = shape,
                                             .var_capacity = var_capacity,
                                             .profile = profile,
                                             .center = center}));
}

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

// What a FrameSender is told of the frame.
std::tuple<uint8_t, std::optional<uint8_t>, std::optional<uint64_t>, uint8_t, uint8_t> options_of(
    const Expectation& expectation) {
  const FrameOptions& all = expectation.options;
  return {all.dtype, all.shape, all.var_capacity, all.profile, all.center};
}

template <auto member>
auto option(const Expectation& expectation) {
  return expectation.options.*member;
}

bool alike(const Expectation& one, const Expectation& other) {
  return one.key == other.key && one.pays == other.pays && one.trial == other.trial &&
         one.most_bytes == other.most_bytes && one.fault == other.fault &&
         options_of(one) == options_of(other);
}

void bind_forms(py::module_& module) {
  py::class_<AwayForm, AwayFormPtr>(module, "AwayForm")
      .def("bring",
           [](AwayForm& form) {
             Returning back = form.bring();
             return std::pair(std::move(back.storage), std::move(back.arrival));
           })
      .def_property_readonly("device_nbytes", &AwayForm::device_nbytes)
      .def_property_readonly("pool_nbytes", &AwayForm::pool_nbytes)
      .def_property_readonly("works_ahead", &AwayForm::works_ahead)
      .def("wait_sent", &AwayForm::wait_sent);
  py::class_<BlockForm, AwayForm, std::shared_ptr<BlockForm>>(module, "BlockForm")
      .def(
          "bring_into",
          [](BlockForm& form, const StorageRefPtr& leaving, const TicketPtr& departure) {
            return form.bring_into(some(leaving), departure);
          },
          "leaving"_a, "departure"_a.none(false));
  py::class_<FrameForm, AwayForm, std::shared_ptr<FrameForm>>(module, "FrameForm")
      .def("watch", &FrameForm::watch);
  py::class_<BlockSender, std::shared_ptr<BlockSender>>(module, "BlockSender")
      .def(py::init<std::shared_ptr<Lane>, std::shared_ptr<Pool>>(), "lane"_a.none(false),
           "pool"_a.none(false))
      .def_property_readonly("lane", &BlockSender::lane)
      .def_property_readonly("pool", &BlockSender::pool)
      .def_property_readonly("short_of", [](const BlockSender&) { return BlockForm::kShortOf; })
      .def("why_refused", &BlockSender::why_refused, without_gil())
      .def("send", [](BlockSender& sender,
                      const StorageRefPtr& storage) { return as_pair(sender.send(some(storage))); })
      .def("send_together", &send_all);
  py::class_<FrameSender, std::shared_ptr<FrameSender>>(module, "FrameSender")
      .def(py::init<std::shared_ptr<CodecLane>, bool, std::shared_ptr<Lane>,
                    std::shared_ptr<Pool>>(),
           "lane"_a.none(false), "works_ahead"_a, "copies"_a = py::none(), "pool"_a = py::none())
      .def_property_readonly("works_ahead", &FrameSender::works_ahead)
      .def_property_readonly("short_of", [](const FrameSender&) { return FrameForm::kShortOf; })
      .def("why_refused", &FrameSender::why_refused)
      .def("send", &send_frame, "storage"_a, "dtype"_a, "shape"_a, "var_capacity"_a = py::none(),
           "profile"_a = 0, "center"_a = 0);
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
      .def("__eq__", &alike, py::is_operator())
      .def_readonly("pays", &Expectation::pays)
      .def_property_readonly("options", &options_of)
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
      .def(
          "of",
          [](Expectations& self, std::string unit, int64_t ordinal, int64_t nbytes,
             at::ScalarType dtype, std::optional<int64_t> most_nbytes) {
            return self.of({std::move(unit), ordinal, nbytes, dtype}, most_nbytes);
          },
          "unit"_a, "ordinal"_a, "nbytes"_a, "dtype"_a, "most_nbytes"_a = py::none())
      .def("settled", &Expectations::settled, "trial"_a)
      .def("learn", &Expectations::learn, "expectation"_a, "facts"_a)
      .def(
          "sizes",
          [](Expectations& self, const Key& key) {
            return self.sizes(std::make_from_tuple<TensorKey>(key));
          },
          "key"_a);
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
