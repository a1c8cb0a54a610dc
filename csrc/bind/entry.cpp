// Entry, as Python sees it: one saved storage that may leave, however many views and operators
// saved it.
//
// Owned by its handles: when the last one dies, so do the entry, its away form and its storage,
// whatever happened to the graph. Everything else refers to it weakly. Calls are serialised by the
// saver's lock.
#include "entry.h"

#include <pybind11/pybind11.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <cstddef>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <utility>

#include "calls.h"
#include "departing.h"
#include "engine/block_form.h"
#include "engine/recipes.h"
#include "engine/residence.h"
#include "ledger.h"
#include "passage.h"
#include "python_type.h"
#include "storage/saved_view.h"
#include "storage/storage.h"
#include "storage_ref.h"

namespace memswap {
namespace py = pybind11;

namespace {

constexpr std::array kSlots = {
    &EntryObject::saver,
    &EntryObject::ledger,
    &EntryObject::passage,
    &EntryObject::order,
};

PyTypeObject* entry_type = nullptr;  // set once, by bind_entry
PyObject* ledger_name = nullptr;

// --- the same for Python ------------------------------------------------------------------------

PyObject* none_after(EntryObject* self, void (*step)(EntryObject*)) {
  return guarded<PyObject*>(nullptr, [&]() -> PyObject* {
    step(self);
    Py_RETURN_NONE;
  });
}

// A native object that an argument or a value is; None is nullptr. Throws TypeError.
template <class Held>
Held as(PyObject* object, const char* expected) {
  if (object == nullptr || object == Py_None) {
    return nullptr;
  }
  try {
    return py::handle(object).cast<Held>();
  } catch (const py::cast_error&) {
    throw py::type_error(std::string("expected ") + expected + ", found " +
                         Py_TYPE(object)->tp_name);
  }
}

PyObject* py_leave(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  if (count != 2) {
    PyErr_SetString(PyExc_TypeError, "leave needs an away form and a ticket");
    return nullptr;
  }
  return guarded<PyObject*>(nullptr, [&]() -> PyObject* {
    Leaving leaving{as<AwayFormPtr>(args[0], "an AwayForm"), as<TicketPtr>(args[1], "a Ticket")};
    if (!leaving.away || !leaving.departure) {
      throw py::type_error("leave needs an away form and a ticket, found None");
    }
    leave(entry_of(self), std::move(leaving));
    Py_RETURN_NONE;
  });
}

PyObject* py_gone(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* given) {
  static constexpr std::array words = {"wait"};
  std::array wait = {Py_False};
  if (!sort_arguments(words, args, count, given, wait)) {
    return nullptr;
  }
  return guarded<PyObject*>(nullptr, [&]() -> PyObject* {
    return PyBool_FromLong(gone(entry_of(self), is_true(wait[0])));
  });
}

PyObject* py_swap(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  if (count != 2) {
    PyErr_SetString(PyExc_TypeError, "swap needs a BlockSender and a storage");
    return nullptr;
  }
  return guarded<PyObject*>(nullptr, [&]() -> PyObject* {
    const auto sender = as<std::shared_ptr<BlockSender>>(args[0], "a BlockSender");
    if (!sender) {
      throw py::type_error("expected a BlockSender, found None");
    }
    return PyBool_FromLong(swap(entry_of(self), *sender, expect_storage(args[1])));
  });
}

// A step that says yes or no.
template <bool (*step)(EntryObject*)>
PyObject* asked(PyObject* self, PyObject*) {
  return guarded<PyObject*>(nullptr,
                            [&]() -> PyObject* { return PyBool_FromLong(step(entry_of(self))); });
}

PyObject* py_fetch(PyObject* self, PyObject*) { return none_after(entry_of(self), fetch); }

PyObject* py_count_held(PyObject* self, PyObject*) {
  return none_after(entry_of(self), count_held);
}

PyObject* py_drop_storage(PyObject* self, PyObject*) {
  return none_after(entry_of(self), drop_storage);
}

PyObject* py_let_go(PyObject* self, PyObject*) { return none_after(entry_of(self), let_go); }

PyObject* py_bring(PyObject* self, PyObject*) {
  return guarded<PyObject*>(nullptr, [&] { return storage_object(bring(entry_of(self))); });
}

PyObject* py_move(PyObject* self, PyObject* state) {
  return guarded<PyObject*>(nullptr, [&]() -> PyObject* {
    for (const State wanted :
         {State::kResident, State::kLeaving, State::kAway, State::kReturning}) {
      if (state_object(wanted) == state) {
        require(entry_of(self), entry_of(self)->residence->move(wanted), wanted);
        Py_RETURN_NONE;
      }
    }
    throw py::type_error("move needs a State");
  });
}

PyObject* py_drop_away(PyObject* self, PyObject*) { return none_after(entry_of(self), drop_away); }

PyObject* get_lost_memory(PyObject* self, void*) {
  return PyBool_FromLong(lost_memory(entry_of(self)));
}

PyObject* repr(PyObject* self) { return PyUnicode_FromString(described(entry_of(self)).c_str()); }

PyObject* get_state(PyObject* self, void*) {
  return Py_NewRef(state_object(entry_of(self)->residence->state()));
}

PyObject* get_nbytes(PyObject* self, void*) {
  return PyLong_FromLongLong(entry_of(self)->residence->nbytes());
}

PyObject* get_reference(PyObject* self, void*) { return PyWeakref_NewRef(self, nullptr); }

PyObject* get_identity(PyObject* self, void*) {
  return guarded<PyObject*>(
      nullptr, [&] { return py::cast(WeakStorage(*entry_of(self)->identity)).release().ptr(); });
}

PyObject* get_is_away(PyObject* self, void*) {
  return PyBool_FromLong(entry_of(self)->away && !entry_of(self)->storage);
}

template <auto member>
PyObject* get_held(PyObject* self, void*) {
  return guarded<PyObject*>(nullptr,
                            [&] { return py::cast(entry_of(self)->*member).release().ptr(); });
}

int set_trial(PyObject* self, PyObject* given, void*) {
  return guarded<int>(-1, [&] {
    entry_of(self)->trial = as<std::shared_ptr<Trial>>(given, "a Trial");
    return 0;
  });
}

int set_storage(PyObject* self, PyObject* given, void*) {
  return guarded<int>(-1, [&] {
    if (given == nullptr) {
      throw py::type_error("storage of an entry cannot be deleted; None lets go of it");
    }
    StorageRefPtr held = given == Py_None ? nullptr : expect_storage(given);
    entry_of(self)->storage.swap(held);  // what was there goes when the books are right
    return 0;
  });
}

// --- life ---------------------------------------------------------------------------------------

PyObject* make(PyTypeObject*, PyObject* args, PyObject*) {
  PyObject *saver = nullptr, *view = nullptr, *storage = nullptr;
  if (!PyArg_UnpackTuple(args, "Entry", 3, 3, &saver, &view, &storage)) {
    return nullptr;
  }
  const SavedView* const look = saved_view_of(view);
  if (look == nullptr) {
    return nullptr;
  }
  return guarded<PyObject*>(nullptr, [&] {
    const py::object ledger = owned(PyObject_GetAttr(saver, ledger_name));
    LedgerObject* const books = ledger_object(ledger.ptr());
    if (books == nullptr) {
      throw py::error_already_set();
    }
    return new_entry(saver, books, *look, *expect_storage(storage)).release().ptr();
  });
}

// Nobody will wait for its tickets any more. A ticket that holds a storage lets go of it in order.
void abandon(const TicketPtr& ticket) {
  if (ticket) {
    ticket->abandon();
  }
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  return visit_slots(kSlots, entry_of(self), self, visit, arg);
}

// Whoever refers to it without owning it. Runs nothing of Python's.
void forget_everywhere(EntryObject* self) {
  forget_identity(self);
  take_off(self);
  depart_no_more(self);
}

// Its tickets and what it counts for stay until it dies.
int clear(PyObject* self) {
  EntryObject* const entry = entry_of(self);
  forget_everywhere(entry);
  for (const auto slot : {&EntryObject::saver, &EntryObject::passage, &EntryObject::order}) {
    put(entry->*slot, Py_None);
  }
  return 0;
}

// First of all nobody finds it any more: a ticket may let go of the GIL, and no other thread may
// take hold of an entry that is dying.
void dealloc(PyObject* self) {
  EntryObject* const entry = entry_of(self);
  PyObject_GC_UnTrack(self);
  if (entry->residence) {
    forget_everywhere(entry);
  }
  if (entry->weak_references != nullptr) {
    PyObject_ClearWeakRefs(self);
  }
  entry->residence.~optional();
  PyObject *kind, *value, *traceback;
  PyErr_Fetch(&kind, &value, &traceback);
  abandon(entry->departure);
  abandon(entry->arrival);
  std::destroy_at(&entry->departure);
  std::destroy_at(&entry->arrival);
  std::destroy_at(&entry->trial);
  std::destroy_at(&entry->storage);
  std::destroy_at(&entry->away);
  PyErr_Restore(kind, value, traceback);
  clear_slots(kSlots, entry);
  entry->identity.~optional();
  free_instance(self);
}

PyMethodDef methods[] = {
    {"leave", as_method(py_leave), METH_FASTCALL,
     "leave(away, departure): it is being sent; the ticket holds the storage from here on."},
    {"swap", as_method(py_swap), METH_FASTCALL,
     "swap(sender, storage): send it by a BlockSender. Whether there was room; if not, nothing "
     "changed."},
    {"sent", asked<sent>, METH_NOARGS,
     "Whether the send has ended. One that failed gives the storage back: nothing is lost."},
    {"gone", as_method(py_gone), METH_FASTCALL | METH_KEYWORDS,
     "gone(wait=False): notice whether a leaving storage really went away. What was gathered is "
     "gone before its bytes are anywhere else for sure; `wait` for that, instead of saying no."},
    {"lingers", asked<lingers>, METH_NOARGS, "Whether it is leaving and somebody holds it still."},
    {"fetch", py_fetch, METH_NOARGS,
     "Start bringing the bytes back into a storage of memswap's own. May be out of memory."},
    {"fetch_ahead", asked<fetch_ahead>, METH_NOARGS,
     "The same where it is away and its form works ahead. Whether that was done."},
    {"bring", py_bring, METH_NOARGS,
     "The storage: the one that is still there, the one that was fetched, or else a fetch now, "
     "which counts as a stall. The caller waits for `arrival` before it reads."},
    {"lock", asked<lock>, METH_NOARGS, "Hold the storage, if anybody does. Whether there was one."},
    {"move", py_move, METH_O, "Change the state, or raise EntryStateError."},
    {"retain", asked<retain>, METH_NOARGS,
     "Hold on to a storage that has not gone away yet: then nothing has to come back. Whether "
     "there "
     "was one."},
    {"let_go", py_let_go, METH_NOARGS,
     "Let go of a storage again whose away form is still there. Nothing is copied."},
    {"held_by_handles_only", asked<held_by_handles_only>, METH_NOARGS,
     "Whether nobody but our own handles holds a storage that stayed."},
    {"drop_storage", py_drop_storage, METH_NOARGS,
     "Let go of the storage: the away form is there."},
    {"drop_away", py_drop_away, METH_NOARGS, "Let go of the away form: the storage is there."},
    {"count_held", py_count_held, METH_NOARGS, "Account for what the away form takes up now."},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef properties[] = {
    {"state", get_state, nullptr, nullptr, nullptr},
    {"nbytes", get_nbytes, nullptr, nullptr, nullptr},
    {"reference", get_reference, nullptr, "A weak reference, always the same one.", nullptr},
    {"identity", get_identity, nullptr, "The storage, as a WeakStorage.", nullptr},
    {"is_away", get_is_away, nullptr,
     "Whether the storage has left, or is leaving, as far as its owner is concerned.", nullptr},
    {"lost_memory", get_lost_memory, nullptr,
     "Whether the storage that it holds has been resized since it was saved.", nullptr},
    {"storage", get_held<&EntryObject::storage>, set_storage,
     "The storage, where the entry itself holds it; or None.", nullptr},
    {"away", get_held<&EntryObject::away>, nullptr, "The away form, or None.", nullptr},
    {"departure", get_held<&EntryObject::departure>, nullptr, "The ticket of its send, or None.",
     nullptr},
    {"trial", get_held<&EntryObject::trial>, set_trial,
     "What proves its recipe while its bytes wait elsewhere, or None.", nullptr},
    {"arrival", get_held<&EntryObject::arrival>, nullptr, "The ticket of its return, or None.",
     nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

#define MEMSWAP_SLOT(name) {#name, T_OBJECT_EX, offsetof(EntryMembers, name), 0, nullptr}
#define MEMSWAP_COUNT(name) {#name, T_LONGLONG, offsetof(EntryMembers, name), 0, nullptr}
PyMemberDef members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(EntryMembers, weak_references), READONLY, nullptr},
    {"saver", T_OBJECT_EX, offsetof(EntryMembers, saver), READONLY, nullptr},
    MEMSWAP_SLOT(order),
    MEMSWAP_COUNT(handles),
    MEMSWAP_COUNT(keeps),
    MEMSWAP_COUNT(unseen),
    {"passage", T_OBJECT_EX, offsetof(EntryMembers, passage), READONLY, nullptr},
    {"index", T_PYSSIZET, offsetof(EntryMembers, index), READONLY, nullptr},
    {"version", T_LONGLONG, offsetof(EntryMembers, version), READONLY, nullptr},
    {"fetched", T_BOOL, offsetof(EntryMembers, fetched), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};
#undef MEMSWAP_SLOT
#undef MEMSWAP_COUNT

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(make)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(clear)},
    {Py_tp_repr, reinterpret_cast<void*>(repr)},
    {Py_tp_methods, methods},
    {Py_tp_getset, properties},
    {Py_tp_setattro, reinterpret_cast<void*>(set_attribute)},
    {Py_tp_members, members},
    {Py_tp_doc, const_cast<char*>("One saved storage that may leave.")},
    {0, nullptr},
};

PyType_Spec spec = {
    .name = "memswap._C.Entry",
    .basicsize = sizeof(EntryObject),
    .itemsize = 0,
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = slots,
};

}  // namespace

py::object new_entry(PyObject* saver, LedgerObject* ledger, const SavedView& look,
                     const StorageRef& storage) {
  const WeakStorage identity(storage);
  py::object made = owned(entry_type->tp_alloc(entry_type, 0));
  EntryObject* const self = entry_of(made.ptr());
  new (&self->residence) std::optional<Residence>();
  new (&self->identity) std::optional<WeakStorage>(identity);
  new (&self->storage) StorageRefPtr();
  new (&self->away) AwayFormPtr();
  new (&self->departure) TicketPtr();
  new (&self->arrival) TicketPtr();
  new (&self->trial) std::shared_ptr<Trial>();
  fill_with_none(kSlots, self);
  put(self->saver, saver);
  put(self->ledger, reinterpret_cast<PyObject*>(ledger));
  self->index = -1;
  self->version = look.version();
  self->residence.emplace(ledger->ledger, static_cast<int64_t>(look.storage_nbytes()));
  remember(ledger, look, made.ptr(), false);
  return made;
}

bool is_entry(PyObject* object) { return PyObject_TypeCheck(object, entry_type); }

EntryObject* entry_object(PyObject* object) {
  if (!is_entry(object)) {
    PyErr_Format(PyExc_TypeError, "expected an Entry, found %R", object);
    return nullptr;
  }
  return entry_of(object);
}

void bind_entry(py::module_& module) {
  ledger_name = interned("ledger");
  bind_entry_steps(module);
  entry_type = add_type(module, "Entry", spec);
}

}  // namespace memswap
