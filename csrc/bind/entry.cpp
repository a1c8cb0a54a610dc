// Entries, iterations and their plans.
#include "engine/entry.h"

#include <vector>

#include "bind.h"
#include "engine/departing.h"
#include "engine/engine.h"
#include "engine/iteration.h"
#include "engine/recipes.h"
#include "engine/recorder.h"

namespace memswap {

template <>
inline constexpr std::tuple kMembers<Plan::Place>{
    &Plan::Place::unit,         &Plan::Place::ordinal,   &Plan::Place::nbytes,
    &Plan::Place::dtype,        &Plan::Place::action,    &Plan::Place::releases,
    &Plan::Place::departures,   &Plan::Place::fetches,   &Plan::Place::departs,
    &Plan::Place::frame_nbytes, &Plan::Place::for_recipe};

void bind_entry(py::module_& module) {
  py::native_enum<State>(module, "State", "enum.Enum")
      .value("RESIDENT", State::kResident)
      .value("LEAVING", State::kLeaving)
      .value("AWAY", State::kAway)
      .value("RETURNING", State::kReturning)
      .finalize();
  py::class_<EntryReference>(module, "EntryReference")
      .def("__call__", &EntryReference::lock)
      .def("__eq__", &EntryReference::operator==, py::is_operator())
      .def("__hash__", &EntryReference::hash);
  Bound<Entry, Known, EntryPtr>(module, "Entry")
      .reads<&Entry::state, &Entry::engine, &Entry::is_away, &Entry::away, &Entry::departure,
             &Entry::arrival, &Entry::fetched, &Entry::storage, &Entry::iteration, &Entry::index>()
      .def("__repr__", &Entry::described)
      .def("notice_gone", &Entry::notice_gone, "wait"_a = false)
      .def_property_readonly("reference", [](Entry& entry) { return EntryReference(entry); })
      .def_property_readonly("identity", &Entry::identity, py::return_value_policy::copy);
  py::class_<Departing>(module, "Departing")
      .def("__len__", &Departing::size)
      .def("notice_gone", &Departing::notice_gone, "looks"_a = Departing::kAll);
  py::class_<Plan, std::shared_ptr<Plan>>(module, "Plan")
      .def(py::init(&Plan::make), "device"_a, "least_bytes"_a, "places"_a)
      .def("__len__", [](const Plan& plan) { return plan.places.size(); });
  Bound<Outcome>(module, "Outcome")
      .reads<&Outcome::began_backward, &Outcome::changed, &Outcome::unfit, &Outcome::refused,
             &Outcome::pooled_bytes, &Outcome::peak_bytes, &Outcome::over_budget_bytes,
             &Outcome::no_recipe>();
  Bound<Course>(module, "Course")
      .calls<&Course::follow, &Course::leave_plan, &Course::set_limit_bytes>()
      .reads<&Course::limit_bytes, &Course::follows_plan>();
  Bound<Iteration, IterationPtr>(module, "Iteration")
      .calls<&Iteration::entry, &Iteration::present_bytes, &Iteration::set_recorder,
             &Iteration::learn_recipes>()
      .reads<&Iteration::began_backward, &Iteration::least_prefetch_bytes, &Iteration::outcome,
             &Iteration::own_prefetch_bytes, &Iteration::leaving_bytes, &Iteration::over,
             &Iteration::course, &Iteration::proven, &Iteration::sizes, &Iteration::size,
             &Iteration::nbytes, &Iteration::mostly_alive>();
  Bound<Timeline>(module, "Timeline")
      .calls<&Timeline::begin>()
      .writes<&Timeline::prefetch_bytes>()
      .def(py::init<std::optional<int64_t>>(), "prefetch_bytes"_a);
}

}  // namespace memswap
