// What handles are made of, as Python sees it: Moved, the handle of a save whose storage leaves,
// Kept, that of a save whose tensor stays, and Stay, a storage that stays for good.
#include "handle.h"

#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <cstddef>
#include <string>

#include "calls.h"
#include "entry.h"
#include "ledger.h"
#include "python_type.h"
#include "saver.h"
#include "storage/saved_view.h"
#include "storage/storage.h"
#include "storage_ref.h"

namespace memswap {
namespace py = pybind11;

namespace {

// Set once, by bind_handle.
struct Names {
  PyObject *demand, *demand_kept, *detach, *unpack;
} names;
PyTypeObject* moved_type = nullptr;

// --- Moved --------------------------------------------------------------------------------------

struct MovedObject {
  PyObject_HEAD PyObject* entry;  // an EntryObject
  PyObject* view;                 // a SavedView
};

MovedObject* moved_of(PyObject* self) { return reinterpret_cast<MovedObject*>(self); }

PyObject* new_moved(PyTypeObject* type, PyObject* entry, PyObject* view) {
  EntryObject* const known = entry_object(entry);
  if (known == nullptr || saved_view_of(view) == nullptr) {
    return nullptr;
  }
  PyObject* const self = type->tp_alloc(type, 0);
  if (self != nullptr) {
    moved_of(self)->entry = Py_NewRef(entry);
    moved_of(self)->view = Py_NewRef(view);
    ++known->handles;
  }
  return self;
}

// More arguments are a derived class's.
PyObject* make_moved(PyTypeObject* type, PyObject* args, PyObject*) {
  if (PyTuple_GET_SIZE(args) < 2) {
    PyErr_SetString(PyExc_TypeError, "Moved needs an entry and a view");
    return nullptr;
  }
  return new_moved(type, PyTuple_GET_ITEM(args, 0), PyTuple_GET_ITEM(args, 1));
}

StorageRefPtr demanded(PyObject* entry) {
  PyObject* const owner = entry_of(entry)->saver;
  if (SaverObject* const saver = saver_object(owner)) {
    const auto alive = py::reinterpret_borrow<py::object>(owner);
    return demand(saver, entry);
  }
  return expect_storage(owned(PyObject_CallMethodOneArg(owner, names.demand, entry)).ptr());
}

// What is rare about handles stands in Python.
py::object in_python(const char* name) {
  return py::module_::import("memswap.engine.handle").attr(name);
}

[[noreturn]] void raise(const py::object& error) {
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  throw py::error_already_set();
}

[[noreturn]] void raise_edited(const SavedView& view, uint32_t found) {
  raise(in_python("inplace_edit")(view.describe(), found, view.version()));
}

PyObject* unpack(PyObject* self, PyObject*) {
  return guarded<PyObject*>(nullptr, [&] {
    const auto alive = py::reinterpret_borrow<py::object>(self);  // whatever other threads drop
    PyObject* const held = moved_of(self)->entry;
    EntryObject* const entry = entry_of(held);
    const SavedView& view = *saved_view_of(moved_of(self)->view);
    if (view.edited()) {
      raise_edited(view, view.current_version());
    }
    const StorageRefPtr storage = demanded(held);
    if (entry->fetched && storage->version.current_version() != 0) {
      raise_edited(view, view.version() + 1);
    }
    return THPVariable_Wrap(view.rebuild(*storage, !entry->fetched));
  });
}

int traverse_moved(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(moved_of(self)->entry);
  Py_VISIT(moved_of(self)->view);
  Py_VISIT(Py_TYPE(self));
  return 0;
}

void dealloc_moved(PyObject* self) {
  PyObject_GC_UnTrack(self);
  Py_CLEAR(moved_of(self)->entry);
  Py_CLEAR(moved_of(self)->view);
  free_instance(self);
}

// The unpack hook of every saver: a handle of another kind says itself what it stands for.
PyObject* unpack_handle(PyObject*, PyObject* handle) {
  return Py_IS_TYPE(handle, moved_type) ? unpack(handle, nullptr)
                                        : PyObject_CallMethodNoArgs(handle, names.unpack);
}

PyMethodDef functions[] = {
    {"unpack", unpack_handle, METH_O, "The tensor that a handle stands for."},
    {nullptr, nullptr, 0, nullptr},
};

PyMethodDef moved_methods[] = {
    {"unpack", unpack, METH_NOARGS, "The tensor again, or InplaceEditError if it was edited."},
    {nullptr, nullptr, 0, nullptr},
};

PyMemberDef moved_members[] = {
    {"entry", T_OBJECT_EX, offsetof(MovedObject, entry), READONLY, nullptr},
    {"view", T_OBJECT_EX, offsetof(MovedObject, view), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyType_Slot moved_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(make_moved)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc_moved)},
    {Py_tp_traverse, reinterpret_cast<void*>(traverse_moved)},
    {Py_tp_methods, moved_methods},
    {Py_tp_members, moved_members},
    {Py_tp_doc, const_cast<char*>("The handle of a save whose storage leaves.")},
    {0, nullptr},
};

PyType_Spec moved_spec = {
    .name = "memswap._C.Moved",
    .basicsize = sizeof(MovedObject),
    .itemsize = 0,
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = moved_slots,
};

// --- Kept ---------------------------------------------------------------------------------------

struct KeptObject {
  PyObject_HEAD PyObject* tensor;
  PyObject* entry;  // an EntryObject, a StayObject or None
  long long version;
};

KeptObject* kept_of(PyObject* self) { return reinterpret_cast<KeptObject*>(self); }

// An entry that has a place in a passage; nullptr: it is something else.
EntryObject* placed_entry(PyObject* object) {
  EntryObject* const entry = is_entry(object) ? entry_of(object) : nullptr;
  return entry == nullptr || empty(entry->passage) ? nullptr : entry;
}

// A leaf is kept itself, as autograd would: whoever gives it other memory (`.data = ...`) gives it
// to backward as well. Others share storage and version counter, not the graph.
py::object without_graph(PyObject* tensor) {
  const at::Tensor& variable = THPVariable_Unpack(tensor);
  const bool plain = Py_IS_TYPE(tensor, reinterpret_cast<PyTypeObject*>(THPVariableClass));
  if ((variable.requires_grad() && variable.is_leaf()) ||
      (!plain && py::module_::import("memswap.engine.autograd")
                     .attr("is_typed_parameter")(py::handle(tensor))
                     .cast<bool>())) {
    return py::reinterpret_borrow<py::object>(tensor);
  }
  return owned(PyObject_CallMethodNoArgs(tensor, names.detach));
}

PyTypeObject* kept_type = nullptr;  // set once, by bind_handle
PyTypeObject* stay_type = nullptr;

PyObject* make_kept(PyTypeObject*, PyObject* args, PyObject*) {
  PyObject *tensor = nullptr, *entry = nullptr;
  if (!PyArg_UnpackTuple(args, "Kept", 2, 2, &tensor, &entry)) {
    return nullptr;
  }
  return guarded<PyObject*>(nullptr, [&] {
    if (!THPVariable_Check(tensor)) {
      throw py::type_error("Kept needs a tensor, and an entry, a stay or None");
    }
    return kept(tensor, entry).release().ptr();
  });
}

PyObject* unpack_kept(PyObject* self, PyObject*) {
  return guarded<PyObject*>(nullptr, [&] {
    const auto alive = py::reinterpret_borrow<py::object>(self);
    KeptObject* const kept = kept_of(self);
    if (THPVariable_Unpack(kept->tensor)._version() != kept->version) {
      raise(in_python("edited_since")(py::handle(kept->tensor), kept->version));
    }
    if (EntryObject* const entry = placed_entry(kept->entry)) {
      const auto owner = py::reinterpret_borrow<py::object>(entry->saver);
      if (SaverObject* const saver = saver_object(owner.ptr())) {
        demand_kept(saver, kept->entry);
      } else {
        owned(PyObject_CallMethodOneArg(owner.ptr(), names.demand_kept, kept->entry));
      }
    }
    return Py_NewRef(kept->tensor);
  });
}

int traverse_kept(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(kept_of(self)->tensor);
  Py_VISIT(kept_of(self)->entry);
  Py_VISIT(Py_TYPE(self));
  return 0;
}

void dealloc_kept(PyObject* self) {
  PyObject_GC_UnTrack(self);
  Py_CLEAR(kept_of(self)->tensor);
  Py_CLEAR(kept_of(self)->entry);
  free_instance(self);
}

PyMethodDef kept_methods[] = {
    {"unpack", unpack_kept, METH_NOARGS, "The tensor, or InplaceEditError if it was edited."},
    {nullptr, nullptr, 0, nullptr},
};

PyMemberDef kept_members[] = {
    {"tensor", T_OBJECT_EX, offsetof(KeptObject, tensor), READONLY, nullptr},
    {"entry", T_OBJECT_EX, offsetof(KeptObject, entry), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyType_Slot kept_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(make_kept)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc_kept)},
    {Py_tp_traverse, reinterpret_cast<void*>(traverse_kept)},
    {Py_tp_methods, kept_methods},
    {Py_tp_members, kept_members},
    {Py_tp_doc, const_cast<char*>("Kept(tensor, entry): the handle of a save whose tensor stays. "
                                  "It does autograd's version check, which hooks switch off.")},
    {0, nullptr},
};

PyType_Spec kept_spec = {
    .name = "memswap._C.Kept",
    .basicsize = sizeof(KeptObject),
    .itemsize = 0,
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = kept_slots,
};

// --- Stay ---------------------------------------------------------------------------------------

struct StayObject {
  PyObject_HEAD PyObject* ledger;  // a LedgerObject
  const void* key;
  int64_t nbytes;
};

StayObject* stay_of(PyObject* self) { return reinterpret_cast<StayObject*>(self); }
LedgerObject* ledger_of(StayObject* self) { return reinterpret_cast<LedgerObject*>(self->ledger); }

PyObject* make_stay(PyTypeObject*, PyObject* args, PyObject*) {
  PyObject *ledger = nullptr, *view = nullptr;
  if (!PyArg_UnpackTuple(args, "Stay", 2, 2, &ledger, &view)) {
    return nullptr;
  }
  LedgerObject* const books = ledger_object(ledger);
  const SavedView* const look = books == nullptr ? nullptr : saved_view_of(view);
  if (look == nullptr) {
    return nullptr;
  }
  return guarded<PyObject*>(nullptr, [&] { return new_stay(books, *look).release().ptr(); });
}

void dealloc_stay(PyObject* object) {
  StayObject* const self = stay_of(object);
  forget(ledger_of(self), self->key, object);
  ledger_of(self)->ledger.resident(-self->nbytes);
  Py_CLEAR(self->ledger);
  free_instance(object);
}

PyType_Slot stay_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(make_stay)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc_stay)},
    {Py_tp_doc, const_cast<char*>("A storage that stays for good: known, and counted once. Owned "
                                  "by its handles, which hold the storage.")},
    {0, nullptr},
};

PyType_Spec stay_spec = {
    .name = "memswap._C.Stay",
    .basicsize = sizeof(StayObject),
    .itemsize = 0,
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = stay_slots,
};

}  // namespace

py::object moved(PyObject* entry, PyObject* view) {
  return owned(new_moved(moved_type, entry, view));
}

py::object kept(PyObject* tensor, PyObject* entry) {
  const py::object alike = without_graph(tensor);
  py::object made = owned(kept_type->tp_alloc(kept_type, 0));
  KeptObject* const self = kept_of(made.ptr());
  self->version = THPVariable_Unpack(tensor)._version();
  self->tensor = Py_NewRef(alike.ptr());
  self->entry = Py_NewRef(entry);
  if (EntryObject* const known = placed_entry(entry)) {
    ++known->keeps;
  }
  return made;
}

py::object new_stay(LedgerObject* ledger, const SavedView& look) {
  py::object made = owned(stay_type->tp_alloc(stay_type, 0));
  StayObject* const self = stay_of(made.ptr());
  self->ledger = Py_NewRef(reinterpret_cast<PyObject*>(ledger));
  self->key = look.storage_key();
  self->nbytes = static_cast<int64_t>(look.storage_nbytes());
  ledger->ledger.resident(self->nbytes);
  remember(ledger, look, made.ptr(), true);
  return made;
}

void bind_handle(py::module_& module) {
  names = {.demand = interned("demand"),
           .demand_kept = interned("demand_kept"),
           .detach = interned("detach"),
           .unpack = interned("unpack")};
  kept_type = add_type(module, "Kept", kept_spec);
  moved_type = add_type(module, "Moved", moved_spec);
  if (PyModule_AddFunctions(module.ptr(), functions) != 0) {
    throw py::error_already_set();
  }
  stay_type = add_type(module, "Stay", stay_spec);
  // It is in no passage, as far as who holds it can ask.
  if (PyObject_SetAttrString(reinterpret_cast<PyObject*>(stay_type), "passage", Py_None) != 0) {
    throw py::error_already_set();
  }
}

}  // namespace memswap
