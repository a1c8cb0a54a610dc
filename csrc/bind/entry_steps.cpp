// The steps that saved storages take.
#include <pybind11/pybind11.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <stdexcept>
#include <string>
#include <utility>

#include "calls.h"
#include "engine/block_form.h"
#include "entry.h"
#include "ledger.h"
#include "passage.h"
#include "python_type.h"

namespace memswap {
namespace py = pybind11;

namespace {

// Set once, by bind_entry_steps: the members of Python's State, and a name.
std::array<PyObject*, 4> states;
struct Names {
  PyObject *keep, *tell_once;
} names;

LedgerObject* ledger_of(EntryObject* self) { return reinterpret_cast<LedgerObject*>(self->ledger); }

[[noreturn]] void refuse(EntryObject* self, State to) {
  const py::object error = py::module_::import("memswap.errors").attr("EntryStateError");
  const std::string words = described(self) + " cannot go from " +
                            word_of(self->residence->state()) + " to " + word_of(to) +
                            "; this is a bug in memswap, please report it with this traceback";
  PyErr_SetString(error.ptr(), words.c_str());
  throw py::error_already_set();
}

// A send has failed: its ticket gives the storage back, and the user hears why, once.
void stay(EntryObject* self, Ticket& departure) {
  require(self, self->residence->move(State::kResident), State::kResident);
  self->storage = departure.kept_storage();
  const py::object ledger = py::reinterpret_borrow<py::object>(self->ledger);
  ledger.attr(py::handle(names.keep))(self->away->short_of(), self->residence->nbytes());
  drop_away(self);
  try {
    departure.synchronize();
  } catch (const TransferError& error) {
    const std::string words = std::string("a storage stays where it is: ") + error.what();
    ledger.attr(py::handle(names.tell_once))("transfer", words);
  }
}

// It came back as this, behind that ticket.
void take(EntryObject* self, Returning back) {
  self->arrival = std::move(back.arrival);
  require(self, self->residence->come_back(), State::kReturning);
  forget_identity(self);
  self->identity.emplace(*back.storage);
  self->storage = std::move(back.storage);
  self->fetched = 1;
  self->unseen = self->handles;
  count_held(self);  // a frame may have come back too
}

// Whether the bytes of a storage that is gone are elsewhere for sure. If they could not be sent,
// the ticket gives the storage back.
bool sent_safely(EntryObject* self, bool wait) {
  if (wait) {
    const TicketPtr departure = self->departure;
    try {
      departure->wait();
      return true;
    } catch (const TransferError&) {
      // noticed below
    }
  }
  return sent(self) && self->residence->state() == State::kLeaving;
}

}  // namespace

const char* word_of(State state) {
  switch (state) {
    case State::kResident:
      return "resident";
    case State::kLeaving:
      return "leaving";
    case State::kAway:
      return "away";
    case State::kReturning:
      return "returning";
  }
  return "nowhere";
}

std::string described(EntryObject* self) {
  return "<entry of " + std::to_string(self->residence->nbytes()) + " bytes, " +
         word_of(self->residence->state()) + ", " + std::to_string(self->handles) + " save(s)>";
}

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

// What the away form takes up now.
void count_held(EntryObject* self) {
  if (self->away) {
    self->residence->count_away(static_cast<int64_t>(self->away->device_nbytes()),
                                static_cast<int64_t>(self->away->pool_nbytes()));
  }
}

void release_frame(EntryObject* self) {
  if (const AwayFormPtr away = self->away) {
    away->wait_sent();
    count_held(self);
  }
}

void leave(EntryObject* self, Leaving leaving) {
  self->departure = std::move(leaving.departure);
  require(self, self->residence->leave(), State::kLeaving);
  self->away = std::move(leaving.away);
  count_held(self);
}

bool swap(EntryObject* self, BlockSender& sender, const StorageRefPtr& storage) {
  std::optional<Leaving> sent = sender.send(storage);
  if (!sent) {
    return false;
  }
  leave(self, std::move(*sent));
  return true;
}

bool sent(EntryObject* self) {
  const TicketPtr departure = self->departure;
  if (!departure || !departure->done()) {
    return false;
  }
  if (departure->failed()) {
    stay(self, *departure);
  }
  return true;
}

bool gone(EntryObject* self, bool wait) {
  const State state = self->residence->state();
  if (state != State::kLeaving || !self->identity->expired()) {
    return state == State::kAway;
  }
  if (self->away->frees_first() && !sent_safely(self, wait)) {
    return false;
  }
  require(self, self->residence->go(), State::kAway);
  return true;
}

bool lingers(EntryObject* self) {
  return self->residence->state() == State::kLeaving && !gone(self, false);
}

int64_t returning_nbytes(EntryObject* self) {
  if (!self->away || self->storage || !gone(self, false)) {
    return 0;
  }
  return self->residence->nbytes() + static_cast<int64_t>(self->away->returning_nbytes());
}

void fetch(EntryObject* self) {
  const AwayFormPtr away = self->away;
  if (!away) {
    throw std::logic_error("a storage that is not away cannot be fetched");
  }
  take(self, away->bring());
}

bool fetch_ahead(EntryObject* self) {
  if (!self->away || self->storage || !self->away->works_ahead() || !gone(self, false)) {
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
  self->storage = std::move(held);
  self->unseen = self->handles;
  self->residence->count_resident(true);
  return true;
}

void drop_storage(EntryObject* self) {
  const StorageRefPtr dropped = std::exchange(self->storage, nullptr);
  require(self, self->residence->move(State::kAway), State::kAway);
  self->residence->count_resident(false);
}

void drop_away(EntryObject* self) {
  const AwayFormPtr dropped = std::exchange(self->away, nullptr);
  self->residence->count_away(0, 0);
}

bool retain(EntryObject* self) {
  if (!self->storage && !lock(self)) {
    return false;
  }
  const State state = self->residence->state();
  if (state == State::kLeaving || state == State::kAway) {
    require(self, self->residence->move(State::kResident), State::kResident);
  }
  return true;
}

void let_go(EntryObject* self) {
  if (!self->storage || !self->away) {
    return;
  }
  if (self->residence->state() == State::kReturning) {
    require(self, self->residence->move(State::kResident), State::kResident);
  }
  drop_storage(self);
}

bool held_by_handles_only(EntryObject* self) {
  const StorageRefPtr storage = self->identity->lock();
  // Beside the handles, only `storage` itself holds it.
  return storage && static_cast<long long>(storage->storage.use_count()) - 1 <= self->keeps;
}

bool lost_memory(EntryObject* self) {
  return self->storage &&
         static_cast<int64_t>(self->storage->storage.nbytes()) != self->residence->nbytes();
}

StorageRefPtr bring(EntryObject* self) {
  Residence& residence = *self->residence;
  const bool was_sent = residence.state() == State::kLeaving && sent(self);
  if (!self->storage) {
    if (lock(self)) {
      if (was_sent && !empty(self->passage)) {  // leaving freed nothing
        note_held(self->passage, self->index);
      }
    } else if (gone(self, true)) {
      const bool waits = self->away->works_ahead() || self->away->device_nbytes() > 0 ||
                         self->away->pool_nbytes() > 0;  // a recipe has nothing to wait for
      fetch(self);
      residence.ledger().stalls += waits ? 1 : 0;
    } else if (!self->storage) {  // a send that failed gives the storage back
      throw std::logic_error("a storage is neither here nor away");
    }
  }
  StorageRefPtr storage = self->storage;
  if (residence.state() != State::kResident) {
    require(self, residence.move(State::kResident), State::kResident);
  }
  if (--self->unseen <= 0 && self->away) {
    drop_storage(self);  // every save has seen the bytes: whoever uses them holds them
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
  names = {.keep = interned("keep"), .tell_once = interned("tell_once")};
}

}  // namespace memswap
