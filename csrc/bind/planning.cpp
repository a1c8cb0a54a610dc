// What planning reads and asks: recorders and their records, a device's memory, rates and replays.
#include <map>
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
  const auto names = [&](const std::vector<size_t>& units) {
    return each<std::string>(units, [&](size_t unit) { return record.unit_names[unit]; });
  };
  const auto marks = [](const std::vector<int32_t>& column) {
    return each<std::optional<int32_t>>(
        column, [](int32_t mark) { return mark == kNever ? std::nullopt : std::optional(mark); });
  };
  return with_attributes(
      "units"_a = names(record.units), "ordinals"_a = record.ordinals, "nbytes"_a = record.nbytes,
      "dtypes"_a = record.dtypes, "actions"_a = record.actions,
      "moved"_a = std::vector<bool>(record.moved.begin(), record.moved.end()),
      "for_recipe"_a = std::vector<bool>(record.for_recipe.begin(), record.for_recipe.end()),
      "held_until"_a = marks(record.held_until), "last_demand"_a = marks(record.last_demand),
      "kept_until"_a = marks(record.kept_until),
      "others"_a = each<std::vector<std::string>>(record.others, names), "order"_a = record.order,
      "gaps_s"_a = record.gaps_s, "costs_s"_a = record.costs_s, "windows_s"_a = record.windows_s,
      "extra_nbytes"_a = record.extra_nbytes, "tail_s"_a = record.tail_s,
      "peak_bytes"_a = record.peak_bytes, "regions"_a = record.regions, "sends"_a = record.sends,
      "fetches"_a = record.fetches);
}

namespace {

void bind_recorder(py::module_& module) {
  py::class_<MemoryGauge, std::shared_ptr<MemoryGauge>>(module, "MemoryGauge")
      .def(py::init([](const c10::Device& device) -> std::shared_ptr<MemoryGauge> {
        return MemoryGauge::of(device);
      }))
      .def_property_readonly("now", &MemoryGauge::now)
      .def_property_readonly("peak", &MemoryGauge::peak)
      .def("begin", &MemoryGauge::begin);
  py::class_<Workspace, std::shared_ptr<Workspace>>(module, "Workspace")
      .def(py::init<std::shared_ptr<MemoryGauge>, std::vector<at::Tensor>, int64_t, int64_t,
                    int64_t>(),
           "gauge"_a, "parameters"_a, "granularity"_a, "other_nbytes"_a, "baseline_nbytes"_a)
      .def("watch", &Workspace::watch, "iteration"_a)
      .def("arrive", &Workspace::arrive)
      .def("end", &Workspace::end)
      .def("record", &Workspace::record, "marks"_a);
  py::class_<WorkspaceRecord>(module, "WorkspaceRecord")
      .def(py::init<std::vector<int64_t>, std::vector<int64_t>, int64_t>(), "extra_nbytes"_a,
           "gradient_nbytes"_a, "baseline_nbytes"_a)
      .def_readonly("extra_nbytes", &WorkspaceRecord::extra_nbytes)
      .def_readonly("gradient_nbytes", &WorkspaceRecord::gradient_nbytes)
      .def_readonly("baseline_nbytes", &WorkspaceRecord::baseline_nbytes);
  py::class_<Recorder, std::shared_ptr<Recorder>>(module, "Recorder")
      .def(py::init([](c10::Device device, std::function<bool()> capturing) {
             return std::make_shared<Recorder>(Clock(device, std::move(capturing)));
           }),
           "device"_a, "capturing"_a = py::none())
      .def("choose", [](Recorder& self, const std::string& unit, int64_t ordinal, int64_t nbytes,
                        c10::ScalarType dtype,
                        Action action) { self.choose({unit, ordinal, nbytes, dtype, action}); })
      .def("region", &Recorder::region, "unit"_a, "inputs"_a, "iteration"_a, "least_bytes"_a)
      .def_readwrite("workspace", &Recorder::workspace)
      .def("close", &Recorder::close)
      .def("ready", &Recorder::ready)
      .def("wait", &Recorder::wait, without_gil())
      .def("take", &Recorder::take);
}

// A step whose columns fit together.
struct CheckedStep : StepRecord {
  template <class... Columns>
  explicit CheckedStep(Columns&&... columns) : StepRecord{std::forward<Columns>(columns)...} {
    check();
  }
};

std::map<int32_t, std::vector<int32_t>> by_mark(const std::vector<PlannedEvent>& events) {
  std::map<int32_t, std::vector<int32_t>> storages;
  for (const PlannedEvent& event : events) {
    storages[event.at].push_back(event.storage);
  }
  return storages;
}

py::dict exposed_of(const Replay& found) {
  py::dict seconds;
  for (const int32_t index : found.exposed) {
    seconds[py::int_(index)] = found.exposed_s[index];
  }
  return seconds;
}

py::list spans_of(const Replay& found) {
  py::list spans;
  for (const WorkSpan& span : found.spans) {
    spans.append(
        py::make_tuple(static_cast<int>(span.work), span.storage, span.begin_s, span.end_s));
  }
  return spans;
}

Replay replayed(const CheckedStep& step, const MachineRates& rates, const py::bytes& actions,
                std::optional<int64_t> budget_bytes, bool spans) {
  const std::vector<PlannedAction> chosen = actions_of(actions);
  const py::gil_scoped_release unlocked;
  return replay(step, rates, chosen, budget_bytes.value_or(kNoBudget), spans);
}

std::pair<py::bytes, Replay> replayed_without_idle(const CheckedStep& step,
                                                   const MachineRates& rates,
                                                   const py::bytes& actions,
                                                   std::optional<int64_t> budget_bytes) {
  ReplayedPlan found{actions_of(actions), {}};
  {
    const py::gil_scoped_release unlocked;
    found = replay_without_idle(step, rates, std::move(found.actions),
                                budget_bytes.value_or(kNoBudget));
  }
  return {py::bytes(reinterpret_cast<const char*>(found.actions.data()), found.actions.size()),
          std::move(found.found)};
}

void bind_replay(py::module_& module) {
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
  py::class_<Replay>(module, "Replay")
      .def_readonly("resident_bytes", &Replay::resident_bytes)
      .def_readonly("mark_s", &Replay::mark_s)
      .def_readonly("peak_bytes", &Replay::peak_bytes)
      .def_readonly("arena_bytes", &Replay::arena_bytes)
      .def_readonly("moved_bytes", &Replay::moved_bytes)
      .def_readonly("pooled_bytes", &Replay::pooled_bytes)
      .def_readonly("total_exposed_s", &Replay::total_exposed_s)
      .def_readonly("idle", &Replay::idle)
      .def_property_readonly("exposed_s", &exposed_of)
      .def_property_readonly("releases", [](const Replay& r) { return by_mark(r.releases); })
      .def_property_readonly("departures", [](const Replay& r) { return by_mark(r.departures); })
      .def_property_readonly("fetches", [](const Replay& r) { return by_mark(r.fetches); })
      .def_property_readonly("work", &spans_of);
  module.def("replay", &replayed, "step"_a, "rates"_a, "actions"_a, "budget_bytes"_a,
             "spans"_a = false);
  module.def("replay_without_idle", &replayed_without_idle, "step"_a, "rates"_a, "actions"_a,
             "budget_bytes"_a);
}

}  // namespace

void bind_planning(py::module_& module) {
  bind_recorder(module);
  bind_replay(module);
}

}  // namespace memswap
