// Iteration, its timeline and its plan, as Python sees them.
#include "engine/iteration.h"

#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "engine/plan.h"
#include "engine/recorder.h"

namespace memswap {
namespace py = pybind11;

namespace {

// (unit, ordinal, nbytes, dtype, action, releases, departures, fetches, departs, frame_nbytes)
using GivenPlace =
    std::tuple<std::string, int64_t, int64_t, c10::ScalarType, std::string, std::vector<size_t>,
               std::vector<size_t>, std::vector<size_t>, bool, std::optional<int64_t>>;

Plan::Action action_of(const std::string& word) {
  static const std::map<std::string, Plan::Action> words = {
      {"swap", Plan::Action::kSwap}, {"keep", Plan::Action::kKeep}, {"ask", Plan::Action::kAsk}};
  const auto found = words.find(word);
  if (found == words.end()) {
    throw py::value_error("a plan says swap, keep or ask, found " + word);
  }
  return found->second;
}

std::shared_ptr<Plan> make_plan(c10::Device device, std::shared_ptr<BlockSender> sender,
                                int64_t least_bytes, std::vector<GivenPlace> given,
                                std::function<bool()> refrains) {
  auto plan = std::make_shared<Plan>(Plan{.device = device,
                                          .sender = std::move(sender),
                                          .least_bytes = least_bytes,
                                          .places = {},
                                          .refrains = std::move(refrains)});
  for (auto& [unit, ordinal, nbytes, dtype, action, releases, departures, fetches, departs,
              frame_nbytes] : given) {
    plan->places.push_back({.unit = std::move(unit),
                            .ordinal = ordinal,
                            .nbytes = nbytes,
                            .dtype = dtype,
                            .action = action_of(action),
                            .releases = std::move(releases),
                            .departures = std::move(departures),
                            .fetches = std::move(fetches),
                            .departs = departs,
                            .frame_nbytes = frame_nbytes});
  }
  plan->check();
  return plan;
}

size_t place_in(const Iteration& iteration, int64_t index) {
  if (index < 0 || static_cast<size_t>(index) >= iteration.size()) {
    throw py::index_error("expected a place in an iteration of " +
                          std::to_string(iteration.size()) + " storages, found " +
                          std::to_string(index));
  }
  return static_cast<size_t>(index);
}

std::vector<std::optional<int64_t>> groups_of(const Iteration& iteration) {
  std::vector<std::optional<int64_t>> groups;
  for (const int64_t group : iteration.groups()) {
    groups.push_back(group == Iteration::kNoGroup ? std::nullopt : std::optional(group));
  }
  return groups;
}

std::vector<int64_t> sizes_of(const Iteration& iteration) {
  std::vector<int64_t> sizes;
  for (size_t index = 0; index < iteration.size(); ++index) {
    sizes.push_back(iteration.order().nbytes(index));
  }
  return sizes;
}

}  // namespace

void bind_iteration(py::module_& module) {
  module.attr("NEEDED_AT_ONCE") = Iteration::kNeededAtOnce;
  module.attr("NEVER_FREED") = Iteration::kNeverFreed;
  module.attr("PLANNED") = Engine::kPlanned;

  py::class_<Plan, std::shared_ptr<Plan>>(
      module, "Plan",
      "What happens to each storage of an iteration (csrc/engine/plan.h). A place is (unit, "
      "ordinal, nbytes, dtype, 'swap' | 'keep' | 'ask', releases, departures, fetches, departs, "
      "frame_nbytes).")
      .def(py::init(&make_plan), py::arg("device"), py::arg("sender").none(false),
           py::arg("least_bytes"), py::arg("places"), py::arg("refrains") = py::none())
      .def("__len__", [](const Plan& plan) { return plan.places.size(); });

  py::class_<Iteration, IterationPtr>(module, "Iteration",
                                      "One forward and the backward that belongs to it "
                                      "(csrc/engine/iteration.h).")
      .def(py::init([](std::optional<int64_t> window_bytes) {
             return std::make_shared<Iteration>(nullptr, window_bytes);
           }),
           py::arg("window_bytes"))
      .def(
          "admit",
          [](Iteration& self, int64_t nbytes, bool decoded, std::optional<int64_t> group) {
            return self.admit(nbytes, decoded, group.value_or(Iteration::kNoGroup));
          },
          py::arg("nbytes"), py::arg("decoded") = false, py::arg("group") = py::none(),
          "The next storage is saved. Why it should stay, or None.")
      .def("place", &Iteration::place, py::arg("entry").none(false),
           "The entry of the storage that was admitted last.")
      .def(
          "demand",
          [](Iteration& self, int64_t index) { return self.demand(place_in(self, index)); },
          py::arg("index"), "A storage is demanded. The entries that are to be brought back now.")
      .def(
          "entry",
          [](const Iteration& self, int64_t index) { return self.entry(place_in(self, index)); },
          py::arg("index"), "The entry of a storage, or None.")
      .def(
          "was_demanded",
          [](const Iteration& self, int64_t index) {
            return self.order().was_demanded(place_in(self, index));
          },
          py::arg("index"))
      .def("open_window", &Iteration::open_window, py::arg("room_bytes"),
           "An operator is launched, and about so many bytes can be decoded beside it.")
      .def(
          "note_held", [](Iteration& self, size_t index) { self.held.insert(index); },
          py::arg("index"), "A storage stayed alive although it had left.")
      .def_property_readonly("over", &Iteration::over,
                             "Whether nothing that was saved is alive: no graph will demand it.")
      .def_property_readonly("count", &Iteration::size, "Number of storages.")
      .def_property_readonly("nbytes", &Iteration::nbytes, "Of all storages.")
      .def_property_readonly("alive_bytes", &Iteration::alive_bytes,
                             "Of those whose entries are alive.")
      .def("present", &Iteration::present,
           "The storages that are on the device now, for who decides when they are free.")
      .def("present_bytes", &Iteration::present_bytes, py::arg("granularity"),
           "Of the device, that its storages and frames take now, each rounded up.")
      .def_property_readonly("sizes", &sizes_of, "Their bytes, a new list.")
      .def_property_readonly(
          "order", [](const Iteration& self) { return self.order().demanded(); },
          "Places in the order of first demands, a new list.")
      .def_property_readonly("groups", &groups_of, "Groups as they were admitted, a new list.")
      .def_property_readonly("began_backward", &Iteration::began_backward)
      .def_property_readonly(
          "bytes_ahead", [](const Iteration& self) { return self.order().bytes_ahead(); },
          "Bytes ahead of the latest demand that its windows would have had to know of, or 0.")
      .def_property_readonly("window_bytes", &Iteration::window_bytes)
      .def_property_readonly("predicted_window_bytes", &Iteration::predicted_window_bytes,
                             "The forecast's, for as long as the sizes agree with it; then None.")
      .def_property_readonly("own_window_bytes", &Iteration::own_window_bytes,
                             "What the storages so far make it.")
      .def_property_readonly("least_window_bytes", &Iteration::least_window_bytes,
                             "The same, whatever operators decodes wait for.")
      .def_property_readonly("leaving_bytes", &Iteration::leaving_bytes,
                             "Bytes that may leave at once.")
      .def_property_readonly("returns_as_planned", &Iteration::returns_as_planned,
                             "Whether its plan says what comes back, and not the window.")
      .def_property(
          "plan", [](const Iteration& self) { return std::const_pointer_cast<Plan>(self.plan); },
          [](Iteration& self, std::shared_ptr<Plan> plan) { self.plan = std::move(plan); },
          "What happens to its storages, or None.")
      .def_readwrite("follows_alone", &Iteration::follows_alone,
                     "Whether the plan is followed without asking anybody.")
      .def_readonly("peak_bytes", &Iteration::peak_bytes)
      .def("frame_nbytes", &Iteration::frame_nbytes, py::arg("index"),
           "Bytes that the plan has for the frame of a storage, or None.")
      .def_readwrite("recorder", &Iteration::recorder, "Who takes it down, or None.")
      .def_readwrite("unfit", &Iteration::unfit,
                     "Whether a storage did not become the frame that was planned.")
      .def_readonly("refused", &Iteration::refused, "Whether the pool had no room for something.")
      .def_readonly("pooled_bytes", &Iteration::pooled_bytes,
                    "The most that was away then, or when backward began.")
      .def_readwrite("limit_bytes", &Iteration::limit_bytes,
                     "Resident bytes that what starts back stays below; 0: as many as come.")
      .def_readonly("held", &Iteration::held,
                    "Places of storages that stayed alive although they had left, a new set.");

  py::class_<Timeline>(module, "Timeline", "The iterations of one engine.")
      .def(py::init<std::optional<int64_t>>(), py::arg("window_bytes"))
      .def_readwrite("window_bytes", &Timeline::window_bytes,
                     "Of iterations that begin; None: automatic.")
      .def("begin", &Timeline::begin,
           "A new iteration, with what the last one that was demanded predicts.");
}

}  // namespace memswap
