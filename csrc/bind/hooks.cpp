// HookScope, as Python sees it: where autograd calls in. What becomes of a tensor that the engine
// asks about is for python/memswap/engine to say, whose class is derived from this one.
#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <cstddef>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "engine/engine.h"
#include "handle.h"
#include "python_type.h"
#include "storage/in_flight.h"
#include "storage/saved_view.h"

namespace memswap {
namespace py = pybind11;

namespace {

// What a save needs at hand; the rest is Python's.
struct Scope {
  EnginePtr engine;
  std::string unit;
  int64_t group = Iteration::kNoGroup;
  int64_t packs = 0;     // calls of `pack`
  int64_t ordinal = -1;  // of the storage that was considered last
  uint64_t node = 0;     // of autograd, whose saving `waiting` waits for
  bool covered = false;  // the policy covers the unit
};

struct ScopeObject {
  PyObject_HEAD std::unique_ptr<Scope> scope;  // never nullptr
  PyObject* engine;                            // the engine's object
  PyObject* action;                            // of all that is packed, or None
  PyObject* outer;                             // the hooks that were installed before, or None
  PyObject* waiting;                           // what is saved once its operator has run, or None
  char pushed;
};

struct Names {
  PyObject *decide, *is_frozen, *join, *or_outer, *pack_later, *pack_unusual, *pack_waiting, *save;
} names;  // set once, by bind_hooks

PyTypeObject* scope_type = nullptr;

ScopeObject* scope_of(PyObject* self) { return reinterpret_cast<ScopeObject*>(self); }
PyObject* object_of(ScopeObject* self) { return reinterpret_cast<PyObject*>(self); }

// Whether the tensor, or the one that it is a view of, has a class of its own, as a Parameter has.
bool is_of_subclass(PyObject* object, const at::Tensor& tensor) {
  const auto plain = reinterpret_cast<PyTypeObject*>(THPVariableClass);
  if (!tensor.is_view()) {
    return !Py_IS_TYPE(object, plain);
  }
  const auto base = py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor._base()));
  return !Py_IS_TYPE(base.ptr(), plain);
}

// Parameters, buffers and their views are known by their storages; a frozen parameter that nobody
// has named, by its class.
bool persists(ScopeObject* self, PyObject* object, const SavedView& look) {
  return look.of_leaf() || self->scope->engine->persistent.contains(look.storage_key()) ||
         (is_of_subclass(object, THPVariable_Unpack(object)) &&
          call_method(object_of(self), names.is_frozen, object).cast<bool>());
}

// Whether make_fx records operators now. It knows tensors by who they are: what came back in their
// place would be a constant of the recording, with the bytes of now.
bool is_traced() {
  using c10::impl::TorchDispatchModeKey;
  return c10::impl::TorchDispatchModeTLS::get_mode(TorchDispatchModeKey::PROXY).has_value();
}

// [Note: What an operator fills after it was saved]
// Autograd saves the inputs of an operator before it runs, and rrelu's noise is one: memory that
// torch has just allocated, and that the operator fills without counting an edit. Sent at once, the
// bytes of before would come back. So a tensor that nobody but torch has seen, that no operator of
// a graph made and that no edit was counted of, waits until another node saves or the scope ends,
// and is saved then. Outputs without a gradient (the statistics of a norm) look the same and wait
// too.
constexpr Py_ssize_t kTorchsReferences = 2;  // the native tensor's and the caller's
bool may_be_filled_yet(PyObject* tensor, const SavedView& look) {
  return Py_REFCNT(tensor) <= kTorchsReferences && !look.computed() && look.version() == 0 &&
         look.of_floats();
}

py::object handle_of(ScopeObject* self, PyObject* tensor, Saved saved, SavedView look) {
  if (saved.as == Saved::As::kKept) {
    return kept_handle(tensor, std::move(saved.known), self->engine);
  }
  auto entry = std::static_pointer_cast<Entry>(std::move(saved.known));
  if (self->scope->engine->shares_batches) {  // the batch that saves now is Python's to know
    const py::object wrapped = py::cast(std::move(entry)), view = py::cast(std::move(look));
    return call_method(self->engine, names.join, wrapped.ptr(), view.ptr());
  }
  return moved_handle(std::move(entry), std::move(look), self->engine, Py_None);
}

// The handle of a plain tensor. The lock is held.
py::object save(ScopeObject* self, PyObject* tensor, SavedView look, bool planned) {
  Scope& scope = *self->scope;
  const bool has_action = self->action != Py_None;
  const Offer offer{THPVariable_Unpack(tensor),
                    look,
                    scope.unit,
                    scope.group,
                    scope.covered,
                    has_action,
                    scope.ordinal};
  Saved saved;
  if (planned && scope.covered && !has_action) {
    saved = scope.engine->follow_plan(offer);
  }
  if (saved.as == Saved::As::kAsked) {
    saved = scope.engine->save(offer);
  }
  if (saved.as == Saved::As::kAsked) {
    const py::object view = py::cast(std::move(look));
    return call_method(self->engine, names.decide, tensor, view.ptr(), object_of(self));
  }
  return handle_of(self, tensor, std::move(saved), std::move(look));
}

const char* reason_to_stay(ScopeObject* self, PyObject* tensor, const SavedView& look) {
  if (persists(self, tensor, look)) {
    return "parameter";
  }
  if (look.private_format()) {
    return "private format";
  }
  return is_traced() ? "traced" : nullptr;
}

py::object pack_plain(ScopeObject* self, PyObject* tensor, SavedView look) {
  Engine& engine = *self->scope->engine;
  const Locked locked(engine.lock);
  engine.ledger.counters.offer(static_cast<int64_t>(look.nbytes()));
  if (const char* const reason = reason_to_stay(self, tensor, look)) {
    return kept_handle(tensor, engine.keep(look, reason).known, self->engine);
  }
  if (self->pushed != 0 && may_be_filled_yet(tensor, look)) {
    const py::object view = py::cast(std::move(look));
    py::object later = call_method(object_of(self), names.pack_later, tensor, view.ptr());
    self->scope->node = at::sequence_number::peek();
    return later;
  }
  if (engine.shares_batches) {
    const py::object view = py::cast(std::move(look));
    return call_method(self->engine, names.save, tensor, view.ptr(), object_of(self));
  }
  return save(self, tensor, std::move(look), true);
}

PyObject* pack(PyObject* object, PyObject* tensor) {
  return guarded([&] {
    ScopeObject* const self = scope_of(object);
    if (!THPVariable_Check(tensor)) {
      throw py::type_error("pack needs a torch.Tensor");
    }
    if (self->waiting != Py_None && self->scope->node != at::sequence_number::peek()) {
      call_method(object, names.pack_waiting);
    }
    ++self->scope->packs;
    std::optional<SavedView> look = SavedView::capture(THPVariable_Unpack(tensor));
    if (!look) {
      return call_method(object, names.pack_unusual, tensor).release().ptr();
    }
    wait_for_collectives(THPVariable_Unpack(tensor));
    py::object handle = pack_plain(self, tensor, std::move(*look));
    if (self->outer != Py_None) {
      handle = call_method(object, names.or_outer, tensor, handle.ptr());
    }
    return handle.release().ptr();
  });
}

// --- life ---------------------------------------------------------------------------------------

constexpr std::array kSlots = {&ScopeObject::engine, &ScopeObject::action, &ScopeObject::outer,
                               &ScopeObject::waiting};

PyObject* make(PyTypeObject* type, PyObject* args, PyObject*) {
  return guarded([&] {
    PyObject* const given = PyTuple_GET_SIZE(args) < 1 ? Py_None : PyTuple_GET_ITEM(args, 0);
    if (given == Py_None || !py::isinstance<Engine>(py::handle(given))) {
      throw py::type_error("expected an Engine, found " + std::string(py::repr(given)));
    }
    EnginePtr engine = py::handle(given).cast<EnginePtr>();
    py::object made = owned(type->tp_alloc(type, 0));
    ScopeObject* const self = scope_of(made.ptr());
    new (&self->scope) std::unique_ptr<Scope>(new Scope{.engine = std::move(engine)});
    for (const auto slot : kSlots) {
      self->*slot = Py_NewRef(Py_None);
    }
    Py_SETREF(self->engine, Py_NewRef(given));
    return made.release().ptr();
  });
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  for (const auto slot : kSlots) {
    Py_VISIT(scope_of(self)->*slot);
  }
  Py_VISIT(Py_TYPE(self));
  return 0;
}

// The engine stays: it is called without asking whether it is there.
int clear(PyObject* self) {
  for (const auto slot : {&ScopeObject::action, &ScopeObject::outer, &ScopeObject::waiting}) {
    PyObject*& held = scope_of(self)->*slot;
    Py_XSETREF(held, Py_NewRef(Py_None));
  }
  return 0;
}

void dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  for (const auto slot : kSlots) {
    Py_CLEAR(scope_of(self)->*slot);
  }
  std::destroy_at(&scope_of(self)->scope);
  free_instance(self);
}

// What native code reads without asking whether it is there may be set, and is never deleted.
int set_attribute(PyObject* self, PyObject* name, PyObject* value) {
  if (value == nullptr) {
    PyObject* const found = PyObject_GetAttr(reinterpret_cast<PyObject*>(Py_TYPE(self)), name);
    const bool member = found != nullptr && Py_IS_TYPE(found, &PyMemberDescr_Type);
    Py_XDECREF(found);
    PyErr_Clear();
    if (member) {
      PyErr_Format(PyExc_TypeError, "%R of a %s cannot be deleted; set it to another value", name,
                   Py_TYPE(self)->tp_name);
      return -1;
    }
  }
  return PyObject_GenericSetAttr(self, name, value);
}

// --- the same for Python ------------------------------------------------------------------------

SavedView view_in(PyObject* object) { return py::handle(object).cast<const SavedView&>(); }

template <auto call>
PyObject* with_view(PyObject* object, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    if (count < 2 || !THPVariable_Check(args[0])) {
      throw py::type_error("expected a torch.Tensor to save, found " +
                           (count < 1 ? "nothing" : std::string(py::repr(args[0]))));
    }
    return call(scope_of(object), args[0], view_in(args[1]), count > 2 ? args[2] : nullptr)
        .release()
        .ptr();
  });
}

py::object save_by_name(ScopeObject* self, PyObject* tensor, SavedView look, PyObject*) {
  return save(self, tensor, std::move(look), false);
}

std::string words_in(PyObject* reason) {
  const char* const words = reason == nullptr ? "" : PyUnicode_AsUTF8(reason);
  if (words == nullptr) {
    throw py::error_already_set();
  }
  return words;
}

py::object keep_by_name(ScopeObject* self, PyObject* tensor, SavedView look, PyObject* reason) {
  const std::string words = words_in(reason);
  return kept_handle(tensor, self->scope->engine->keep(look, words).known, self->engine);
}

py::object stay_by_name(ScopeObject* self, PyObject* tensor, SavedView look, PyObject* reason) {
  const std::string words = words_in(reason);
  return kept_handle(tensor, self->scope->engine->stay(look, words).known, self->engine);
}

template <class Method>
PyCFunction as_method(Method method) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(method));
}

PyMethodDef methods[] = {
    {"pack", pack, METH_O,
     "The pack hook. Never raises for want of memory or support; the tensor stays then."},
    {"save", as_method(with_view<save_by_name>), METH_FASTCALL,
     "save(tensor, view): the handle of a plain tensor. The engine's lock is held."},
    {"keep", as_method(with_view<keep_by_name>), METH_FASTCALL,
     "keep(tensor, view, reason): a tensor stays, and nothing is known of its storage."},
    {"stay", as_method(with_view<stay_by_name>), METH_FASTCALL,
     "stay(tensor, view, reason): a tensor stays for good, and its storage is known."},
    {nullptr, nullptr, 0, nullptr},
};

template <auto member>
PyObject* get(PyObject* self, void*) {
  return guarded([&] { return py::cast((*scope_of(self)->scope).*member).release().ptr(); });
}

template <auto member>
int set(PyObject* self, PyObject* value, void*) {
  using Value = std::remove_reference_t<decltype((*scope_of(self)->scope).*member)>;
  PyObject* const done = guarded([&] {
    if (value == nullptr) {
      throw py::type_error("an attribute of a hook scope cannot be deleted; set it");
    }
    (*scope_of(self)->scope).*member = py::handle(value).cast<Value>();
    return Py_None;
  });
  return done == nullptr ? -1 : 0;
}

PyObject* get_group(PyObject* self, void*) {
  const int64_t group = scope_of(self)->scope->group;
  return group == Iteration::kNoGroup ? Py_NewRef(Py_None) : PyLong_FromLongLong(group);
}

int set_group(PyObject* self, PyObject* value, void*) {
  if (value == Py_None) {
    scope_of(self)->scope->group = Iteration::kNoGroup;
    return 0;
  }
  return set<&Scope::group>(self, value, nullptr);
}

PyGetSetDef properties[] = {
    {"unit", get<&Scope::unit>, set<&Scope::unit>, nullptr, nullptr},
    {"group", get_group, set_group, "A checkpoint region's number, or None.", nullptr},
    {"ordinal", get<&Scope::ordinal>, set<&Scope::ordinal>,
     "Of the storage that was considered last.", nullptr},
    {"packs", get<&Scope::packs>, nullptr, "Calls of `pack` so far.", nullptr},
    {"covered", get<&Scope::covered>, set<&Scope::covered>, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

#define MEMSWAP_SLOT(name) {#name, T_OBJECT_EX, offsetof(ScopeObject, name), 0, nullptr}
PyMemberDef members[] = {
    {"engine", T_OBJECT_EX, offsetof(ScopeObject, engine), READONLY, nullptr},
    MEMSWAP_SLOT(action),
    MEMSWAP_SLOT(outer),
    MEMSWAP_SLOT(waiting),
    {"pushed", T_BOOL, offsetof(ScopeObject, pushed), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};
#undef MEMSWAP_SLOT

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(make)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(clear)},
    {Py_tp_methods, methods},
    {Py_tp_setattro, reinterpret_cast<void*>(set_attribute)},
    {Py_tp_getset, properties},
    {Py_tp_members, members},
    {Py_tp_doc, const_cast<char*>("One installation of an engine's hooks.")},
    {0, nullptr},
};

PyType_Spec spec = {
    .name = "memswap._C.HookScope",
    .basicsize = sizeof(ScopeObject),
    .itemsize = 0,
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = slots,
};

}  // namespace

void bind_hooks(py::module_& module) {
  names = {.decide = interned("decide"),
           .is_frozen = interned("is_frozen"),
           .join = interned("join"),
           .or_outer = interned("or_outer"),
           .pack_later = interned("pack_later"),
           .pack_unusual = interned("pack_unusual"),
           .pack_waiting = interned("pack_waiting"),
           .save = interned("save")};
  scope_type = add_type(module, "HookScope", spec);
  module.def("observed", &at::hasCallbacks,
             "Whether a profiler or a memory history listens to ranges and operators now.");
}

}  // namespace memswap
