// Engine, and what belongs to one: its ledger, windows, recipes and batches.
#include "engine/engine.h"

#include <vector>

#include "bind.h"
#include "engine/batch.h"
#include "engine/recipes.h"
#include "engine/windows.h"

namespace memswap {

template <>
inline constexpr std::tuple kMembers<Ledger::Kept>{&Ledger::Kept::tensors, &Ledger::Kept::nbytes};
template <>
inline constexpr std::tuple kMembers<RecipePlace>{&RecipePlace::unit, &RecipePlace::number,
                                                  &RecipePlace::nbytes};
template <>
inline constexpr std::tuple kMembers<Recipes::Learnt>{
    &Recipes::Learnt::words, &Recipes::Learnt::proofs, &Recipes::Learnt::failed};
template <>
inline constexpr std::tuple kMembers<PolicyTable>{&PolicyTable::min_bytes, &PolicyTable::action,
                                                  &PolicyTable::asks,      &PolicyTable::recipes,
                                                  &PolicyTable::operators, &PolicyTable::proofs};

static py::object fields_of(const Counters& all) {
  using C = Counters;
  return as_object<&C::offered_tensors, &C::offered_bytes, &C::deduplicated_tensors,
                   &C::deduplicated_bytes, &C::moved_storages, &C::moved_bytes, &C::recipe_storages,
                   &C::recipe_bytes, &C::encoded_storages, &C::encoded_bytes, &C::frame_bytes,
                   &C::returned_storages, &C::returned_bytes, &C::freed_bytes, &C::stalls,
                   &C::exposed_wait_s, &C::resident_bytes, &C::peak_resident_bytes, &C::away_bytes,
                   &C::peak_away_bytes>(all);
}

static py::object fields_of(const WindowCounts& all) {
  using C = WindowCounts;
  return as_dict<&C::windows, &C::window_s, &C::encoded_in_windows, &C::encoded_bytes,
                 &C::started_at_bound, &C::started_at_end, &C::kept_storages, &C::kept_bytes,
                 &C::decoded_in_windows, &C::decoded_ahead>(all);
}

namespace {

// Errors of the core as those of memswap.errors.
void translate(std::exception_ptr thrown) {
  const auto raise = [](const char* name, const std::exception& error) {
    PyErr_SetString(from("memswap.errors", name).ptr(), error.what());
  };
  try {
    std::rethrow_exception(thrown);
  } catch (const EntryStateError& error) {
    raise("EntryStateError", error);
  } catch (const LostBytes& error) {
    raise("TransferError", error);
  } catch (const BatchError& error) {
    raise("GroupError", error);
  } catch (const EditedInPlace& error) {
    raise("InplaceEditError", error);
  }
}

// The engine's object in Python, whose class is derived from the native one. It is alive for as
// long as anything is saved by it: scopes and handles own it.
class PythonHost final : public EngineHost {
 public:
  std::optional<Action> decide(Engine& engine, const Offer& offer) override {
    const py::object action = of(engine).attr("decide")(
        offer.tensor, offer.scope.unit, offer.view.nbytes(), offer.view.storage_nbytes());
    return action.cast<std::optional<Action>>();
  }
  std::optional<Action> direct(Engine& engine, const Offer& offer, Action action) override {
    return py::cast<std::optional<Action>>(
        of(engine)
            .attr("director")
            .attr("choose")(offer.tensor, offer.scope.unit, offer.scope.ordinal,
                            offer.view.storage_nbytes(), action, offer.scope.action.has_value()));
  }
  TransfersPtr open(Engine& engine, c10::Device device, std::optional<Form> form) override {
    return of(engine).attr("transfers")(device, form).cast<TransfersPtr>();
  }
  void begin_iteration(Engine& engine) override { of(engine).attr("begin_iteration")(); }
  // At the line of the user's that led here.
  void warn(const std::string& message) override {
    const py::gil_scoped_acquire gil;
    from("memswap._warn", "warn")("memswap: " + message);
  }

 private:
  static py::object of(Engine& engine) { return py::cast(engine.shared_from_this()); }
};

EnginePtr make_engine(std::optional<int64_t> prefetch_bytes, Schedule schedule) {
  return std::make_shared<Engine>(prefetch_bytes, schedule, std::make_unique<PythonHost>());
}

void bind_ledger(py::module_& module) {
  py::class_<Known, KnownPtr>(module, "Known");
  Bound<Ledger, std::shared_ptr<Ledger>>(module, "Ledger")
      .calls<&Ledger::keep, &Ledger::tell_once, &Ledger::reset>()
      .reads<&Ledger::kept, &Ledger::known_storages, &Ledger::counters, &Ledger::resident_bytes>()
      .def("offer", [](Ledger& self, int64_t nbytes) { self.counters.offer(nbytes); })
      .def("set_reserved", [](Ledger& self, int64_t bytes) { self.counters.set_reserved(bytes); });
}

void bind_windows(py::module_& module) {
  py::class_<Durations::Span>(module, "Span");
  Bound<Durations>(module, "Durations")
      .reads<&Durations::measuring>()
      .calls<&Durations::seconds, &Durations::start, &Durations::stop>();
  Bound<WindowQueue>(module, "WindowQueue")
      .calls<&WindowQueue::start_now, &WindowQueue::clear, &WindowQueue::reset_counts>()
      .reads<&WindowQueue::pending, &WindowQueue::pending_bytes, &WindowQueue::counts>()
      .writes<&WindowQueue::max_pending_bytes, &WindowQueue::leftovers_start>();
  Bound<Windows>(module, "Windows")
      .calls<&Windows::open, &Windows::enter, &Windows::leave, &Windows::end_forward,
             &Windows::begin_iteration, &Windows::bring>()
      .reads<&Windows::inside, &Windows::queue, &Windows::durations>()
      .writes<&Windows::is_current>();
}

void bind_recipes(py::module_& module) {
  module.attr("RECIPE_PROOFS") = Recipes::kProofs;
  Bound<ProvenRecipe>(module, "ProvenRecipe")
      .reads<&ProvenRecipe::words, &ProvenRecipe::seconds, &ProvenRecipe::made_nbytes,
             &ProvenRecipe::saved>();
  Bound<Recipes, std::shared_ptr<Recipes>>(module, "Recipes")
      .calls<&Recipes::begin_iteration, &Recipes::reset_runs, &Recipes::learnt>()
      .calls<&Recipes::before_edits>(without_gil())
      .reads<&Recipes::runs>()
      .def("enter", [](Recipes& recipes) { recipes.log().enter(); })
      .def("leave", [](Recipes& recipes) { recipes.log().leave(); })
      .def_property_readonly("known_storages", [](Recipes& r) { return r.log().size(); });
}

constexpr const char* kOnDemand = "on_demand";

// What is to be called when backward reaches a batch is an attribute of its object, where Python's
// collector sees it: it may own what owns the batch.
BatchPtr make_batch(EnginePtr engine, std::string name, IterationPtr iteration) {
  auto made = std::make_shared<Batch>(std::move(engine), std::move(name), std::move(iteration));
  made->on_demand = [batch = made.get()] {
    const py::gil_scoped_acquire gil;
    const py::object self = py::cast(batch->shared_from_this());
    const py::object reached = self.attr(kOnDemand);
    if (!reached.is_none()) {
      reached(self);
    }
  };
  return made;
}

void bind_batches(py::module_& module) {
  Bound<BatchLimits>(module, "BatchLimits")
      .writes<&BatchLimits::small_bytes, &BatchLimits::bucket_bytes>();
  py::native_enum<Batch::Phase>(module, "Phase", "enum.Enum")
      .value("COLLECTED", Batch::Phase::kCollected)
      .value("OFFLOADING", Batch::Phase::kOffloading)
      .value("OFFLOADED", Batch::Phase::kOffloaded)
      .value("LOADING", Batch::Phase::kLoading)
      .value("LOADED", Batch::Phase::kLoaded)
      .finalize();
  Bound<Batch, BatchPtr> batch(module, "Batch", py::dynamic_attr());
  batch.attr(kOnDemand) = py::none();
  batch
      .reads<&Batch::name, &Batch::iteration, &Batch::phase, &Batch::alive, &Batch::nbytes,
             &Batch::launched>()
      .calls<&Batch::launch_offload, &Batch::wait_offload, &Batch::wait_load, &Batch::close>()
      .def(py::init(&make_batch), "engine"_a.none(false), "name"_a, "iteration"_a.none(false))
      .def("__repr__", &Batch::described)
      .def("launch_load", &Batch::launch_load, "readings"_a = 1);
}

}  // namespace

void bind_engine(py::module_& module) {
  py::register_local_exception_translator(translate);
  bind_ledger(module);
  bind_windows(module);
  bind_recipes(module);
  py::class_<Lock>(module, "Lock").def("run", [](Lock& self, py::object work, py::args args) {
    const Locked locked(self);
    return work(*args);
  });
  py::native_enum<Schedule>(module, "Schedule", "enum.Enum")
      .value("ITERATIONS", Schedule::kIterations)
      .value("WINDOWS", Schedule::kWindows)
      .value("BATCHES", Schedule::kBatches)
      .finalize();
  Bound<Streak::Seen>(module, "StreakSeen")
      .reads<&Streak::Seen::forwards, &Streak::Seen::ended, &Streak::Seen::in_flight,
             &Streak::Seen::most_in_flight, &Streak::Seen::peak_bytes>();
  Bound<Planning>(module, "Planning")
      .calls<&Planning::set_directed, &Planning::set_plans_sources, &Planning::make_room,
             &Planning::count_recomputed, &Planning::sweep_in_use, &Planning::begin_streak,
             &Planning::extend_streak, &Planning::end_streak>()
      .reads<&Planning::directed>();
  Bound<Engine, EnginePtr>(module, "Engine")
      .calls<&Engine::set_policy, &Engine::open_recipes, &Engine::set_persistent,
             &Engine::next_iteration, &Engine::learn, &Engine::tell>()
      .reads<&Engine::schedule, &Engine::lock, &Engine::departing, &Engine::timeline,
             &Engine::planning, &Engine::iteration, &Engine::recipes, &Engine::batch_limits>()
      .def(py::init(&make_engine), "prefetch_bytes"_a, "schedule"_a = Schedule::kIterations)
      .def("is_persistent",
           [](const Engine& self, uintptr_t key) {
             return self.is_persistent(reinterpret_cast<const void*>(key));
           })
      .def("demand", &Engine::demand, "entry"_a.none(false))
      .def_property_readonly(
          "ledger",
          [](const EnginePtr& self) { return std::shared_ptr<Ledger>(self, &self->ledger); })
      .def_property_readonly("windows", [](const Engine& self) { return self.windows.get(); });
  bind_batches(module);
}

}  // namespace memswap
