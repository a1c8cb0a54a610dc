// Recipes, as Python sees them, and what an engine does for them. A recipe keeps what it reads by
// handles, like autograd, whose words these have for what was edited.
#include "engine/recipes.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "handle.h"
#include "python_type.h"
#include "storage/lend.h"
#include "storage/saved_view.h"
#include "storage_ref.h"

namespace memswap {
namespace py = pybind11;

namespace {

// An entry's storage for a look in passing: the entry stays as it is. The engine's lock is held.
StorageRefPtr looked_at(Entry& entry) {
  if (entry.storage) {
    return entry.storage;
  }
  if (StorageRefPtr storage = entry.identity().lock()) {
    return storage;
  }
  if (!entry.away() || !entry.gone(/*wait=*/true)) {
    throw TransferError("a tensor that a recipe reads is not there");
  }
  const AwayFormPtr away = entry.away();
  const auto recipe = std::dynamic_pointer_cast<RecipeForm>(away);
  Returning back = recipe ? recipe->look() : away->bring();
  if (back.arrival) {
    back.arrival->wait();
  }
  return std::move(back.storage);
}

at::Tensor unpacked(const py::object& handle) {
  static PyObject* const unpack = interned("unpack");
  return THPVariable_Unpack(call_method(handle.ptr(), unpack).ptr());
}

// What a recipe keeps: a handle of a storage that waits elsewhere.
class HandleSource final : public Source {
 public:
  HandleSource(py::object handle, EntryPtr entry, KnownTensor tensor)
      : handle_(std::move(handle)), entry_(std::move(entry)), tensor_(std::move(tensor)) {}
  HandleSource(const HandleSource&) = delete;
  HandleSource& operator=(const HandleSource&) = delete;

  ~HandleSource() override {
    if (Py_IsInitialized() != 0) {
      const py::gil_scoped_acquire gil;
      entry_.reset();
      handle_ = {};
    } else {
      handle_.release();
    }
  }

  at::Tensor tensor() override {
    const py::gil_scoped_acquire gil;
    return unpacked(handle_);
  }

  at::Tensor look() override {
    const py::gil_scoped_acquire gil;
    const Locked locked(entry_->engine()->lock);
    // Who looks may be about to edit the tensor: after its bytes have been read.
    if (const TicketPtr departure = entry_->departure()) {
      try {
        departure->wait();
      } catch (const TransferError&) {
        // The entry notices a send that failed, and has the bytes then.
      }
    }
    return tensor_.view.rebuild(*looked_at(*entry_), false);
  }

 private:
  py::object handle_;
  EntryPtr entry_;  // that the handle shares
  const KnownTensor tensor_;
};

// A tensor that stays, and nobody's business but its handle's.
class TensorSource final : public Source {
 public:
  TensorSource(py::object handle, at::Tensor tensor)
      : handle_(std::move(handle)), tensor_(std::move(tensor)) {}
  TensorSource(const TensorSource&) = delete;
  TensorSource& operator=(const TensorSource&) = delete;

  ~TensorSource() override {
    if (Py_IsInitialized() != 0) {
      const py::gil_scoped_acquire gil;
      handle_ = {};
    } else {
      handle_.release();
    }
  }

  at::Tensor tensor() override {
    const py::gil_scoped_acquire gil;
    return unpacked(handle_);
  }

  at::Tensor look() override { return tensor_; }

 private:
  py::object handle_;
  const at::Tensor tensor_;
};

py::object wrapped(const at::Tensor& tensor) {
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
}

// An engine, whose object in Python owns the recipes that this serves.
class EngineHost final : public RecipeHost {
 public:
  explicit EngineHost(std::weak_ptr<Engine> engine) : engine_(std::move(engine)) {}

  Standing standing(const KnownTensor& tensor) override {
    const EnginePtr of = engine();
    const SavedView& view = tensor.view;
    const bool alive = !tensor.storage.expired();
    if (view.of_leaf() || of->persistent.contains(view.storage_key())) {
      return alive && is_there_to_stay(*of, tensor) ? Standing::kPersistent : Standing::kUnknown;
    }
    if (const KnownPtr known = saved(*of, view); known && (moved_entry(known) || alive)) {
      return Standing::kSaved;
    }
    const bool small = static_cast<int64_t>(view.storage_nbytes()) < of->policy.min_bytes;
    return small && alive && view.computed() ? Standing::kSmall : Standing::kUnknown;
  }

  int depth(const KnownTensor& tensor) override {
    const EntryPtr entry = moved_entry(saved(*engine(), tensor.view));
    const auto form = entry ? std::dynamic_pointer_cast<RecipeForm>(entry->away()) : nullptr;
    return form ? form->step().depth : 0;
  }

  std::optional<size_t> index_of(const KnownTensor& tensor) override {
    const KnownPtr known = saved(*engine(), tensor.view);
    return known && known->is_entry() ? std::optional(static_cast<Entry&>(*known).index)
                                      : std::nullopt;
  }

  SourcePtr keep(const KnownTensor& tensor, Standing standing) override {
    if (standing == Standing::kUnknown) {
      return nullptr;
    }
    const EnginePtr of = engine();
    const py::object owner = py::cast(of);
    KnownPtr known = standing == Standing::kSaved ? saved(*of, tensor.view) : nullptr;
    if (EntryPtr entry = moved_entry(known)) {
      py::object handle = moved_handle(entry, tensor.view, owner.ptr(), Py_None);
      return std::make_shared<HandleSource>(std::move(handle), std::move(entry), tensor);
    }
    const at::Tensor held = tensor.lock();
    if (!held.defined()) {
      return nullptr;
    }
    return std::make_shared<TensorSource>(
        kept_handle(wrapped(held).ptr(), std::move(known), owner.ptr()), held);
  }

  bool can_save(const KnownTensor& tensor) override {
    return !tensor.storage.expired() && could_save(tensor);
  }

  bool could_save(const KnownTensor& tensor) override {
    const auto nbytes = static_cast<int64_t>(tensor.view.storage_nbytes());
    return scope_ && tensor.view.computed() && nbytes >= engine()->policy.min_bytes;
  }

  SourcePtr save(const KnownTensor& tensor) override {
    const at::Tensor held = tensor.lock();
    if (!held.defined() || !scope_) {
      return nullptr;
    }
    py::object handle = scope_.attr("save")(wrapped(held), tensor.view);
    if (EntryPtr entry = moved_entry(saved(*engine(), tensor.view))) {
      return std::make_shared<HandleSource>(std::move(handle), std::move(entry), tensor);
    }
    return std::make_shared<TensorSource>(std::move(handle), held);
  }

  // For its lifetime, what is saved for a recipe is saved where its result is: by that scope.
  class Saving {
   public:
    Saving(EngineHost& host, const py::object& scope)
        : host_(host), before_(std::exchange(host.scope_, scope)) {}
    Saving(const Saving&) = delete;
    Saving& operator=(const Saving&) = delete;
    ~Saving() { host_.scope_ = std::move(before_); }

   private:
    EngineHost& host_;
    py::object before_;
  };

  at::Tensor look(const KnownTensor& tensor) override {
    if (at::Tensor held = tensor.lock(); held.defined()) {
      return held;
    }
    const py::gil_scoped_acquire gil;
    const EnginePtr of = engine();
    const Locked locked(of->lock);
    const KnownPtr known = saved(*of, tensor.view);
    if (!known || !known->is_entry()) {
      throw TransferError("a tensor that a recipe reads is gone: " + tensor.view.describe());
    }
    return tensor.view.rebuild(*looked_at(static_cast<Entry&>(*known)), false);
  }

  void serialise(const std::function<void()>& work) override {
    const py::gil_scoped_acquire gil;
    const EnginePtr of = engine();
    const Locked locked(of->lock);
    work();
  }

 private:
  EnginePtr engine() const {
    EnginePtr alive = engine_.lock();
    if (!alive) {
      throw TransferError("the engine of a recipe is gone");
    }
    return alive;
  }

  // [Note: Parameters whose memory comes and goes]
  // Weights that are gathered for one unit's forward and again for its backward are leaves, and
  // have the same storage and version then; in between there may be no memory under them, or memory
  // that is being filled, or the weights of after an optimizer's step. Lent memory says that it is
  // that (lend.h). Of others' the model's own parameters are the shards, and what is gathered is
  // none of them; but for the unit with which an iteration begins, which may be gathered by then:
  // there a proof and each demand look whether the memory is there.
  static bool is_there_to_stay(const Engine& of, const KnownTensor& tensor) {
    const auto storage = tensor.storage.lock();
    return storage && owns_memory(*storage, tensor.view.end()) &&
           (of.persistent.empty() || of.persistent.contains(tensor.key()));
  }

  // Who stands for what autograd has saved in this forward; nullptr: it has not.
  static KnownPtr saved(Engine& of, const SavedView& view) {
    KnownPtr known = of.ledger.find(view).known;
    if (known && known->is_entry() && static_cast<Entry&>(*known).iteration != of.iteration) {
      return nullptr;
    }
    return known;
  }

  // The entry whose bytes wait elsewhere, or which holds the storage itself; nullptr: none does.
  static EntryPtr moved_entry(const KnownPtr& known) {
    if (!known || !known->is_entry()) {
      return nullptr;
    }
    auto entry = std::static_pointer_cast<Entry>(known);
    return entry->away() || entry->storage ? entry : nullptr;
  }

  const std::weak_ptr<Engine> engine_;
  py::object scope_;  // that saves now
};

std::shared_ptr<Recipes> new_recipes(const EnginePtr& engine, const std::vector<std::string>& more,
                                     int proofs) {
  return std::make_shared<Recipes>(OperatorRules(more), std::make_unique<EngineHost>(engine),
                                   Recipes::Options{.proofs = proofs});
}

py::object offer(Recipes& recipes, const StorageRefPtr& storage, const SavedView& look,
                 const py::object& scope, c10::ScalarType dtype, double most_extra, bool leaves) {
  const EngineHost::Saving saving(static_cast<EngineHost&>(recipes.host()), scope);
  Recipes::Answer answer = recipes.offer(some(storage), look,
                                         {.unit = scope.attr("unit").cast<std::string>(),
                                          .number = scope.attr("packs").cast<int64_t>(),
                                          .nbytes = static_cast<int64_t>(look.storage_nbytes()),
                                          .dtype = dtype},
                                         most_extra, leaves);
  if (answer.leaving) {
    return py::make_tuple(std::move(answer.leaving->away), std::move(answer.leaving->departure));
  }
  if (answer.proven) {
    return py::cast(std::move(*answer.proven));
  }
  return answer.trial ? py::cast(std::move(answer.trial)) : py::none();
}

py::list learnt(const Recipes& recipes) {
  py::list rows;
  for (const auto& [place, known] : recipes.learnt()) {
    rows.append(py::make_tuple(place.unit, place.number, place.nbytes, known.words, known.proofs,
                               known.failed));
  }
  return rows;
}

}  // namespace

void bind_recipes(py::module_& module) {
  py::class_<RecipeForm, AwayForm, std::shared_ptr<RecipeForm>>(module, "RecipeForm",
                                                                "An operator, run again.")
      .def_property_readonly("words", [](const RecipeForm& form) { return words_of(form.step()); });
  py::class_<Trial, std::shared_ptr<Trial>>(module, "Trial",
                                            "A recipe that is being proven (recipes.h).");
  py::class_<Recipes::Proven>(module, "ProvenRecipe", "A recipe that a plan may count on.")
      .def_readonly("words", &Recipes::Proven::words)
      .def_readonly("seconds", &Recipes::Proven::seconds)
      .def_readonly("saved", &Recipes::Proven::saved);
  py::class_<Recipes, std::shared_ptr<Recipes>>(module, "Recipes",
                                                "The recipes of one engine (recipes.h).")
      .def(py::init(&new_recipes), py::arg("engine").none(false), py::arg("operators"),
           py::arg("proofs"))
      .def(
          "enter", [](Recipes& recipes) { recipes.log().enter(); },
          "From now on the calling thread's operators are known.")
      .def("leave", [](Recipes& recipes) { recipes.log().leave(); })
      .def(
          "before_edits",
          [](Recipes& recipes, const std::vector<at::Tensor>& tensors) {
            const py::gil_scoped_release without_gil;
            for (const at::Tensor& tensor : tensors) {
              if (tensor.defined() && tensor.has_storage()) {
                recipes.log().before_edit(tensor);
              }
            }
          },
          py::arg("tensors"), "These are about to be edited, by nobody whose operators are known.")
      .def("begin_iteration", &Recipes::begin_iteration, "A new forward.")
      .def("offer", &offer, py::arg("storage"), py::arg("view"), py::arg("scope"), py::arg("dtype"),
           py::arg("most_extra"), py::arg("leaves") = true,
           "A storage is about to leave: the away form and the ticket; or a Trial for its entry, "
           "which then leaves in another form; or None. Where `leaves` is false, a ProvenRecipe "
           "instead of a form.")
      .def("learnt", &learnt,
           "(unit, number, bytes, words, proofs, failed) of each place, in no order.")
      .def("reset_counts", &Recipes::reset_counts, "Count anew.")
      .def_property_readonly("storages",
                             [](const Recipes& r) { return r.counts().storages.load(); })
      .def_property_readonly("nbytes", [](const Recipes& r) { return r.counts().nbytes.load(); })
      .def_property_readonly("runs", [](const Recipes& r) { return r.counts().runs.load(); })
      .def_property_readonly("known_storages", [](Recipes& r) { return r.log().size(); });
  module.attr("RECIPE_PROOFS") = Recipes::kProofs;
}

}  // namespace memswap
