// Recipes, as Python sees them, and what a saver does for them.
#include "engine/recipes.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "calls.h"
#include "entry.h"
#include "handle.h"
#include "ledger.h"
#include "python_type.h"
#include "save.h"
#include "saver.h"
#include "storage/saved_view.h"
#include "storage_ref.h"
#include "view.h"
#include "visit.h"

namespace memswap {
namespace py = pybind11;

namespace {

// An entry's storage for a look in passing: the entry stays as it is. The saver's lock is held.
StorageRefPtr looked_at(EntryObject* entry) {
  if (entry->storage) {
    return entry->storage;
  }
  if (StorageRefPtr storage = entry->identity->lock()) {
    return storage;
  }
  if (!entry->away || !gone(entry, /*wait=*/true)) {
    throw TransferError("a tensor that a recipe reads is not there");
  }
  const AwayFormPtr away = entry->away;
  const auto recipe = std::dynamic_pointer_cast<RecipeForm>(away);
  Returning back = recipe ? recipe->look() : away->bring();
  if (back.arrival) {
    back.arrival->wait();
  }
  return std::move(back.storage);
}

// What a recipe keeps: a handle of a saver's, of a storage that waits elsewhere or of a tensor that
// stays.
class HandleSource final : public Source {
 public:
  HandleSource(SaverObject* saver, py::object handle, py::object entry, KnownTensor tensor)
      : saver_(saver),
        handle_(std::move(handle)),
        entry_(std::move(entry)),
        tensor_(std::move(tensor)) {}
  HandleSource(const HandleSource&) = delete;
  HandleSource& operator=(const HandleSource&) = delete;

  ~HandleSource() override {
    if (Py_IsInitialized() != 0) {
      const py::gil_scoped_acquire gil;
      handle_ = {};
      entry_ = {};
    } else {
      handle_.release();
      entry_.release();
    }
  }

  at::Tensor tensor() override {
    const py::gil_scoped_acquire gil;
    static PyObject* const unpack = interned("unpack");
    const py::object tensor = owned(PyObject_CallMethodNoArgs(handle_.ptr(), unpack));
    return THPVariable_Unpack(tensor.ptr());
  }

  at::Tensor look() override {
    const py::gil_scoped_acquire gil;
    const Locked locked(saver_->lock);  // alive: the entry owns its saver
    // Who looks may be about to edit the tensor: after its bytes have been read.
    if (const TicketPtr departure = entry_of(entry_.ptr())->departure) {
      try {
        departure->wait();
      } catch (const TransferError&) {
        // The entry notices a send that failed, and has the bytes then.
      }
    }
    return tensor_.view.rebuild(*looked_at(entry_of(entry_.ptr())), false);
  }

 private:
  SaverObject* const saver_;
  py::object handle_;
  py::object entry_;  // that the handle owns
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
    static PyObject* const unpack = interned("unpack");
    const py::object tensor = owned(PyObject_CallMethodNoArgs(handle_.ptr(), unpack));
    return THPVariable_Unpack(tensor.ptr());
  }

  at::Tensor look() override { return tensor_; }

 private:
  py::object handle_;
  const at::Tensor tensor_;
};

// A saver, which owns the recipes that this serves.
class SaverHost final : public RecipeHost {
 public:
  explicit SaverHost(SaverObject* saver) : saver_(saver) {}

  Standing standing(const KnownTensor& tensor) override {
    const SavedView& view = tensor.view;
    const bool alive = !tensor.storage.expired();
    if (persists(view)) {
      return alive ? Standing::kPersistent : Standing::kUnknown;
    }
    const py::object known = saved(view);
    if (known && (is_away(known.ptr()) || alive)) {
      return Standing::kSaved;
    }
    const bool small = static_cast<int64_t>(view.storage_nbytes()) < saver_->table->min_bytes;
    return small && alive && view.computed() ? Standing::kSmall : Standing::kUnknown;
  }

  SourcePtr keep(const KnownTensor& tensor, Standing standing) override {
    if (standing == Standing::kUnknown) {
      return nullptr;
    }
    py::object known = standing == Standing::kSaved ? saved(tensor.view) : py::object();
    if (known && is_away(known.ptr())) {
      py::object handle = moved(known.ptr(), view_object(tensor.view).ptr());
      return std::make_shared<HandleSource>(saver_, std::move(handle), std::move(known), tensor);
    }
    const at::Tensor held = tensor.lock();
    if (!held.defined()) {
      return nullptr;
    }
    const auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(held));
    return std::make_shared<TensorSource>(kept(object.ptr(), known ? known.ptr() : Py_None), held);
  }

  bool can_save(const KnownTensor& tensor) override {
    const auto nbytes = static_cast<int64_t>(tensor.view.storage_nbytes());
    return visit_ && tensor.view.computed() && !tensor.storage.expired() &&
           nbytes >= saver_->table->min_bytes;
  }

  SourcePtr save(const KnownTensor& tensor) override {
    const at::Tensor held = tensor.lock();
    if (!held.defined() || !visit_) {
      return nullptr;
    }
    const auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(held));
    const py::object view = view_object(tensor.view);
    py::object handle =
        memswap::save(saver_, object.ptr(), view.ptr(), place_of_visit(visit_.ptr()));
    const py::object known = saved(tensor.view);
    if (known && is_away(known.ptr())) {
      return std::make_shared<HandleSource>(saver_, std::move(handle), known, tensor);
    }
    return std::make_shared<TensorSource>(std::move(handle), held);
  }

  // For its lifetime, what is saved for a recipe is saved where its result is: by that visit.
  class Saving {
   public:
    Saving(SaverHost& host, const py::object& visit)
        : host_(host), before_(std::exchange(host.visit_, visit)) {}
    Saving(const Saving&) = delete;
    Saving& operator=(const Saving&) = delete;
    ~Saving() { host_.visit_ = std::move(before_); }

   private:
    SaverHost& host_;
    py::object before_;
  };

  at::Tensor look(const KnownTensor& tensor) override {
    if (at::Tensor held = tensor.lock(); held.defined()) {
      return held;
    }
    const py::gil_scoped_acquire gil;
    const Locked locked(saver_->lock);
    const py::object known = saved(tensor.view);
    if (!known || !is_entry(known.ptr())) {
      throw TransferError("a tensor that a recipe reads is gone: " + tensor.view.describe());
    }
    return tensor.view.rebuild(*looked_at(entry_of(known.ptr())), false);
  }

  void serialise(const std::function<void()>& work) override {
    const py::gil_scoped_acquire gil;
    const auto alive = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(saver_));
    const Locked locked(saver_->lock);
    work();
  }

 private:
  bool persists(const SavedView& view) const {
    if (view.of_leaf()) {
      return true;
    }
    if (!PyDict_Check(saver_->persistent) || PyDict_GET_SIZE(saver_->persistent) == 0) {
      return false;
    }
    const py::object key = owned(PyLong_FromVoidPtr(const_cast<void*>(view.storage_key())));
    return PyDict_Contains(saver_->persistent, key.ptr()) == 1;
  }

  // The entry or stay of what autograd has saved in this forward; empty: it has not.
  py::object saved(const SavedView& view) const {
    py::object known = find(reinterpret_cast<LedgerObject*>(saver_->ledger), view);
    if (known.is_none() || known.ptr() == Py_False) {
      return {};
    }
    if (is_entry(known.ptr()) && entry_of(known.ptr())->passage != saver_->passage) {
      return {};
    }
    return known;
  }

  // Whether the bytes of an entry wait elsewhere, or it holds the storage itself.
  static bool is_away(PyObject* known) {
    return is_entry(known) && (entry_of(known)->away || entry_of(known)->storage);
  }

  SaverObject* const saver_;
  py::object visit_;  // that saves now
};

std::shared_ptr<Recipes> new_recipes(const py::object& saver, const std::vector<std::string>& more,
                                     int proofs) {
  SaverObject* const owner = saver_object(saver.ptr());
  if (owner == nullptr) {
    throw py::type_error("Recipes needs a Saver");
  }
  return std::make_shared<Recipes>(OperatorRules(more), std::make_unique<SaverHost>(owner),
                                   Recipes::Options{.proofs = proofs});
}

py::object offer(Recipes& recipes, const StorageRefPtr& storage, const py::object& view,
                 const py::object& visit, const py::object& dtype, double most_extra) {
  const SavedView* const look = saved_view_of(view.ptr());
  if (look == nullptr) {
    throw py::error_already_set();
  }
  if (!storage) {
    throw py::type_error("expected a StorageRef, found None");
  }
  if (!THPDtype_Check(dtype.ptr())) {
    throw py::type_error("expected a torch.dtype");
  }
  const SaverHost::Saving saving(static_cast<SaverHost&>(recipes.host()), visit);
  Recipes::Answer answer =
      recipes.offer(storage, *look,
                    {.unit = visit.attr("unit").cast<std::string>(),
                     .number = visit.attr("packs").cast<int64_t>(),
                     .nbytes = static_cast<int64_t>(look->storage_nbytes()),
                     .dtype = reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type},
                    most_extra);
  if (answer.leaving) {
    return py::make_tuple(std::move(answer.leaving->away), std::move(answer.leaving->departure));
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
  py::class_<Recipes, std::shared_ptr<Recipes>>(module, "Recipes",
                                                "The recipes of one saver (recipes.h).")
      .def(py::init(&new_recipes), py::arg("saver"), py::arg("operators"), py::arg("proofs"))
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
      .def("offer", &offer, py::arg("storage"), py::arg("view"), py::arg("visit"), py::arg("dtype"),
           py::arg("most_extra"),
           "A storage is about to leave: the away form and the ticket; or a Trial for its entry, "
           "which then leaves in another form; or None.")
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
