// Visit, as Python sees it: where autograd calls in. What becomes of a tensor that may leave is for
// python/memswap/engine/visit.py, whose class is derived from this one, and for its saver to say.
#include "visit.h"

#include <ATen/SequenceNumber.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <cstddef>
#include <optional>

#include "calls.h"
#include "ledger.h"
#include "python_type.h"
#include "save.h"
#include "saver.h"
#include "script.h"
#include "storage/in_flight.h"
#include "storage/saved_view.h"
#include "view.h"

namespace memswap {
namespace py = pybind11;

namespace {

struct VisitObject {
  PyObject_HEAD PyObject* saver;  // a SaverObject
  PyObject* unit;
  PyObject* action;
  PyObject* group;
  PyObject* outer;    // the hooks that were installed before, or None
  PyObject* waiting;  // what is saved once its operator has run, or None
  uint64_t node;      // whose saving that waits for
  Py_ssize_t ordinal;
  Py_ssize_t packs;  // calls of `pack`
  char covered;
  char pushed;
};

constexpr std::array kSlots = {
    &VisitObject::saver, &VisitObject::unit,  &VisitObject::action,
    &VisitObject::group, &VisitObject::outer, &VisitObject::waiting,
};

struct Names {
  PyObject *is_frozen, *or_outer, *pack_later, *pack_unusual, *pack_waiting, *save;
} names;  // set once, by bind_visit

VisitObject* visit_of(PyObject* self) { return reinterpret_cast<VisitObject*>(self); }
SaverObject* saver_of(VisitObject* self) { return reinterpret_cast<SaverObject*>(self->saver); }

py::object call(VisitObject* self, PyObject* name, PyObject* one, PyObject* other = nullptr) {
  PyObject* const arguments[] = {reinterpret_cast<PyObject*>(self), one, other};
  return owned(PyObject_VectorcallMethod(name, arguments, other == nullptr ? 2 : 3, nullptr));
}

// Parameters, buffers and their views are known by their storages; a frozen parameter that nobody
// has named, by its class.
bool persists(VisitObject* self, PyObject* tensor, PyObject* view) {
  const SavedView& look = *saved_view_of(view);
  if (look.of_leaf()) {
    return true;
  }
  const auto known = py::reinterpret_borrow<py::object>(saver_of(self)->persistent);
  if (!PyDict_Check(known.ptr())) {
    throw py::type_error("expected a dict of persistent storages");
  }
  if (PyDict_GET_SIZE(known.ptr()) > 0) {
    const py::object key = owned(PyLong_FromVoidPtr(const_cast<void*>(look.storage_key())));
    const int found = PyDict_Contains(known.ptr(), key.ptr());
    if (found != 0) {
      if (found < 0) {
        throw py::error_already_set();
      }
      return true;
    }
  }
  return view_of_subclass(view) && truth(call(self, names.is_frozen, tensor).release().ptr());
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
// a graph made and that no edit was counted of, waits until another node saves or the visit ends,
// and is saved then. Outputs without a gradient (the statistics of a norm) look the same and wait
// too.
constexpr Py_ssize_t kTorchsReferences = 2;  // the native tensor's and the caller's
bool may_be_filled_yet(PyObject* tensor, const SavedView& look) {
  return Py_REFCNT(tensor) <= kTorchsReferences && !look.computed() && look.version() == 0 &&
         look.of_floats();
}

PyObject* pack(PyObject* object, PyObject* tensor) {
  return guarded<PyObject*>(nullptr, [&] {
    VisitObject* const self = visit_of(object);
    if (self->waiting != Py_None && self->node != at::sequence_number::peek()) {
      owned(PyObject_CallMethodNoArgs(object, names.pack_waiting));
    }
    ++self->packs;
    const py::object view = captured(tensor);
    if (view.is_none()) {
      return call(self, names.pack_unusual, tensor).release().ptr();
    }
    wait_for_collectives(THPVariable_Unpack(tensor));
    const SavedView& look = *saved_view_of(view.ptr());
    py::object handle;
    {
      const Locked locked(saver_of(self)->lock);
      reinterpret_cast<LedgerObject*>(saver_of(self)->ledger)
          ->ledger.offer(static_cast<int64_t>(look.nbytes()));
      const char* reason = nullptr;
      if (persists(self, tensor, view.ptr())) {
        reason = "parameter";
      } else if (look.private_format()) {
        reason = "private format";
      } else if (is_traced()) {
        reason = "traced";
      }
      if (reason != nullptr) {
        handle = keep(saver_of(self), tensor, view.ptr(), reason);
      } else if (self->pushed != 0 && may_be_filled_yet(tensor, look)) {
        handle = call(self, names.pack_later, tensor, view.ptr());
        self->node = at::sequence_number::peek();
      } else {
        if (self->covered && self->action == Py_None) {
          handle =
              follow(saver_of(self), {tensor, view.ptr(), self->unit, self->group, self->ordinal});
        }
        if (!handle && saver_of(self)->shares_batches == 0) {
          handle = save(saver_of(self), tensor, view.ptr(), place_of_visit(object));
        } else if (!handle) {
          PyObject* const arguments[] = {self->saver, tensor, view.ptr(), object};
          handle = owned(PyObject_VectorcallMethod(names.save, arguments, 4, nullptr));
        }
      }
    }
    if (self->outer != Py_None) {
      handle = call(self, names.or_outer, tensor, handle.ptr());
    }
    return handle.release().ptr();
  });
}

// --- life ---------------------------------------------------------------------------------------

PyObject* make(PyTypeObject* type, PyObject* args, PyObject*) {
  if (PyTuple_GET_SIZE(args) < 1) {
    PyErr_SetString(PyExc_TypeError, "Visit needs a saver");
    return nullptr;
  }
  PyObject* const saver = PyTuple_GET_ITEM(args, 0);
  if (saver_object(saver) == nullptr) {
    PyErr_Format(PyExc_TypeError, "expected a Saver, found %R", saver);
    return nullptr;
  }
  PyObject* const self = type->tp_alloc(type, 0);
  if (self != nullptr) {
    fill_with_none(kSlots, visit_of(self));
    Py_SETREF(visit_of(self)->saver, Py_NewRef(saver));
    visit_of(self)->ordinal = -1;
  }
  return self;
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  return visit_slots(kSlots, visit_of(self), self, visit, arg);
}

// The saver stays: it is called without asking whether it is there.
int clear(PyObject* self) {
  for (const auto slot : {&VisitObject::unit, &VisitObject::action, &VisitObject::group,
                          &VisitObject::outer, &VisitObject::waiting}) {
    PyObject*& held = visit_of(self)->*slot;
    Py_XSETREF(held, Py_NewRef(Py_None));
  }
  return 0;
}

void dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  clear_slots(kSlots, visit_of(self));
  free_instance(self);
}

PyMethodDef methods[] = {
    {"pack", pack, METH_O,
     "The pack hook. Never raises for want of memory or support; the tensor stays then."},
    {nullptr, nullptr, 0, nullptr},
};

#define MEMSWAP_SLOT(name) {#name, T_OBJECT_EX, offsetof(VisitObject, name), 0, nullptr}
PyMemberDef members[] = {
    {"saver", T_OBJECT_EX, offsetof(VisitObject, saver), READONLY, nullptr},
    MEMSWAP_SLOT(unit),
    MEMSWAP_SLOT(action),
    MEMSWAP_SLOT(group),
    MEMSWAP_SLOT(outer),
    MEMSWAP_SLOT(waiting),
    {"ordinal", T_PYSSIZET, offsetof(VisitObject, ordinal), 0, nullptr},
    {"packs", T_PYSSIZET, offsetof(VisitObject, packs), READONLY, nullptr},
    {"covered", T_BOOL, offsetof(VisitObject, covered), 0, nullptr},
    {"pushed", T_BOOL, offsetof(VisitObject, pushed), 0, nullptr},
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
    {Py_tp_members, members},
    {Py_tp_doc, const_cast<char*>("One installation of a saver's hooks.")},
    {0, nullptr},
};

PyType_Spec spec = {
    .name = "memswap._C.Visit",
    .basicsize = sizeof(VisitObject),
    .itemsize = 0,
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = slots,
};

PyTypeObject* visit_type = nullptr;  // set once, by bind_visit

}  // namespace

SavePlace place_of_visit(PyObject* object) {
  if (!PyObject_TypeCheck(object, visit_type)) {
    throw py::type_error("expected a Visit");
  }
  VisitObject* const self = visit_of(object);
  return {.visit = object,
          .unit = self->unit,
          .group = self->group,
          .covered = self->covered != 0,
          .has_action = self->action != Py_None,
          .ordinal = self->ordinal};
}

void bind_visit(py::module_& module) {
  names = {.is_frozen = interned("is_frozen"),
           .or_outer = interned("or_outer"),
           .pack_later = interned("pack_later"),
           .pack_unusual = interned("pack_unusual"),
           .pack_waiting = interned("pack_waiting"),
           .save = interned("save")};
  visit_type = add_type(module, "Visit", spec);
}

}  // namespace memswap
