// StepRecord, MachineRates and Replay, as Python sees them. Replaying holds no interpreter's lock.
#include "engine/replay.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/link_model.h"

namespace memswap {
namespace py = pybind11;

namespace {

std::vector<int32_t> marks_of(const std::vector<std::optional<int32_t>>& marks) {
  std::vector<int32_t> numbers(marks.size());
  std::transform(marks.begin(), marks.end(), numbers.begin(),
                 [](const std::optional<int32_t>& mark) { return mark.value_or(kNever); });
  return numbers;
}

std::vector<double> seconds_of(const std::vector<std::optional<double>>& recipes) {
  std::vector<double> seconds(recipes.size());
  std::transform(recipes.begin(), recipes.end(), seconds.begin(),
                 [](const std::optional<double>& recipe) { return recipe.value_or(kNoRecipe); });
  return seconds;
}

StepRecord checked_step(std::vector<int64_t> nbytes, std::vector<int64_t> held_frame_nbytes,
                        std::vector<int64_t> overflow_nbytes,
                        const std::vector<std::optional<int32_t>>& held_until,
                        const std::vector<std::optional<int32_t>>& last_demand,
                        const std::vector<std::optional<int32_t>>& gone_after,
                        const std::vector<std::optional<double>>& recipe_s,
                        std::vector<std::vector<int32_t>> recipe_sources,
                        std::vector<int32_t> order, std::vector<double> gaps_s,
                        std::vector<double> windows_s, std::vector<int64_t> extra_nbytes) {
  StepRecord step{std::move(nbytes),    std::move(held_frame_nbytes), std::move(overflow_nbytes),
                  marks_of(held_until), marks_of(last_demand),        marks_of(gone_after),
                  seconds_of(recipe_s), std::move(recipe_sources),    std::move(order),
                  std::move(gaps_s),    std::move(windows_s),         std::move(extra_nbytes)};
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

py::bytes bytes_of(const std::vector<PlannedAction>& actions) {
  return py::bytes(reinterpret_cast<const char*>(actions.data()), actions.size());
}

py::dict lists_of(const std::vector<PlannedEvent>& events) {
  py::dict lists;
  for (const PlannedEvent& event : events) {
    const py::int_ at(event.at);
    if (!lists.contains(at)) {
      lists[at] = py::list();
    }
    lists[at].cast<py::list>().append(event.storage);
  }
  return lists;
}

py::dict exposed_of(const Replay& found) {
  py::dict seconds;
  for (const int32_t index : found.exposed) {
    seconds[py::int_(index)] = found.exposed_s[index];
  }
  return seconds;
}

const char* name_of(Work work) {
  switch (work) {
    case Work::kForward:
      return "forward";
    case Work::kBackward:
      return "backward";
    case Work::kWaitForRoom:
      return "wait for room";
    case Work::kWaitForWrite:
      return "write";
    case Work::kWaitForBytes:
      return "wait for bytes";
    case Work::kSharedWithCopies:
      return "copying takes processors";
    case Work::kEncode:
      return "encode";
    case Work::kDecode:
      return "decode";
    case Work::kRecompute:
      return "recompute";
    case Work::kCopyAway:
      return "copy away";
    case Work::kCopyBack:
      return "copy back";
  }
  return "";
}

py::list spans_of(const Replay& found) {
  py::list spans;
  for (const WorkSpan& span : found.spans) {
    spans.append(py::make_tuple(name_of(span.work), span.storage, span.begin_s, span.end_s));
  }
  return spans;
}

int64_t bytes_or_no_budget(std::optional<int64_t> budget_bytes) {
  return budget_bytes.value_or(kNoBudget);
}

Replay replayed(const StepRecord& step, const MachineRates& rates, const py::bytes& actions,
                std::optional<int64_t> budget_bytes, bool spans) {
  const std::vector<PlannedAction> chosen = actions_of(actions);
  const py::gil_scoped_release unlocked;
  return replay(step, rates, chosen, bytes_or_no_budget(budget_bytes), spans);
}

std::pair<py::bytes, Replay> replayed_without_idle(const StepRecord& step,
                                                   const MachineRates& rates,
                                                   const py::bytes& actions,
                                                   std::optional<int64_t> budget_bytes) {
  ReplayedPlan found{actions_of(actions), {}};
  {
    const py::gil_scoped_release unlocked;
    found = replay_without_idle(step, rates, std::move(found.actions),
                                bytes_or_no_budget(budget_bytes));
  }
  return {bytes_of(found.actions), std::move(found.found)};
}

}  // namespace

void bind_replay(py::module_& module) {
  py::class_<StepRecord>(module, "StepRecord",
                         "One training step in columns (csrc/engine/step_record.h).")
      .def(py::init(&checked_step), py::kw_only(), py::arg("nbytes"), py::arg("held_frame_nbytes"),
           py::arg("overflow_nbytes"), py::arg("held_until"), py::arg("last_demand"),
           py::arg("gone_after"), py::arg("recipe_s"), py::arg("recipe_sources"), py::arg("order"),
           py::arg("gaps_s"), py::arg("windows_s"), py::arg("extra_nbytes"));
  py::class_<MachineRates>(module, "MachineRates",
                           "How fast a machine copies, encodes and decodes: memswap.Rates.")
      .def(py::init<double, double, double, double, double, double, double, double, double, bool>(),
           py::kw_only(), py::arg("d2h_bytes_per_s"), py::arg("h2d_bytes_per_s"),
           py::arg("duplex_d2h_bytes_per_s"), py::arg("duplex_h2d_bytes_per_s"),
           py::arg("encode_bytes_per_s"), py::arg("decode_bytes_per_s"), py::arg("copy_latency_s"),
           py::arg("codec_latency_s"), py::arg("copy_share"), py::arg("inline_codec"));
  py::enum_<Direction>(module, "Direction")
      .value("AWAY", Direction::kAway)
      .value("BACK", Direction::kBack);
  py::class_<LinkModel>(module, "LinkModel",
                        "When copies in two directions begin and end (csrc/engine/link_model.h).")
      .def(py::init<const MachineRates&, int32_t>(), py::arg("rates"), py::arg("storages"))
      .def("add", &LinkModel::add, py::arg("direction"), py::arg("index"), py::arg("nbytes"),
           py::arg("ready_s"))
      .def("end_s", &LinkModel::end_s, py::arg("direction"), py::arg("index"));
  py::class_<Replay>(module, "Replay", "What a plan makes of a step (csrc/engine/replay.h).")
      .def_readonly("resident_bytes", &Replay::resident_bytes)
      .def_readonly("mark_s", &Replay::mark_s)
      .def_readonly("peak_bytes", &Replay::peak_bytes)
      .def_readonly("arena_bytes", &Replay::arena_bytes)
      .def_readonly("moved_bytes", &Replay::moved_bytes)
      .def_readonly("pooled_bytes", &Replay::pooled_bytes)
      .def_readonly("total_exposed_s", &Replay::total_exposed_s)
      .def_readonly("idle", &Replay::idle)
      .def_property_readonly("exposed_s", &exposed_of)
      .def_property_readonly("releases",
                             [](const Replay& found) { return lists_of(found.releases); })
      .def_property_readonly("departures",
                             [](const Replay& found) { return lists_of(found.departures); })
      .def_property_readonly("fetches", [](const Replay& found) { return lists_of(found.fetches); })
      .def_property_readonly("work", &spans_of);
  module.def("replay", &replayed, py::arg("step"), py::arg("rates"), py::arg("actions"),
             py::arg("budget_bytes"), py::arg("spans") = false);
  module.def("replay_without_idle", &replayed_without_idle, py::arg("step"), py::arg("rates"),
             py::arg("actions"), py::arg("budget_bytes"));
}

}  // namespace memswap
