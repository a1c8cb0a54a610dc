// An Entry of Python's, and the steps that it takes.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <optional>

#include "books/residence.h"
#include "storage/storage.h"

namespace memswap {

class EntryRow;

// What Python reaches by its offset.
struct EntryMembers {
  PyObject_HEAD PyObject* weak_references;
  // Python's, and nobody's business here but for the calls below. None: nothing.
  PyObject* saver;
  PyObject* ledger;     // a LedgerObject: `residence` writes to it
  PyObject* storage;    // a StorageRef, where the entry itself holds the storage
  PyObject* away;       // the away form
  PyObject* way;        // how it comes back
  PyObject* departure;  // the ticket of its send
  PyObject* arrival;    // the ticket of its return
  PyObject* passage;    // a PassageObject, which refers to the entry without owning it
  PyObject* order;
  Py_ssize_t index;   // in the passage; -1: none
  long long handles;  // saves whose storage left
  long long keeps;    // saves whose tensor stayed
  long long unseen;   // saves that have not been unpacked since the storage came back
  long long version;
  char fetched;  // whether the storage is one that memswap made
  char gathers;  // whether the storage may be gone before its bytes are elsewhere for sure
};

struct EntryObject : EntryMembers {
  std::optional<Residence> residence;
  std::optional<WeakStorage> identity;
  // Its place among those that leave (departing.h). nullptr: it has none.
  EntryRow* row;
  EntryObject *before, *after;
};

inline EntryObject* entry_of(PyObject* self) { return reinterpret_cast<EntryObject*>(self); }
inline PyObject* object_of(EntryObject* entry) { return reinterpret_cast<PyObject*>(entry); }

// An object as an entry, borrowed. nullptr with TypeError set: it is none.
EntryObject* entry_object(PyObject* object);
bool is_entry(PyObject* object);

// An entry that is not owned where it is found, for as long as the caller works with it. Empty
// where there is none, or it is being deallocated: that may run code, and must not bring it back.
inline pybind11::object held_entry(EntryObject* entry) {
  if (entry == nullptr || Py_REFCNT(object_of(entry)) == 0) {
    return {};
  }
  return pybind11::reinterpret_borrow<pybind11::object>(object_of(entry));
}

inline void put(PyObject*& slot, PyObject* value) {
  Py_INCREF(value);
  Py_XSETREF(slot, value);
}

// --- the steps, entry_steps.cpp: what Entry's methods do (their words: entry.cpp)
// -------

// EntryStateError unless the step was legal.
void require(EntryObject* self, bool legal_step, State to);

void forget_identity(EntryObject* self);
void count_held(EntryObject* self);
// What comes next comes after a frame's way to a pool: it is off the device. Nothing for others.
void release_frame(EntryObject* self);
void leave(EntryObject* self, PyObject* way, PyObject* away, PyObject* departure);
bool swap(EntryObject* self, PyObject* way, PyObject* storage);
bool sent(EntryObject* self);
bool gone(EntryObject* self, bool wait);
bool lingers(EntryObject* self);
// Bytes that come to the device when it starts back, its frame's included; 0: it is not away.
int64_t returning_nbytes(EntryObject* self);
void fetch(EntryObject* self);
bool fetch_ahead(EntryObject* self);
bool lock(EntryObject* self);
void let_go(EntryObject* self);
pybind11::object bring(EntryObject* self);

// The members of Python's State, in the order of the native one.
PyObject* state_object(State state);

void bind_entry_steps(pybind11::module_& module);

}  // namespace memswap
