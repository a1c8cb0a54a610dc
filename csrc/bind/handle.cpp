// Handle: what the pack hook returns to autograd, and what unpack makes a tensor of again.
#include "handle.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <new>
#include <optional>
#include <utility>

#include "engine/batch.h"
#include "engine/engine.h"
#include "python_type.h"

namespace memswap {
namespace py = pybind11;

namespace {

// A share of an entry, and how the saved tensor looks at its storage; or a tensor that stays, and
// who stands for its storage.
struct Share {
  KnownPtr known;
  std::optional<SavedView> look;  // of a storage that leaves
  uint32_t version = 0;           // of a tensor that stays
};

struct HandleObject {
  PyObject_HEAD Share share;
  PyObject* tensor;  // that stays; None: its storage leaves
  PyObject* owner;   // the engine's object, or None
  PyObject* batch;   // of a group, or None
};

// Set once, by bind_handle.
PyTypeObject* handle_type = nullptr;
struct Names {
  PyObject *detach, *unpack;
} names;

HandleObject* handle_of(PyObject* self) { return reinterpret_cast<HandleObject*>(self); }
bool stays(const HandleObject* self) { return self->tensor != Py_None; }

EntryPtr entry_of(const HandleObject* self) {
  const KnownPtr& known = self->share.known;
  return known && known->is_entry() ? std::static_pointer_cast<Entry>(known) : nullptr;
}

py::object new_handle(Share share, PyObject* tensor, PyObject* owner, PyObject* batch) {
  py::object made = owned(handle_type->tp_alloc(handle_type, 0));
  HandleObject* const self = handle_of(made.ptr());
  new (&self->share) Share(std::move(share));
  self->tensor = Py_NewRef(tensor);
  self->owner = Py_NewRef(owner);
  self->batch = Py_NewRef(batch);
  return made;
}

// What is rare about handles stands in Python.
[[noreturn]] void raise(const char* error, auto&&... arguments) {
  const py::object made = py::module_::import("memswap.engine.handle").attr(error)(arguments...);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(made.ptr())), made.ptr());
  throw py::error_already_set();
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
  return call_method(tensor, names.detach);
}

PyObject* unpack_moved(HandleObject* self) {
  const EntryPtr entry = entry_of(self);
  const SavedView& look = *self->share.look;
  if (self->batch != Py_None) {
    py::handle(self->batch).cast<Batch&>().notice_demand(entry);
  }
  if (look.edited()) {
    raise("inplace_edit", look.describe(), look.current_version(), look.version());
  }
  const StorageRefPtr storage = entry->engine()->demand(entry);
  if (entry->fetched() && storage->version.current_version() != 0) {
    raise("inplace_edit", look.describe(), look.version() + 1, look.version());
  }
  return THPVariable_Wrap(look.rebuild(*storage, !entry->fetched()));
}

PyObject* unpack_kept(HandleObject* self) {
  if (THPVariable_Unpack(self->tensor)._version() != self->share.version) {
    raise("edited_since", py::handle(self->tensor), self->share.version);
  }
  if (const EntryPtr entry = entry_of(self)) {
    entry->engine()->demand_kept(entry);
  }
  return Py_NewRef(self->tensor);
}

PyObject* unpack(PyObject* object, PyObject*) {
  return guarded([&] {
    const auto alive = py::reinterpret_borrow<py::object>(object);  // whatever other threads drop
    HandleObject* const self = handle_of(object);
    return stays(self) ? unpack_kept(self) : unpack_moved(self);
  });
}

// The unpack hook of every engine: a handle of another kind says itself what it stands for.
PyObject* unpack_any(PyObject*, PyObject* handle) {
  return Py_IS_TYPE(handle, handle_type) ? unpack(handle, nullptr)
                                         : PyObject_CallMethodNoArgs(handle, names.unpack);
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(handle_of(self)->tensor);
  Py_VISIT(handle_of(self)->owner);
  Py_VISIT(handle_of(self)->batch);
  Py_VISIT(Py_TYPE(self));
  return 0;
}

// The entry may die here, and let go of the GIL: nobody finds the handle any more, and a pending
// exception is not its own. Its engine's object outlives it.
void dealloc(PyObject* object) {
  HandleObject* const self = handle_of(object);
  PyObject_GC_UnTrack(object);
  PyObject *kind, *value, *traceback;
  PyErr_Fetch(&kind, &value, &traceback);
  std::destroy_at(&self->share);
  Py_CLEAR(self->tensor);
  Py_CLEAR(self->batch);
  Py_CLEAR(self->owner);
  PyErr_Restore(kind, value, traceback);
  free_instance(object);
}

PyObject* get_entry(PyObject* self, void*) {
  return guarded([&] { return py::cast(handle_of(self)->share.known).release().ptr(); });
}

PyObject* get_view(PyObject* self, void*) {
  return guarded([&] { return py::cast(handle_of(self)->share.look).release().ptr(); });
}

PyObject* get_stays(PyObject* self, void*) { return PyBool_FromLong(stays(handle_of(self))); }

PyObject* get_tensor(PyObject* self, void*) { return Py_NewRef(handle_of(self)->tensor); }
PyObject* get_batch(PyObject* self, void*) { return Py_NewRef(handle_of(self)->batch); }

PyMethodDef methods[] = {
    {"unpack", unpack, METH_NOARGS, "The tensor again, or InplaceEditError if it was edited."},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef properties[] = {
    {"entry", get_entry, nullptr, "Who stands for the storage: an entry, a stay or None.", nullptr},
    {"view", get_view, nullptr, "How the tensor looks at a storage that leaves; or None.", nullptr},
    {"stays", get_stays, nullptr, "Whether the handle holds the tensor itself.", nullptr},
    {"tensor", get_tensor, nullptr, "The tensor that stays, or None.", nullptr},
    {"batch", get_batch, nullptr, "Of a group, or None.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
    {Py_tp_methods, methods},
    {Py_tp_getset, properties},
    {Py_tp_doc, const_cast<char*>("What a pack hook returns: a share of an entry and a view of its "
                                  "storage, or a tensor that stays. It does autograd's version "
                                  "check, which hooks switch off.")},
    {0, nullptr},
};

PyType_Spec spec = {
    .name = "memswap._C.Handle",
    .basicsize = sizeof(HandleObject),
    .itemsize = 0,
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = slots,
};

PyMethodDef functions[] = {
    {"unpack", unpack_any, METH_O, "The tensor that a handle stands for."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

py::object moved_handle(EntryPtr entry, SavedView look, PyObject* owner, PyObject* batch) {
  ++entry->handles;
  return new_handle({std::move(entry), std::move(look), 0}, Py_None, owner, batch);
}

py::object kept_handle(PyObject* tensor, KnownPtr known, PyObject* owner) {
  const py::object alike = without_graph(tensor);
  if (known && known->is_entry()) {
    ++static_cast<Entry&>(*known).keeps;
  }
  return new_handle({std::move(known), std::nullopt,
                     static_cast<uint32_t>(THPVariable_Unpack(tensor)._version())},
                    alike.ptr(), owner, Py_None);
}

void bind_handle(py::module_& module) {
  names = {.detach = interned("detach"), .unpack = interned("unpack")};
  handle_type = add_type(module, "Handle", spec);
  if (PyModule_AddFunctions(module.ptr(), functions) != 0) {
    throw py::error_already_set();
  }
  module.def(
      "moved_handle",
      [](EntryPtr entry, const SavedView& look, const py::object& batch) {
        const py::object owner = py::cast(entry->engine());
        return moved_handle(std::move(entry), look, owner.ptr(), batch.ptr());
      },
      py::arg("entry").none(false), py::arg("view"), py::arg("batch") = py::none(),
      "The handle of a save whose storage leaves. `batch`: of a group.");
  module.def(
      "kept_handle",
      [](const py::object& tensor, KnownPtr known) {
        if (!THPVariable_Check(tensor.ptr())) {
          throw py::type_error("kept_handle needs a torch.Tensor");
        }
        py::object owner = py::none();
        if (known && known->is_entry()) {
          owner = py::cast(static_cast<Entry&>(*known).engine());
        }
        return kept_handle(tensor.ptr(), std::move(known), owner.ptr());
      },
      py::arg("tensor"), py::arg("known") = py::none(),
      "The handle of a save whose tensor stays, and who stands for its storage.");
}

}  // namespace memswap
