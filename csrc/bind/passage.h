// A Passage of Python's.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

#include "engine/passage.h"
#include "entry.h"

namespace memswap {

struct PassageObject {
  PyObject_HEAD Passage passage;
  // Borrowed: an entry takes itself off when it dies. nullptr: it is dead, or has not been placed.
  std::vector<EntryObject*> entries;
  std::vector<int64_t> groups;  // of checkpoint regions; kNoGroup: none
  // Python's; None: nothing.
  PyObject* forecast;  // that its storages agree with so far, a ForecastObject
  PyObject* held;      // places of storages that stayed alive although they had left, a set
  PyObject* course;    // what a director knows of it
  PyObject* script;    // what a plan says of its storages, a ScriptObject
  char alone;          // the script is followed without asking the director
  int64_t peak_bytes;  // resident ones, the most at a mark of the script
  std::vector<size_t> released;  // by the script, and still held by somebody then
  // Resident bytes that what starts back stays below, whatever was planned; 0: as many as come.
  int64_t limit_bytes;
  std::vector<size_t> postponed;  // what was to start back, and found no room yet
};

constexpr int64_t kNoGroup = -1;

// Why a storage should stay, in Python's words, or None; and whether that is because leaving would
// free nothing.
struct Verdict {
  PyObject* why;  // borrowed
  bool never_freed;
};

// The next storage is saved.
Verdict admit(PassageObject* passage, int64_t nbytes, bool decoded, int64_t group);

// A storage is demanded. The entries that are to be brought back now.
std::vector<pybind11::object> demand(PassageObject* passage, size_t index);

// The entry of what was admitted last. Throws ValueError.
void place(PassageObject* passage, EntryObject* entry);

// An object as a passage, borrowed. nullptr with TypeError set: it is none.
PassageObject* passage_object(PyObject* object);

// The entry will not be found in its passage any more. Runs nothing of Python's.
void take_off(EntryObject* entry);

// A storage of a passage left, and was not freed by that.
void note_held(PyObject* passage, Py_ssize_t index);

}  // namespace memswap
