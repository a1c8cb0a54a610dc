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

namespace {

// A weak reference to an entry: equal to any other one to the same entry.
class EntryReference {
 public:
  explicit EntryReference(Entry& entry) : entry_(entry.weak_from_this()), address_(&entry) {}
  EntryPtr lock() const { return entry_.lock(); }
  bool operator==(const EntryReference& other) const {
    return !entry_.owner_before(other.entry_) && !other.entry_.owner_before(entry_);
  }
  size_t hash() const { return std::hash<const void*>()(address_); }

 private:
  std::weak_ptr<Entry> entry_;
  const void* address_;
};

void bind_entries(py::module_& module) {
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
  py::class_<Entry, Known, EntryPtr>(module, "Entry")
      .def("__repr__", &Entry::described)
      .def("gone", &Entry::gone, "wait"_a = false)
      .def_property_readonly("state", &Entry::state)
      .def_property_readonly("engine", &Entry::engine)
      .def_property_readonly("reference", [](Entry& entry) { return EntryReference(entry); })
      .def_property_readonly("identity", &Entry::identity, py::return_value_policy::copy)
      .def_property_readonly("is_away", &Entry::is_away)
      .def_property_readonly("away", &Entry::away)
      .def_property_readonly("departure", &Entry::departure)
      .def_property_readonly("arrival", &Entry::arrival)
      .def_property_readonly("fetched", &Entry::fetched)
      .def_readonly("storage", &Entry::storage)
      .def_readonly("iteration", &Entry::iteration)
      .def_readonly("index", &Entry::index);
  py::class_<Departing>(module, "Departing")
      .def("__len__", &Departing::size)
      .def("notice_gone", &Departing::notice_gone, "looks"_a = Departing::kAll);
}

std::shared_ptr<Plan> make_plan(c10::Device device, int64_t least_bytes,
                                std::vector<Plan::Place> places) {
  auto plan = std::make_shared<Plan>(Plan{device, least_bytes, std::move(places)});
  plan->check();
  return plan;
}

void bind_iterations(py::module_& module) {
  py::class_<Plan, std::shared_ptr<Plan>>(module, "Plan")
      .def(py::init(&make_plan), "device"_a, "least_bytes"_a, "places"_a)
      .def("__len__", [](const Plan& plan) { return plan.places.size(); });
  py::class_<Iteration, IterationPtr>(module, "Iteration")
      .def("entry", &Iteration::entry, "index"_a)
      .def("present_bytes", &Iteration::present_bytes, "granularity"_a)
      .def_property_readonly("sizes", &Iteration::sizes)
      .def_property_readonly("over", &Iteration::over)
      .def_property_readonly("count", &Iteration::size)
      .def_property_readonly("nbytes", &Iteration::nbytes)
      .def_property_readonly("alive_bytes", &Iteration::alive_bytes)
      .def_property_readonly("began_backward", &Iteration::began_backward)
      .def_property_readonly("own_window_bytes", &Iteration::own_window_bytes)
      .def_property_readonly("least_window_bytes", &Iteration::least_window_bytes)
      .def_property_readonly("leaving_bytes", &Iteration::leaving_bytes)
      .def_property(
          "plan", [](const Iteration& self) { return std::const_pointer_cast<Plan>(self.plan); },
          [](Iteration& self, std::shared_ptr<Plan> plan) { self.plan = std::move(plan); })
      .def_readwrite("recorder", &Iteration::recorder)
      .def_readwrite("follows_alone", &Iteration::follows_alone)
      .def_readwrite("learns_recipes", &Iteration::learns_recipes)
      .def_readwrite("unfit", &Iteration::unfit)
      .def_readwrite("limit_bytes", &Iteration::limit_bytes)
      .def_readonly("proven", &Iteration::proven)
      .def_readonly("no_recipe", &Iteration::no_recipe)
      .def_readonly("peak_bytes", &Iteration::peak_bytes)
      .def_readonly("pooled_bytes", &Iteration::pooled_bytes)
      .def_readonly("refused", &Iteration::refused)
      .def_readonly("held", &Iteration::held);
  py::class_<Timeline>(module, "Timeline")
      .def(py::init<std::optional<int64_t>>(), "window_bytes"_a)
      .def("begin", &Timeline::begin)
      .def_readwrite("window_bytes", &Timeline::window_bytes);
}

}  // namespace

void bind_entry(py::module_& module) {
  bind_entries(module);
  bind_iterations(module);
}

}  // namespace memswap
