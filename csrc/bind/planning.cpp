// What planning reads and asks: recorders and their records, a device's memory, rates and replays.
#include <vector>

#include "bind.h"
#include "engine/iteration.h"
#include "engine/memory_gauge.h"
#include "engine/recorder.h"
#include "engine/replay.h"
#include "engine/workspace.h"

namespace memswap {

template <>
inline constexpr std::tuple kMembers<IterationRecord::Copy>{&IterationRecord::Copy::seconds,
                                                            &IterationRecord::Copy::nbytes};
template <>
inline constexpr std::tuple kMembers<IterationRecord::Region>{
    &IterationRecord::Region::unit, &IterationRecord::Region::inputs,
    &IterationRecord::Region::other_nbytes};
template <>
inline constexpr std::tuple kMembers<PlannedEvent>{&PlannedEvent::at, &PlannedEvent::storage};

namespace {

template <class To, class From, class Convert>
std::vector<To> each(const std::vector<From>& all, Convert convert) {
  std::vector<To> made;
  made.reserve(all.size());
  for (const From& one : all) {
    made.push_back(convert(one));
  }
  return made;
}

}  // namespace

static py::object fields_of(const IterationRecord& record) {
  using R = IterationRecord;
  const auto names = [&](const std::vector<size_t>& units) {
    return each<std::string>(units, [&](size_t unit) { return record.unit_names[unit]; });
  };
  const auto flags = [](const auto& all) { return std::vector<bool>(all.begin(), all.end()); };
  const auto marks = [](const std::vector<int32_t>& column) {
    return each<std::optional<int32_t>>(
        column, [](int32_t mark) { return mark == kNever ? std::nullopt : std::optional(mark); });
  };
  py::object fields =
      as_object<&R::ordinals, &R::nbytes, &R::dtypes, &R::actions, &R::order, &R::gaps_s,
                &R::costs_s, &R::windows_s, &R::extra_nbytes, &R::tail_s, &R::peak_bytes,
                &R::regions, &R::sends, &R::fetches>(record);
  fields.attr("units") = names(record.units);
  fields.attr("others") = each<std::vector<std::string>>(record.others, names);
  fields.attr("moved") = flags(record.moved);
  fields.attr("for_recipe") = flags(record.for_recipe);
  fields.attr("held_until") = marks(record.held_until);
  fields.attr("last_demand") = marks(record.last_demand);
  fields.attr("kept_until") = marks(record.kept_until);
  return fields;
}

namespace {

// What a lane did: the number of its WorkKind, the storage, begin and end.
using NumberedSpan = std::tuple<int, int32_t, double, double>;
NumberedSpan in_numbers(const WorkSpan& span) {
  return {static_cast<int>(span.work), span.storage, span.begin_s, span.end_s};
}

}  // namespace

void bind_planning(py::module_& module) {
  Bound<MemoryGauge, std::shared_ptr<MemoryGauge>>(module, "MemoryGauge")
      .reads<&MemoryGauge::now, &MemoryGauge::peak>()
      .calls<&MemoryGauge::begin>()
      .def(py::init([](const c10::Device& device) -> std::shared_ptr<MemoryGauge> {
        return MemoryGauge::of(device);
      }));
  Bound<Workspace, std::shared_ptr<Workspace>>(module, "Workspace")
      .calls<&Workspace::watch, &Workspace::arrive, &Workspace::end, &Workspace::record>()
      .def(py::init<std::shared_ptr<MemoryGauge>, std::vector<at::Tensor>, int64_t, int64_t,
                    int64_t>(),
           "gauge"_a, "parameters"_a, "granularity"_a, "other_nbytes"_a, "baseline_nbytes"_a);
  Bound<WorkspaceRecord>(module, "WorkspaceRecord")
      .reads<&WorkspaceRecord::extra_nbytes, &WorkspaceRecord::gradient_nbytes,
             &WorkspaceRecord::baseline_nbytes>()
      .def(py::init<std::vector<int64_t>, std::vector<int64_t>, int64_t>(), "extra_nbytes"_a,
           "gradient_nbytes"_a, "baseline_nbytes"_a);
  Bound<Recorder, std::shared_ptr<Recorder>>(module, "Recorder")
      .calls<&Recorder::close, &Recorder::ready, &Recorder::take, &Recorder::region>()
      .calls<&Recorder::wait>(without_gil())
      .writes<&Recorder::workspace>()
      .def(py::init([](c10::Device device) { return std::make_shared<Recorder>(Clock(device)); }))
      .def("choose", [](Recorder& self, const std::string& unit, int64_t ordinal, int64_t nbytes,
                        c10::ScalarType dtype,
                        Action action) { self.choose({unit, ordinal, nbytes, dtype, action}); });

  py::class_<Moment, std::shared_ptr<Moment>>(module, "Moment").def("reached", &Moment::reached);
  py::class_<Clock>(module, "Clock")
      .def(py::init<c10::Device>())
      .def("now", [](const Clock& clock) { return std::const_pointer_cast<Moment>(clock.now()); });
  bind_functions<&seconds_between>(module);

  using Bytes = std::vector<int64_t>;
  using Marks = std::vector<int32_t>;
  using Seconds = std::vector<double>;
  module.attr("NEVER") = kNever;
  module.attr("NO_RECIPE") = kNoRecipe;
  py::class_<CheckedStep>(module, "StepRecord")
      .def(py::init<Bytes, Bytes, Bytes, Marks, Marks, Marks, Seconds, Bytes, std::vector<Marks>,
                    std::vector<uint8_t>, Marks, Seconds, Seconds, Bytes>(),
           py::kw_only(), "nbytes"_a, "held_frame_nbytes"_a, "overflow_nbytes"_a, "held_until"_a,
           "last_demand"_a, "gone_after"_a, "recipe_s"_a, "inner_nbytes"_a, "recipe_sources"_a,
           "for_recipe"_a, "order"_a, "gaps_s"_a, "windows_s"_a, "extra_nbytes"_a);
  py::class_<MachineRates>(module, "MachineRates")
      .def(py::init<double, double, double, double, double, double, double, double, double, bool>(),
           py::kw_only(), "d2h_bytes_per_s"_a, "h2d_bytes_per_s"_a, "duplex_d2h_bytes_per_s"_a,
           "duplex_h2d_bytes_per_s"_a, "encode_bytes_per_s"_a, "decode_bytes_per_s"_a,
           "copy_latency_s"_a, "codec_latency_s"_a, "copy_share"_a, "inline_codec"_a);
  Bound<Replay>(module, "Replay")
      .reads<&Replay::resident_bytes, &Replay::mark_s, &Replay::peak_bytes, &Replay::arena_bytes,
             &Replay::moved_bytes, &Replay::pooled_bytes, &Replay::total_exposed_s,
             &Replay::exposed_s, &Replay::idle, &Replay::releases, &Replay::departures,
             &Replay::fetches>()
      .def_property_readonly(
          "work", [](const Replay& r) { return each<NumberedSpan>(r.spans, &in_numbers); });
  Bound<ReplayedPlan>(module, "ReplayedPlan")
      .reads<&ReplayedPlan::found>()
      .def_property_readonly("actions", [](const ReplayedPlan& plan) -> py::bytes {
        return {reinterpret_cast<const char*>(plan.actions.data()), plan.actions.size()};
      });
  module.def(
      "replay",
      [](const CheckedStep& step, const MachineRates& rates, std::string_view actions,
         std::optional<int64_t> budget_bytes, bool spans) {
        return replay(step, rates, actions_of(actions), budget_bytes.value_or(kNoBudget), spans);
      },
      "step"_a, "rates"_a, "actions"_a, "budget_bytes"_a, "spans"_a = false, without_gil());
  module.def(
      "replay_without_idle",
      [](const CheckedStep& step, const MachineRates& rates, std::string_view actions,
         std::optional<int64_t> budget) {
        return replay_without_idle(step, rates, actions_of(actions), budget.value_or(kNoBudget));
      },
      "step"_a, "rates"_a, "actions"_a, "budget_bytes"_a, without_gil());
}

}  // namespace memswap
