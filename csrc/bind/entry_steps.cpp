// The steps that every saved storage takes. What is rare, and all words, stand in
// python/memswap/engine/entry.py.
#include <pybind11/pybind11.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <stdexcept>
#include <utility>

#include "calls.h"
#include "codec/codec_lane.h"
#include "entry.h"
#include "ledger.h"
#include "passage.h"
#include "pool/block.h"
#include "python_type.h"
#include "storage/saved_view.h"
#include "storage_ref.h"
#include "ticket.h"
#include "way.h"

namespace memswap {
namespace py = pybind11;

namespace {

// Set once, by bind_entry_steps: the members of Python's State, types, and names.
std::array<PyObject*, 4> states;
PyTypeObject* block_type = nullptr;
PyTypeObject* encoded_type = nullptr;
struct Names {
  PyObject *bring, *frees_first, *nbytes, *sent_safely, *stay, *stays_on_device, *works_ahead;
} names;

LedgerObject* ledger_of(EntryObject* self) { return reinterpret_cast<LedgerObject*>(self->ledger); }

[[noreturn]] void refuse(EntryObject* self, State to) {
  const py::object raise = py::module_::import("memswap.engine.entry").attr("illegal_move");
  raise(py::handle(object_of(self)), py::handle(state_object(to)));
  throw py::error_already_set();  // not reached: illegal_move raises
}

bool ask(PyObject* way, PyObject* name) { return truth(PyObject_GetAttr(way, name)); }

// It came back as this, behind that ticket.
void take(EntryObject* self, PyObject* storage, PyObject* arrival) {
  put(self->arrival, arrival);
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

}  // namespace

PyObject* state_object(State state) { return states[static_cast<size_t>(state)]; }

void require(EntryObject* self, bool legal_step, State to) {
  if (!legal_step) {
    refuse(self, to);
  }
}

// Whatever else has this address from here on, it is not what was saved.
void forget_identity(EntryObject* self) {
  forget(ledger_of(self), self->identity->key(), object_of(self));
}

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
  if (swap_way(self->way) == nullptr && ask(self->way, names.stays_on_device)) {
    self->residence->count_away(nbytes, 0);
  } else {
    self->residence->count_away(0, nbytes);
  }
}

void release_frame(EntryObject* self) {
  if (!PyObject_TypeCheck(self->away, encoded_type)) {
    return;
  }
  const auto frame = py::handle(self->away).cast<EncodedStoragePtr>();
  {
    const py::gil_scoped_release without_gil;
    frame->wait_sent();
  }
  count_held(self);
}

void leave(EntryObject* self, PyObject* way, PyObject* away, PyObject* departure) {
  put(self->departure, departure);
  require(self, self->residence->leave(), State::kLeaving);
  put(self->way, way);
  put(self->away, away);
  self->gathers = swap_way(way) == nullptr && ask(way, names.frees_first);
  count_held(self);
}

bool swap(EntryObject* self, PyObject* way, PyObject* storage) {
  SwapWayObject* const raw = swap_way(way);
  if (raw == nullptr) {
    throw py::type_error("swap needs a SwapWay");
  }
  const Sent sent = send(raw, storage);
  if (!sent.away) {
    return false;
  }
  leave(self, way, sent.away.ptr(), sent.departure.ptr());
  return true;
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
    owned(PyObject_CallMethodOneArg(object_of(self), names.stay, departure.ptr()));
  }
  return true;
}

bool gone(EntryObject* self, bool wait) {
  const State state = self->residence->state();
  if (state != State::kLeaving || !self->identity->expired()) {
    return state == State::kAway;
  }
  if (self->gathers && !truth(PyObject_CallMethodOneArg(object_of(self), names.sent_safely,
                                                        wait ? Py_True : Py_False))) {
    return false;
  }
  require(self, self->residence->go(), State::kAway);
  return true;
}

bool lingers(EntryObject* self) {
  return self->residence->state() == State::kLeaving && !gone(self, false);
}

int64_t returning_nbytes(EntryObject* self) {
  if (empty(self->away) || !empty(self->storage) || !gone(self, false)) {
    return 0;
  }
  int64_t nbytes = self->residence->nbytes();
  if (PyObject_TypeCheck(self->away, encoded_type)) {
    const auto* encoded = py::handle(self->away).cast<const EncodedStorage*>();
    nbytes += encoded->swapped() ? static_cast<int64_t>(encoded->nbytes()) : 0;
  }
  return nbytes;
}

void fetch(EntryObject* self) {
  if (SwapWayObject* const raw = swap_way(self->way)) {
    const Brought brought = bring(raw, self->away);
    take(self, brought.storage.ptr(), brought.arrival.ptr());
    return;
  }
  const py::object pair = owned(PyObject_CallMethodOneArg(self->way, names.bring, self->away));
  const Brought brought = brought_by(pair);
  take(self, brought.storage.ptr(), brought.arrival.ptr());
}

bool fetch_ahead(EntryObject* self) {
  if (empty(self->away) || empty(self->way) || !empty(self->storage)) {
    return false;
  }
  if (swap_way(self->way) == nullptr && !ask(self->way, names.works_ahead)) {
    return false;
  }
  if (!gone(self, false)) {
    return false;
  }
  fetch(self);
  return true;
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
        note_held(self->passage, self->index);
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

void bind_entry_steps(py::module_& module) {
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
  names = {.bring = interned("bring"),
           .frees_first = interned("frees_first"),
           .nbytes = interned("nbytes"),
           .sent_safely = interned("sent_safely"),
           .stay = interned("stay"),
           .stays_on_device = interned("stays_on_device"),
           .works_ahead = interned("works_ahead")};
}

}  // namespace memswap
