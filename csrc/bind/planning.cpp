// What planning reads and asks: recorders and their records, a device's memory, rates and replays.
#include <algorithm>
#include <map>
#include <string_view>
#include <vector>

#include "bind.h"
#include "engine/iteration.h"
#include "engine/link_model.h"
#include "engine/memory_gauge.h"
#include "engine/recorder.h"
#include "engine/replay.h"
#include "engine/workspace.h"

template <>
struct py::detail::type_caster<memswap::IterationRecord::Copy>
    : memswap::TupleCaster<memswap::IterationRecord::Copy, &memswap::IterationRecord::Copy::seconds,
                           &memswap::IterationRecord::Copy::nbytes> {};
template <>
struct py::detail::type_caster<memswap::IterationRecord::Region>
    : memswap::TupleCaster<memswap::IterationRecord::Region,
                           &memswap::IterationRecord::Region::unit,
                           &memswap::IterationRecord::Region::inputs,
                           &memswap::IterationRecord::Region::other_nbytes> {};

namespace memswap {

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

// Numbers that stand for none, from Python's None and to it.
template <class Number>
std::vector<Number> filled(const std::vector<std::optional<Number>>& all, Number none) {
  return each<Number>(all, [none](const auto& one) { return one.value_or(none); });
}

template <std::vector<int32_t> IterationRecord::* column>
std::vector<std::optional<int32_t>> marks_of(const IterationRecord& record) {
  return each<std::optional<int32_t>>(record.*column, [](int32_t mark) {
    return mark == kNever ? std::nullopt : std::optional(mark);
  });
}

std::vector<std::string> names_of(const IterationRecord& record, const std::vector<size_t>& units) {
  return each<std::string>(units, [&](size_t unit) { return record.unit_names[unit]; });
}

void bind_record(py::module_& module) {
  using Record = IterationRecord;
  py::class_<Record, std::shared_ptr<Record>>(module, "IterationRecord")
      .def_property_readonly("units", [](const Record& r) { return names_of(r, r.units); })
      .def_readonly("ordinals", &Record::ordinals)
      .def_readonly("nbytes", &Record::nbytes)
      .def_readonly("dtypes", &Record::dtypes)
      .def_readonly("actions", &Record::actions)
      .def_property_readonly(
          "moved",
          [](const Record& r) { return std::vector<bool>(r.moved.begin(), r.moved.end()); })
      .def_property_readonly("for_recipe",
                             [](const Record& r) {
                               return std::vector<bool>(r.for_recipe.begin(), r.for_recipe.end());
                             })
      .def_property_readonly("held_until", &marks_of<&Record::held_until>)
      .def_property_readonly("last_demand", &marks_of<&Record::last_demand>)
      .def_property_readonly("kept_until", &marks_of<&Record::kept_until>)
      .def_property_readonly("others",
                             [](const Record& r) {
                               return each<std::vector<std::string>>(
                                   r.others, [&](const auto& units) { return names_of(r, units); });
                             })
      .def_readonly("order", &Record::order)
      .def_readonly("gaps_s", &Record::gaps_s)
      .def_readonly("costs_s", &Record::costs_s)
      .def_readonly("windows_s", &Record::windows_s)
      .def_readonly("extra_nbytes", &Record::extra_nbytes)
      .def_readonly("tail_s", &Record::tail_s)
      .def_readonly("peak_bytes", &Record::peak_bytes)
      .def_readonly("regions", &Record::regions)
      .def_readonly("sends", &Record::sends)
      .def_readonly("fetches", &Record::fetches);
}

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

StepRecord checked_step(std::vector<int64_t> nbytes, std::vector<int64_t> held_frame_nbytes,
                        std::vector<int64_t> overflow_nbytes,
                        const std::vector<std::optional<int32_t>>& held_until,
                        const std::vector<std::optional<int32_t>>& last_demand,
                        const std::vector<std::optional<int32_t>>& gone_after,
                        const std::vector<std::optional<double>>& recipe_s,
                        std::vector<int64_t> inner_nbytes,
                        std::vector<std::vector<int32_t>> recipe_sources,
                        const std::vector<bool>& for_recipe, std::vector<int32_t> order,
                        std::vector<double> gaps_s, std::vector<double> windows_s,
                        std::vector<int64_t> extra_nbytes) {
  StepRecord step{.nbytes = std::move(nbytes),
                  .held_frame_nbytes = std::move(held_frame_nbytes),
                  .overflow_nbytes = std::move(overflow_nbytes),
                  .held_until = filled(held_until, kNever),
                  .last_demand = filled(last_demand, kNever),
                  .gone_after = filled(gone_after, kNever),
                  .recipe_s = filled(recipe_s, kNoRecipe),
                  .inner_nbytes = std::move(inner_nbytes),
                  .recipe_sources = std::move(recipe_sources),
                  .for_recipe = {for_recipe.begin(), for_recipe.end()},
                  .order = std::move(order),
                  .gaps_s = std::move(gaps_s),
                  .windows_s = std::move(windows_s),
                  .extra_nbytes = std::move(extra_nbytes)};
  step.check();
  return step;
}

// A byte per storage: the place of its action in memswap.Action.
std::vector<PlannedAction> actions_of(std::string_view bytes) {
  std::vector<PlannedAction> actions(bytes.size());
  std::transform(bytes.begin(), bytes.end(), actions.begin(), [](char byte) {
    const auto code = static_cast<uint8_t>(byte);
    if (code > static_cast<uint8_t>(PlannedAction::kRecompute)) {
      throw py::value_error("replay: found the action " + std::to_string(code) +
                            ", expected 0 to 4");
    }
    return static_cast<PlannedAction>(code);
  });
  return actions;
}

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

// In the order of Work.
constexpr const char* kWork[] = {"forward",   "backward",       "wait for room",
                                 "write",     "wait for bytes", "copying takes processors",
                                 "encode",    "decode",         "recompute",
                                 "copy away", "copy back"};

py::list spans_of(const Replay& found) {
  py::list spans;
  for (const WorkSpan& span : found.spans) {
    spans.append(py::make_tuple(kWork[static_cast<size_t>(span.work)], span.storage, span.begin_s,
                                span.end_s));
  }
  return spans;
}

Replay replayed(const StepRecord& step, const MachineRates& rates, const py::bytes& actions,
                std::optional<int64_t> budget_bytes, bool spans) {
  const std::vector<PlannedAction> chosen = actions_of(actions);
  const py::gil_scoped_release unlocked;
  return replay(step, rates, chosen, budget_bytes.value_or(kNoBudget), spans);
}

std::pair<py::bytes, Replay> replayed_without_idle(const StepRecord& step,
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
  py::class_<StepRecord>(module, "StepRecord")
      .def(py::init(&checked_step), py::kw_only(), "nbytes"_a, "held_frame_nbytes"_a,
           "overflow_nbytes"_a, "held_until"_a, "last_demand"_a, "gone_after"_a, "recipe_s"_a,
           "inner_nbytes"_a, "recipe_sources"_a, "for_recipe"_a, "order"_a, "gaps_s"_a,
           "windows_s"_a, "extra_nbytes"_a);
  py::class_<MachineRates>(module, "MachineRates")
      .def(py::init<double, double, double, double, double, double, double, double, double, bool>(),
           py::kw_only(), "d2h_bytes_per_s"_a, "h2d_bytes_per_s"_a, "duplex_d2h_bytes_per_s"_a,
           "duplex_h2d_bytes_per_s"_a, "encode_bytes_per_s"_a, "decode_bytes_per_s"_a,
           "copy_latency_s"_a, "codec_latency_s"_a, "copy_share"_a, "inline_codec"_a);
  py::native_enum<Direction>(module, "Direction", "enum.Enum")
      .value("AWAY", Direction::kAway)
      .value("BACK", Direction::kBack)
      .finalize();
  py::class_<LinkModel>(module, "LinkModel")
      .def(py::init<const MachineRates&, int32_t>(), "rates"_a, "storages"_a)
      .def("add", &LinkModel::add, "direction"_a, "index"_a, "nbytes"_a, "ready_s"_a)
      .def("end_s", &LinkModel::end_s, "direction"_a, "index"_a);
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
  bind_record(module);
  bind_recorder(module);
  bind_replay(module);
}

}  // namespace memswap
