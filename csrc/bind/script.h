// A Script of Python's: what a plan does with each storage of a passage. It is data; why it says
// what it says is not known here.
#pragma once

#include <c10/core/ScalarType.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/block_form.h"
#include "passage.h"
#include "saver.h"

namespace memswap {

struct ScriptObject {
  enum class Action : uint8_t { kAsk, kKeep, kSwap };

  struct Place {
    pybind11::object unit;
    int64_t ordinal = 0;
    int64_t nbytes = 0;
    c10::ScalarType dtype = c10::ScalarType::Undefined;
    Action action = Action::kAsk;
    // After its save: sends, and frames on their way, that are waited for.
    std::vector<size_t> releases, departures;
    // At its first demand: what starts back.
    std::vector<size_t> fetches;
    // After a demand: its frame is waited for, if it is on its way still.
    bool departs = false;
  };

  PyObject_HEAD std::vector<Place> places;
  std::shared_ptr<BlockSender> sender;  // of what is swapped
  PyObject* refrains;                   // called: whether no storage leaves now, or None
  int64_t least_bytes;                  // of a storage that it knows
  c10::Device device;
};

// A tensor that is saved, and who saves it: a visit without an action of its own, of a unit that
// the policy covers.
struct Offer {
  PyObject* tensor;
  PyObject* view;  // a SavedView
  PyObject* unit;
  PyObject* group;
  Py_ssize_t& ordinal;  // of the unit's last storage
};

// Does with a storage what the script of the current passage says. Its handle; or nothing where
// Python decides, and nothing has happened.
pybind11::object follow(SaverObject* saver, const Offer& offer);

// What comes next comes after a storage of a passage has left, if it is leaving or waits to.
void release(SaverObject* saver, PassageObject* passage, size_t index);

// The script of a passage, borrowed. nullptr: it has none.
const ScriptObject* script_of(const PassageObject* passage);

// An object that a passage may have as its script, borrowed: a Script or None. nullptr with
// TypeError set: it is neither.
PyObject* script_or_none(PyObject* object);

// Whether the director has to hear of a demand that is about to be served, and not only the script.
bool director_hears(const SaverObject* saver, EntryObject* entry);

// What follows a demand that was served, where there is a script.
void served(SaverObject* saver, EntryObject* entry);

}  // namespace memswap
