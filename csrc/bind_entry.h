// An Entry of Python's.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>

#include "residence.h"
#include "storage.h"

namespace memswap {

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
  PyObject* passage;
  PyObject* order;
  Py_ssize_t index;   // in the passage
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
};

inline EntryObject* entry_of(PyObject* self) { return reinterpret_cast<EntryObject*>(self); }

// An object as an entry, borrowed. nullptr with TypeError set: it is none.
EntryObject* entry_object(PyObject* object);

}  // namespace memswap
