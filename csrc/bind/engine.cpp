// Engine, and what belongs to one: its ledger, windows, recipes and batches.
#include "engine/engine.h"

#include <vector>

#include "bind.h"
#include "engine/batch.h"
#include "engine/recipe_host.h"
#include "engine/saved_tensor.h"
#include "engine/windows.h"

namespace memswap {

template <>
inline constexpr std::tuple kMembers<Ledger::Kept>{&Ledger::Kept::tensors, &Ledger::Kept::nbytes};

static py::object fields_of(const Counters& all) {
  return with_attributes(
      "offered_tensors"_a = all.offered_tensors, "offered_bytes"_a = all.offered_bytes,
      "deduplicated_tensors"_a = all.deduplicated_tensors,
      "deduplicated_bytes"_a = all.deduplicated_bytes, "moved_storages"_a = all.moved_storages,
      "moved_bytes"_a = all.moved_bytes, "recipe_storages"_a = all.recipe_storages,
      "recipe_bytes"_a = all.recipe_bytes, "encoded_storages"_a = all.encoded_storages,
      "encoded_bytes"_a = all.encoded_bytes, "frame_bytes"_a = all.frame_bytes,
      "returned_storages"_a = all.returned_storages, "returned_bytes"_a = all.returned_bytes,
      "freed_bytes"_a = all.freed_bytes, "stalls"_a = all.stalls,
      "exposed_wait_s"_a = all.exposed_wait_s, "resident_bytes"_a = all.resident_bytes,
      "peak_resident_bytes"_a = all.peak_resident_bytes, "away_bytes"_a = all.away_bytes,
      "peak_away_bytes"_a = all.peak_away_bytes);
}

namespace {

// Warns at the line of the user's that led here.
void warn(const std::string& message) {
  const py::gil_scoped_acquire gil;
  from("memswap._warn", "warn")("memswap: " + message);
}

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
    return of(engine)
        .attr("decide")(offer.tensor, offer.unit, offer.look.nbytes(), offer.look.storage_nbytes())
        .cast<std::optional<Action>>();
  }
  std::optional<Action> direct(Engine& engine, const Offer& offer, Action action) override {
    return of(engine)
        .attr("director")
        .attr("choose")(offer.tensor, offer.unit, offer.ordinal, offer.look.storage_nbytes(),
                        action, offer.action.has_value())
        .cast<std::optional<Action>>();
  }
  TransfersPtr open(Engine& engine, c10::Device device) override {
    return of(engine).attr("open")(device).cast<TransfersPtr>();
  }
  void begin_iteration(Engine& engine) override { of(engine).attr("begin_iteration")(); }
  void open_recipes(Engine& engine) override { of(engine).attr("open_recipes")(); }

 private:
  static py::object of(Engine& engine) { return py::cast(engine.shared_from_this()); }
};

EnginePtr make_engine(std::optional<int64_t> window_bytes, Schedule schedule) {
  auto engine = std::make_shared<Engine>(window_bytes, schedule);
  engine->ledger.warn = warn;
  engine->host = std::make_unique<PythonHost>();
  return engine;
}

void bind_ledger(py::module_& module) {
  py::class_<Known, KnownPtr>(module, "Known");
  py::class_<Stay, Known, std::shared_ptr<Stay>>(module, "Stay");
  py::class_<Ledger, std::shared_ptr<Ledger>>(module, "Ledger")
      .def("offer", [](Ledger& self, int64_t nbytes) { self.counters.offer(nbytes); })
      .def("keep", &Ledger::keep, "reason"_a, "nbytes"_a)
      .def("tell_once", &Ledger::tell_once, "reason"_a, "message"_a)
      .def("set_reserved", [](Ledger& self, int64_t nbytes) { self.counters.set_reserved(nbytes); })
      .def("reset", &Ledger::reset)
      .def_property_readonly("kept", &Ledger::kept)
      .def_property_readonly("known_storages", &Ledger::known_storages)
      .def_readonly("counters", &Ledger::counters);
}

py::dict counts_of(const Windows& self) {
  const WindowCounts& all = self.queue.counts;
  return py::dict(
      "windows"_a = all.windows, "window_s"_a = all.window_s,
      "encoded_in_windows"_a = all.encoded_in_windows, "encoded_bytes"_a = all.encoded_bytes,
      "started_at_bound"_a = all.started_at_bound, "started_at_end"_a = all.started_at_end,
      "kept_storages"_a = all.kept_storages, "kept_bytes"_a = all.kept_bytes,
      "decoded_in_windows"_a = all.decoded_in_windows, "decoded_ahead"_a = all.decoded_ahead,
      "pending_bytes"_a = self.queue.pending_bytes());
}

void bind_windows(py::module_& module) {
  py::class_<Durations::Span>(module, "Span");
  py::class_<Durations>(module, "Durations")
      .def_property_readonly("measuring", &Durations::measuring)
      .def("seconds", &Durations::seconds, "key"_a, "amount"_a)
      .def("start", &Durations::start, "key"_a, "amount"_a, "device"_a)
      .def("stop", &Durations::stop, "span"_a);
  py::class_<Windows, std::shared_ptr<Windows>>(module, "Windows")
      .def("set_options",
           [](Windows& self, std::optional<int64_t> max_pending_bytes, bool leftovers_start) {
             self.queue.max_pending_bytes = max_pending_bytes;
             self.queue.leftovers_start = leftovers_start;
           })
      .def("open", &Windows::open, "seconds"_a)
      .def("enter", &Windows::enter, "seconds"_a)
      .def("leave", &Windows::leave)
      .def_property_readonly("inside", &Windows::inside)
      .def("end_forward", &Windows::end_forward)
      .def("begin_iteration", &Windows::begin_iteration)
      .def("start_now",
           [](Windows& self, const std::vector<EntryPtr>& all) { self.queue.start_now(all); })
      .def("bring", &Windows::bring, "entries"_a)
      .def("clear", [](Windows& self) { self.queue.clear(); })
      .def_property_readonly("pending", [](const Windows& self) { return self.queue.pending(); })
      .def_property_readonly("counts", &counts_of)
      .def("reset_counts", [](Windows& self) { self.queue.counts = {}; })
      .def_readwrite("is_current", &Windows::is_current)
      .def_readwrite("captures", &Windows::captures)
      .def_readonly("durations", &Windows::durations);
}

py::list learnt(const Recipes& recipes) {
  py::list rows;
  for (const auto& [place, known] : recipes.learnt()) {
    rows.append(py::make_tuple(place.unit, place.number, place.nbytes, known.words, known.proofs,
                               known.failed));
  }
  return rows;
}

void bind_recipes(py::module_& module) {
  module.attr("RECIPE_PROOFS") = Recipes::kProofs;
  py::class_<ProvenRecipe>(module, "ProvenRecipe")
      .def_readonly("words", &ProvenRecipe::words)
      .def_readonly("seconds", &ProvenRecipe::seconds)
      .def_readonly("made_nbytes", &ProvenRecipe::made_nbytes)
      .def_readonly("saved", &ProvenRecipe::saved);
  py::class_<Recipes, std::shared_ptr<Recipes>>(module, "Recipes")
      .def(py::init([](const EnginePtr& engine, const std::vector<std::string>& more, int proofs) {
             return std::make_shared<Recipes>(OperatorRules(more),
                                              std::make_unique<EngineRecipeHost>(engine),
                                              Recipes::Options{.proofs = proofs});
           }),
           "engine"_a.none(false), "operators"_a, "proofs"_a)
      .def("enter", [](Recipes& recipes) { recipes.log().enter(); })
      .def("leave", [](Recipes& recipes) { recipes.log().leave(); })
      .def("before_edits", &Recipes::before_edits, "tensors"_a, without_gil())
      .def("begin_iteration", &Recipes::begin_iteration)
      .def("learnt", &learnt)
      .def("reset_runs", &Recipes::reset_runs)
      .def_property_readonly("runs", &Recipes::runs)
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
  module.attr("SMALL_BYTES") = BatchLimits{}.small_bytes;
  module.attr("BUCKET_BYTES") = BatchLimits{}.bucket_bytes;
  py::native_enum<Batch::Phase>(module, "Phase", "enum.Enum")
      .value("COLLECTED", Batch::Phase::kCollected)
      .value("OFFLOADING", Batch::Phase::kOffloading)
      .value("OFFLOADED", Batch::Phase::kOffloaded)
      .value("LOADING", Batch::Phase::kLoading)
      .value("LOADED", Batch::Phase::kLoaded)
      .finalize();
  py::class_<Batch, BatchPtr> batch(module, "Batch", py::dynamic_attr());
  batch.attr(kOnDemand) = py::none();
  batch.def(py::init(&make_batch), "engine"_a.none(false), "name"_a, "iteration"_a.none(false))
      .def("__repr__", &Batch::described)
      .def_readonly("name", &Batch::name)
      .def_readonly("iteration", &Batch::iteration)
      .def_property_readonly("phase", &Batch::phase)
      .def_property_readonly("alive", &Batch::alive)
      .def_property_readonly(
          "launched", [](const Batch& self) { return self.phase() != Batch::Phase::kCollected; })
      .def_property_readonly("nbytes", &Batch::nbytes)
      .def("launch_offload", &Batch::launch_offload)
      .def("wait_offload", &Batch::wait_offload)
      .def("launch_load", &Batch::launch_load, "readings"_a = 1)
      .def("wait_load", &Batch::wait_load)
      .def("close", &Batch::close);
}

}  // namespace

void bind_engine(py::module_& module) {
  py::register_local_exception_translator(translate);
  bind_ledger(module);
  bind_windows(module);
  bind_recipes(module);
  py::class_<Lock>(module, "Lock")
      .def(py::init<>())
      .def("__enter__", &Lock::lock)
      .def("__exit__", [](Lock& lock, const py::args&) { lock.unlock(); });
  py::native_enum<Schedule>(module, "Schedule", "enum.Enum")
      .value("ITERATIONS", Schedule::kIterations)
      .value("WINDOWS", Schedule::kWindows)
      .value("BATCHES", Schedule::kBatches)
      .finalize();
  py::class_<Engine, EnginePtr>(module, "Engine")
      .def(py::init(&make_engine), "window_bytes"_a, "schedule"_a = Schedule::kIterations)
      .def("set_policy",
           [](Engine& engine, int64_t min_bytes, std::optional<Action> action, bool asks,
              bool recipes) { engine.policy = {min_bytes, action, asks, recipes}; })
      .def("set_batch_limits",
           [](Engine& engine, int64_t small_bytes, int64_t bucket_bytes) {
             engine.batch_limits = {small_bytes, bucket_bytes};
           })
      .def("set_persistent", &Engine::set_persistent, "tensors"_a)
      .def("is_persistent",
           [](const Engine& self, uintptr_t key) {
             return self.persistent.contains(reinterpret_cast<const void*>(key));
           })
      .def("learn", &Engine::learn)
      .def("demand", &Engine::demand, "entry"_a.none(false))
      .def("make_room", &Engine::make_room, "iteration"_a, "index"_a)
      .def_static("look_at_released", &Engine::look_at_released, "iteration"_a)
      .def("count_recomputed", &Engine::count_recomputed, "storage"_a)
      .def("sweep_recomputed", [](Engine& self) { self.recomputed.sweep(); })
      .def("clear_recomputed", [](Engine& self) { self.recomputed.clear(); })
      .def_readonly("schedule", &Engine::schedule)
      .def_property_readonly(
          "windows",
          [](const EnginePtr& self) { return std::shared_ptr<Windows>(self, self->windows.get()); })
      .def_property_readonly(
          "ledger",
          [](const EnginePtr& self) { return std::shared_ptr<Ledger>(self, &self->ledger); })
      .def_readonly("lock", &Engine::lock)
      .def_readonly("departing", &Engine::departing)
      .def_readonly("timeline", &Engine::timeline)
      .def_readonly("backward", &Engine::backward)
      .def_readwrite("iteration", &Engine::iteration)
      .def_readwrite("directed", &Engine::directed)
      .def_readwrite("plans_sources", &Engine::plans_sources)
      .def_readwrite("recipes", &Engine::recipes);
  bind_batches(module);
}

}  // namespace memswap
