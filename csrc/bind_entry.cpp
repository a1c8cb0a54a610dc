// Entry, as Python sees it: the steps that every saved storage takes. What is rare, and all words,
// stand in python/memswap/engine/entry.py, whose class is derived from this one.
#include "bind_entry.h"

#include <pybind11/pybind11.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <cstddef>
#include <new>
#include <optional>
#include <utility>

#include "bind_ledger.h"
#include "bind_ticket.h"
#include "block.h"
#include "codec/codec_lane.h"
#include "python_storage.h"
#include "python_type.h"
#include "residence.h"
#include "saved_view.h"
#include "storage.h"

namespace memswap {
namespace py = pybind11;

namespace {

constexpr std::array kSlots = {
    &EntryObject::saver,   &EntryObject::ledger,  &EntryObject::storage,
    &EntryObject::away,    &EntryObject::way,     &EntryObject::departure,
    &EntryObject::arrival, &EntryObject::passage, &EntryObject::order,
};

// Set once, by bind_entry: the members of Python's State, types, and names.
std::array<PyObject*, 4> states;
PyTypeObject* entry_type = nullptr;
PyTypeObject* block_type = nullptr;
PyTypeObject* encoded_type = nullptr;
struct Names {
  PyObject *add, *bring, *frees_first, *held, *ledger, *nbytes, *sent_safely, *stay,
      *stays_on_device;
} names;

void put(PyObject*& slot, PyObject* value) {
  Py_INCREF(value);
  Py_XSETREF(slot, value);
}

LedgerObject* ledger_of(EntryObject* self) { return reinterpret_cast<LedgerObject*>(self->ledger); }

// Whatever else has this address from here on, it is not what was saved.
void forget_identity(EntryObject* self) {
  forget(ledger_of(self), self->identity->key(), reinterpret_cast<PyObject*>(self));
}

[[noreturn]] void refuse(EntryObject* self, State to) {
  const py::object raise = py::module_::import("memswap.engine.entry").attr("illegal_move");
  raise(py::handle(reinterpret_cast<PyObject*>(self)), py::handle(states[static_cast<size_t>(to)]));
  throw py::error_already_set();  // not reached: illegal_move raises
}

void require(EntryObject* self, bool legal_step, State to) {
  if (!legal_step) {
    refuse(self, to);
  }
}

// --- the steps ----------------------------------------------------------------------------------

// What the away form takes up now. Until the encoder has reported, that includes what is set aside
// for a frame's overflow.
void count_held(EntryObject* self) {
  if (empty(self->away) || empty(self->way)) {
    return;
  }
  int64_t nbytes = 0;
  if (PyObject_TypeCheck(self->away, encoded_type)) {
    const auto* encoded = py::handle(self->away).cast<const EncodedStorage*>();
    const auto elsewhere = encoded->swapped() ? encoded->nbytes() : 0;
    self->residence->count_away(static_cast<int64_t>(encoded->device_nbytes()),
                                static_cast<int64_t>(elsewhere));
    return;
  }
  if (Py_IS_TYPE(self->away, block_type)) {
    nbytes = static_cast<int64_t>(py::handle(self->away).cast<const Block*>()->nbytes());
  } else {
    nbytes = owned(PyObject_GetAttr(self->away, names.nbytes)).cast<int64_t>();
  }
  if (truth(PyObject_GetAttr(self->way, names.stays_on_device))) {
    self->residence->count_away(nbytes, 0);
  } else {
    self->residence->count_away(0, nbytes);
  }
}

void leave(EntryObject* self, PyObject* way, PyObject* away, PyObject* departure) {
  put(self->departure, departure);
  require(self, self->residence->leave(), State::kLeaving);
  put(self->way, way);
  put(self->away, away);
  self->gathers = truth(PyObject_GetAttr(way, names.frees_first));
  count_held(self);
}

bool sent(EntryObject* self) {
  if (empty(self->departure)) {
    return false;
  }
  const auto departure = py::reinterpret_borrow<py::object>(self->departure);
  if (!is_done(departure.ptr())) {
    return false;
  }
  if (has_failed(departure.ptr())) {
    owned(
        PyObject_CallMethodOneArg(reinterpret_cast<PyObject*>(self), names.stay, departure.ptr()));
  }
  return true;
}

bool gone(EntryObject* self, bool wait) {
  const State state = self->residence->state();
  if (state != State::kLeaving || !self->identity->expired()) {
    return state == State::kAway;
  }
  if (self->gathers &&
      !truth(PyObject_CallMethodOneArg(reinterpret_cast<PyObject*>(self), names.sent_safely,
                                       wait ? Py_True : Py_False))) {
    return false;
  }
  require(self, self->residence->go(), State::kAway);
  return true;
}

// May be out of memory: then nothing has changed.
void fetch(EntryObject* self) {
  const py::object pair = owned(PyObject_CallMethodOneArg(self->way, names.bring, self->away));
  if (!PyTuple_CheckExact(pair.ptr()) || PyTuple_GET_SIZE(pair.ptr()) != 2) {
    throw py::type_error("bring() of a way returns a storage and a ticket");
  }
  PyObject* const storage = PyTuple_GET_ITEM(pair.ptr(), 0);
  put(self->arrival, PyTuple_GET_ITEM(pair.ptr(), 1));
  WeakStorage identity(*expect_storage(storage));
  require(self, self->residence->come_back(), State::kReturning);
  put(self->storage, storage);
  forget_identity(self);
  self->identity.emplace(std::move(identity));
  self->fetched = 1;
  self->unseen = self->handles;
  if (PyObject_TypeCheck(self->away, encoded_type)) {
    count_held(self);  // the frame may have come back too
  }
}

bool lock(EntryObject* self) {
  auto held = self->identity->lock();
  if (!held) {
    return false;
  }
  put(self->storage, owned(storage_object(std::move(held))).ptr());
  self->unseen = self->handles;
  self->residence->count_resident(true);
  return true;
}

void let_go(EntryObject* self) {
  put(self->storage, Py_None);
  require(self, self->residence->move(State::kAway), State::kAway);
  self->residence->count_resident(false);
}

py::object bring(EntryObject* self) {
  Residence& residence = *self->residence;
  const bool was_sent = residence.state() == State::kLeaving && sent(self);
  if (empty(self->storage)) {
    if (lock(self)) {
      if (was_sent && !empty(self->passage)) {  // leaving freed nothing
        const py::object held = owned(PyObject_GetAttr(self->passage, names.held));
        const py::object index = owned(PyLong_FromSsize_t(self->index));
        owned(PyObject_CallMethodOneArg(held.ptr(), names.add, index.ptr()));
      }
    } else if (gone(self, true)) {
      fetch(self);
      ++residence.ledger().stalls;
    } else if (empty(self->storage)) {  // a send that failed gives the storage back
      throw std::logic_error("a storage is neither here nor away");
    }
  }
  auto storage = py::reinterpret_borrow<py::object>(self->storage);
  if (residence.state() != State::kResident) {
    require(self, residence.move(State::kResident), State::kResident);
  }
  if (--self->unseen <= 0 && !empty(self->away)) {
    let_go(self);  // every save has seen the bytes: whoever uses them holds them
  }
  return storage;
}

// --- the same for Python ------------------------------------------------------------------------

PyObject* none_after(EntryObject* self, void (*step)(EntryObject*)) {
  return guarded<PyObject*>(nullptr, [&]() -> PyObject* {
    step(self);
    Py_RETURN_NONE;
  });
}

PyObject* py_leave(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  if (count != 3) {
    PyErr_SetString(PyExc_TypeError, "leave needs a way, an away form and a ticket");
    return nullptr;
  }
  return guarded<PyObject*>(nullptr, [&]() -> PyObject* {
    leave(entry_of(self), args[0], args[1], args[2]);
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
    return PyBool_FromLong(gone(entry_of(self), PyObject_IsTrue(wait[0]) == 1));
  });
}

PyObject* py_lingers(PyObject* self, PyObject*) {
  return guarded<PyObject*>(nullptr, [&]() -> PyObject* {
    EntryObject* const entry = entry_of(self);
    return PyBool_FromLong(entry->residence->state() == State::kLeaving && !gone(entry, false));
  });
}

PyObject* py_sent(PyObject* self, PyObject*) {
  return guarded<PyObject*>(nullptr,
                            [&]() -> PyObject* { return PyBool_FromLong(sent(entry_of(self))); });
}

PyObject* py_fetch(PyObject* self, PyObject*) { return none_after(entry_of(self), fetch); }

PyObject* py_count_held(PyObject* self, PyObject*) {
  return none_after(entry_of(self), count_held);
}

PyObject* py_lock(PyObject* self, PyObject*) {
  return guarded<PyObject*>(nullptr,
                            [&]() -> PyObject* { return PyBool_FromLong(lock(entry_of(self))); });
}

PyObject* py_let_go(PyObject* self, PyObject*) { return none_after(entry_of(self), let_go); }

PyObject* py_bring(PyObject* self, PyObject*) {
  return guarded<PyObject*>(nullptr, [&] { return bring(entry_of(self)).release().ptr(); });
}

PyObject* py_move(PyObject* self, PyObject* state) {
  return guarded<PyObject*>(nullptr, [&]() -> PyObject* {
    for (size_t to = 0; to < states.size(); ++to) {
      if (states[to] == state) {
        const auto wanted = static_cast<State>(to);
        require(entry_of(self), entry_of(self)->residence->move(wanted), wanted);
        Py_RETURN_NONE;
      }
    }
    throw py::type_error("move needs a State");
  });
}

PyObject* py_forget_away(PyObject* self, PyObject*) {
  put(entry_of(self)->away, Py_None);
  entry_of(self)->residence->count_away(0, 0);
  Py_RETURN_NONE;
}

PyObject* get_state(PyObject* self, void*) {
  return Py_NewRef(states[static_cast<size_t>(entry_of(self)->residence->state())]);
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
  return PyBool_FromLong(!empty(entry_of(self)->away) && empty(entry_of(self)->storage));
}

// --- life ---------------------------------------------------------------------------------------

PyObject* make(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *saver = nullptr, *view = nullptr, *storage = nullptr;
  if (!PyArg_UnpackTuple(args, "Entry", 3, 3, &saver, &view, &storage)) {
    return nullptr;
  }
  const SavedView* const look = saved_view_of(view);
  if (look == nullptr) {
    return nullptr;
  }
  return guarded<PyObject*>(nullptr, [&] {
    const py::object ledger = owned(PyObject_GetAttr(saver, names.ledger));
    LedgerObject* const books = ledger_object(ledger.ptr());
    if (books == nullptr) {
      throw py::error_already_set();
    }
    const WeakStorage identity(*expect_storage(storage));
    py::object made = owned(type->tp_alloc(type, 0));
    EntryObject* const self = entry_of(made.ptr());
    new (&self->residence) std::optional<Residence>();
    new (&self->identity) std::optional<WeakStorage>(identity);
    for (const auto slot : kSlots) {
      self->*slot = Py_NewRef(Py_None);
    }
    put(self->saver, saver);
    put(self->ledger, ledger.ptr());
    self->index = -1;
    self->version = look->version();
    self->residence.emplace(books->ledger, static_cast<int64_t>(look->storage_nbytes()));
    remember(books, *look, made.ptr(), false);
    return made.release().ptr();
  });
}

// Nobody will wait for its tickets any more. A ticket that holds a storage lets go of it in order.
void abandon_quietly(PyObject* ticket) {
  const bool done = empty(ticket) || guarded<bool>(false, [&] {
                      abandon(ticket);
                      return true;
                    });
  if (!done) {
    PyErr_WriteUnraisable(ticket);
  }
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  for (const auto slot : kSlots) {
    Py_VISIT(entry_of(self)->*slot);
  }
  Py_VISIT(Py_TYPE(self));
  return 0;
}

// Its tickets and its place on the books stay until it dies.
int clear(PyObject* self) {
  EntryObject* const entry = entry_of(self);
  forget_identity(entry);
  for (const auto slot : {&EntryObject::saver, &EntryObject::storage, &EntryObject::away,
                          &EntryObject::way, &EntryObject::passage, &EntryObject::order}) {
    put(entry->*slot, Py_None);
  }
  return 0;
}

// First of all nobody finds it any more: a ticket may let go of the GIL, and no other thread may
// take hold of an entry that is dying.
void dealloc(PyObject* self) {
  EntryObject* const entry = entry_of(self);
  PyTypeObject* const type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  if (entry->weak_references != nullptr) {
    PyObject_ClearWeakRefs(self);
  }
  if (entry->residence) {
    forget_identity(entry);
  }
  entry->residence.~optional();
  PyObject *kind, *value, *traceback;
  PyErr_Fetch(&kind, &value, &traceback);
  abandon_quietly(entry->departure);
  abandon_quietly(entry->arrival);
  PyErr_Restore(kind, value, traceback);
  for (const auto slot : kSlots) {
    Py_CLEAR(entry->*slot);
  }
  entry->identity.~optional();
  type->tp_free(self);
  Py_DECREF(type);
}

PyMethodDef methods[] = {
    {"leave", as_method(py_leave), METH_FASTCALL,
     "leave(way, away, departure): it is being sent; the ticket holds the storage from here on."},
    {"sent", py_sent, METH_NOARGS,
     "Whether the send has ended. One that failed gives the storage back: nothing is lost."},
    {"gone", as_method(py_gone), METH_FASTCALL | METH_KEYWORDS,
     "gone(wait=False): notice whether a leaving storage really went away. What was gathered is "
     "gone before its bytes are anywhere else for sure; `wait` for that, instead of saying no."},
    {"lingers", py_lingers, METH_NOARGS, "Whether it is leaving and somebody holds it still."},
    {"fetch", py_fetch, METH_NOARGS,
     "Start bringing the bytes back into a storage of memswap's own. May be out of memory."},
    {"bring", py_bring, METH_NOARGS,
     "The storage: the one that is still there, the one that was fetched, or else a fetch now, "
     "which counts as a stall. The caller waits for `arrival` before it reads."},
    {"lock", py_lock, METH_NOARGS, "Hold the storage, if anybody does. Whether there was one."},
    {"move", py_move, METH_O, "Change the state, or raise EntryStateError."},
    {"drop_storage", py_let_go, METH_NOARGS, "Let go of the storage: the away form is there."},
    {"drop_away", py_forget_away, METH_NOARGS, "Let go of the away form: the storage is there."},
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
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

#define MEMSWAP_SLOT(name) {#name, T_OBJECT_EX, offsetof(EntryMembers, name), 0, nullptr}
#define MEMSWAP_COUNT(name) {#name, T_LONGLONG, offsetof(EntryMembers, name), 0, nullptr}
PyMemberDef members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(EntryMembers, weak_references), READONLY, nullptr},
    {"saver", T_OBJECT_EX, offsetof(EntryMembers, saver), READONLY, nullptr},
    MEMSWAP_SLOT(storage),
    MEMSWAP_SLOT(away),
    MEMSWAP_SLOT(way),
    MEMSWAP_SLOT(departure),
    MEMSWAP_SLOT(arrival),
    MEMSWAP_SLOT(passage),
    MEMSWAP_SLOT(order),
    MEMSWAP_COUNT(handles),
    MEMSWAP_COUNT(keeps),
    MEMSWAP_COUNT(unseen),
    {"index", T_PYSSIZET, offsetof(EntryMembers, index), 0, nullptr},
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
    {Py_tp_methods, methods},
    {Py_tp_getset, properties},
    {Py_tp_members, members},
    {Py_tp_doc, const_cast<char*>("One saved storage that may leave.")},
    {0, nullptr},
};

PyType_Spec spec = {
    .name = "memswap._C.Entry",
    .basicsize = sizeof(EntryObject),
    .itemsize = 0,
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = slots,
};

PyObject* interned(const char* name) {
  return owned(PyUnicode_InternFromString(name)).release().ptr();
}

}  // namespace

EntryObject* entry_object(PyObject* object) {
  if (!PyObject_TypeCheck(object, entry_type)) {
    PyErr_Format(PyExc_TypeError, "expected an Entry, found %R", object);
    return nullptr;
  }
  return entry_of(object);
}

void bind_entry(py::module_& module) {
  py::dict values;
  values["RESIDENT"] = "resident";
  values["LEAVING"] = "leaving";
  values["AWAY"] = "away";
  values["RETURNING"] = "returning";
  const py::object state =
      py::module_::import("enum").attr("Enum")("State", values, py::arg("module") = "memswap._C");
  module.attr("State") = state;
  // In the order of the native State.
  states = {state.attr("RESIDENT").cast<py::object>().release().ptr(),
            state.attr("LEAVING").cast<py::object>().release().ptr(),
            state.attr("AWAY").cast<py::object>().release().ptr(),
            state.attr("RETURNING").cast<py::object>().release().ptr()};
  block_type = reinterpret_cast<PyTypeObject*>(py::type::of<Block>().release().ptr());
  encoded_type = reinterpret_cast<PyTypeObject*>(py::type::of<EncodedStorage>().release().ptr());
  names = {.add = interned("add"),
           .bring = interned("bring"),
           .frees_first = interned("frees_first"),
           .held = interned("held"),
           .ledger = interned("ledger"),
           .nbytes = interned("nbytes"),
           .sent_safely = interned("sent_safely"),
           .stay = interned("stay"),
           .stays_on_device = interned("stays_on_device")};
  entry_type = add_type(module, "Entry", spec);
}

}  // namespace memswap
