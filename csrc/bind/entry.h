// An Entry of Python's, and the steps that it takes.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <optional>
#include <string>

#include "engine/away.h"
#include "engine/residence.h"
#include "storage/storage.h"
#include "work/ticket.h"

namespace memswap {

class BlockSender;
class EntryRow;
class SavedView;
class Trial;
struct LedgerObject;

// What Python reaches by its offset.
struct EntryMembers {
  PyObject_HEAD PyObject* weak_references;
  // Python's, and nobody's business here but for the calls below. None: nothing.
  PyObject* saver;
  PyObject* ledger;   // a LedgerObject: `residence` writes to it
  PyObject* passage;  // a PassageObject, which refers to the entry without owning it
  PyObject* order;
  Py_ssize_t index;   // in the passage; -1: none
  long long handles;  // saves whose storage left
  long long keeps;    // saves whose tensor stayed
  long long unseen;   // saves that have not been unpacked since the storage came back
  long long version;
  char fetched;  // whether the storage is one that memswap made
};

struct EntryObject : EntryMembers {
  std::optional<Residence> residence;
  std::optional<WeakStorage> identity;
  StorageRefPtr storage;  // where the entry itself holds the storage
  AwayFormPtr away;
  TicketPtr departure;           // of its send
  TicketPtr arrival;             // of its return
  std::shared_ptr<Trial> trial;  // of its recipe, while its place is being learnt
  // Its place among those that leave (departing.h). nullptr: it has none.
  EntryRow* row;
  EntryObject *before, *after;
};

inline EntryObject* entry_of(PyObject* self) { return reinterpret_cast<EntryObject*>(self); }
inline PyObject* object_of(EntryObject* entry) { return reinterpret_cast<PyObject*>(entry); }

// The entry of a storage that a view looks at. Its saver has a LedgerObject.
pybind11::object new_entry(PyObject* saver, LedgerObject* ledger, const SavedView& look,
                           const StorageRef& storage);

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
void leave(EntryObject* self, Leaving leaving);
// By sending it into a block. Whether there was room; if not, nothing changed.
bool swap(EntryObject* self, BlockSender& sender, const StorageRefPtr& storage);
bool sent(EntryObject* self);
bool gone(EntryObject* self, bool wait);
bool lingers(EntryObject* self);
// Bytes that come to the device when it starts back, its frame's included; 0: it is not away.
int64_t returning_nbytes(EntryObject* self);
void fetch(EntryObject* self);
bool fetch_ahead(EntryObject* self);
bool lock(EntryObject* self);
// Lets go of the storage, whose away form is there; or of the away form, whose storage is there.
void drop_storage(EntryObject* self);
void drop_away(EntryObject* self);
// Holds on to a storage that has not gone away yet: then nothing has to come back. Whether there
// was one.
bool retain(EntryObject* self);
// Lets go of a storage again whose away form is still there. Nothing is copied.
void let_go(EntryObject* self);
// Whether nobody but our own handles holds a storage that stayed. Meant for its first demand, when
// all of them are still alive.
bool held_by_handles_only(EntryObject* self);
// Whether the storage that it holds has been resized since it was saved ([Note: Memory that is
// taken away] in storage/memory_share.h).
bool lost_memory(EntryObject* self);
StorageRefPtr bring(EntryObject* self);

// A state as messages name it, and the entry.
const char* word_of(State state);
std::string described(EntryObject* self);

// The members of Python's State, in the order of the native one.
PyObject* state_object(State state);

void bind_entry_steps(pybind11::module_& module);

}  // namespace memswap
