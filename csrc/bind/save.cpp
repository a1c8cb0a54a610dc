#include "save.h"

#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "calls.h"
#include "departing.h"
#include "handle.h"
#include "ledger.h"
#include "passage.h"
#include "python_type.h"
#include "storage/saved_view.h"

namespace memswap {
namespace py = pybind11;

namespace {

constexpr int kNoGraphTask = -1;

LedgerObject* ledger_of(SaverObject* saver) {
  return reinterpret_cast<LedgerObject*>(saver->ledger);
}

// A tensor that stays for good, whose storage is known: once, however often it is saved.
py::object stay(SaverObject* saver, PyObject* tensor, const SavedView& look, const char* reason) {
  count_kept(ledger_of(saver), reason, static_cast<int64_t>(look.storage_nbytes()));
  return kept(tensor, new_stay(ledger_of(saver), look).ptr());
}

// Whether memory that no operator made may hold something else than in an earlier forward. A buffer
// that numpy fills for each batch counts no edits; what left took along the bytes of then, and a
// graph that nobody runs any more may keep them. (What shares tables and masks between its batches
// moves them once.)
bool refilled(const SaverObject* saver, PyObject* known, const SavedView& look) {
  if (saver->shares_batches != 0 || look.computed() || !is_entry(known)) {
    return false;
  }
  const EntryObject* const entry = entry_of(known);
  return entry->away && entry->passage != saver->passage;
}

// The handle of one more save of a storage that is known.
py::object save_again(SaverObject* saver, PyObject* tensor, PyObject* view, const SavedView& look,
                      const py::object& known, const SavePlace& place) {
  Ledger& numbers = ledger_of(saver)->ledger;
  ++numbers.deduplicated_tensors;
  numbers.deduplicated_bytes += static_cast<int64_t>(look.nbytes());
  if (!is_entry(known.ptr())) {
    return kept(tensor, known.ptr());
  }
  if (!empty(saver->director)) {
    PyObject* const arguments[] = {saver->director, known.ptr(), place.unit};
    static PyObject* const again = interned("again");
    owned(PyObject_VectorcallMethod(again, arguments, 3, nullptr));
  }
  const EntryObject* const entry = entry_of(known.ptr());
  if (!entry->away && !entry->storage) {
    return kept(tensor, known.ptr());
  }
  // It has left, or waits to: the entry holds the storage.
  if (saver->shares_batches == 0) {
    return moved(known.ptr(), view);
  }
  PyObject* const arguments[] = {reinterpret_cast<PyObject*>(saver), known.ptr(), view};
  static PyObject* const join = interned("moved");
  return owned(PyObject_VectorcallMethod(join, arguments, 3, nullptr));
}

// What the table says of a storage on a device, and the row; kAsk: Python decides.
std::pair<SaveTable::Action, SaveTable::DeviceRow*> look_up(SaveTable& table, c10::Device device) {
  if (table.action == SaveTable::Action::kKeep) {
    return {SaveTable::Action::kKeep, nullptr};
  }
  for (SaveTable::DeviceRow& row : table.devices) {
    if (row.device == device) {
      const SaveTable::Action action = table.by_device ? row.action : table.action;
      const bool ready = action == SaveTable::Action::kSwap && row.sender;
      return {ready ? action : SaveTable::Action::kAsk, &row};
    }
  }
  return {SaveTable::Action::kAsk, nullptr};
}

// A storage that the table swaps. Its handle; or nothing where there was no room for it and Python
// has to say so, `refused` being its entry.
py::object swap_new(SaverObject* saver, PyObject* tensor, PyObject* view, const SavedView& look,
                    BlockSender& sender, SavePlace& place, py::object& refused) {
  PyObject* const self = reinterpret_cast<PyObject*>(saver);
  const auto nbytes = static_cast<int64_t>(look.storage_nbytes());
  PassageObject* passage = passage_object(saver->passage);
  if (passage == nullptr) {
    throw py::error_already_set();
  }
  if (!passage->passage.demanded().empty()) {
    static PyObject* const begin_passage = interned("begin_passage");
    owned(PyObject_CallMethodNoArgs(self, begin_passage));
    passage = passage_object(saver->passage);
  }
  const auto alive = py::reinterpret_borrow<py::object>(saver->passage);
  notice_some(saver->departing);
  learn_reports(saver);
  ++place.ordinal;
  const int64_t group = place.group == Py_None ? kNoGroup : PyLong_AsLongLong(place.group);
  if (PyErr_Occurred() != nullptr) {
    throw py::error_already_set();
  }
  const Verdict verdict = admit(passage, nbytes, false, group);
  const Made made = make_entry(saver, tensor, view);
  if (verdict.why != Py_None) {
    count_kept(ledger_of(saver), verdict.why, nbytes);
    return kept(tensor, made.entry.ptr());
  }
  EntryObject* const entry = entry_of(made.entry.ptr());
  if (!swap(entry, sender, made.storage)) {
    refused = made.entry;
    return {};
  }
  add_departing(saver->departing, entry);
  return moved(made.entry.ptr(), view);
}

}  // namespace

py::object keep(SaverObject* saver, PyObject* tensor, PyObject* view, const char* reason) {
  const auto nbytes = static_cast<int64_t>(saved_view_of(view)->storage_nbytes());
  count_kept(ledger_of(saver), reason, nbytes);
  return kept(tensor, Py_None);
}

py::object save(SaverObject* saver, PyObject* tensor, PyObject* view, SavePlace place) {
  const SavedView& look = *saved_view_of(view);
  PyObject* const self = reinterpret_cast<PyObject*>(saver);
  const py::object known = find(ledger_of(saver), look);
  if (known.ptr() == Py_False) {
    return keep(saver, tensor, view, "edited in parts");
  }
  if (!known.is_none() && !refilled(saver, known.ptr(), look)) {
    return save_again(saver, tensor, view, look, known, place);
  }
  SaveTable& table = *saver->table;
  if (static_cast<int64_t>(look.storage_nbytes()) < table.min_bytes) {
    return keep(saver, tensor, view, "small");
  }
  if (look.edited_part()) {
    return stay(saver, tensor, look, "edited in parts");
  }
  if (look.part_of_data()) {
    return keep(saver, tensor, view, "part of data");
  }
  if (!place.covered) {
    return keep(saver, tensor, view, "policy");
  }
  if (torch::autograd::get_current_graph_task_id() != kNoGraphTask) {
    return keep(saver, tensor, view, "saved in backward");
  }
  if (empty(saver->director) && !place.has_action) {
    const auto [action, row] = look_up(table, look.device());
    if (action == SaveTable::Action::kKeep) {
      return stay(saver, tensor, look, "policy");
    }
    if (action == SaveTable::Action::kSwap) {
      const std::shared_ptr<BlockSender> sender = row->sender;
      py::object refused;
      py::object handle = swap_new(saver, tensor, view, look, *sender, place, refused);
      if (handle) {
        return handle;
      }
      static PyObject* const keep_refused = interned("keep_refused");
      PyObject* const arguments[] = {self, tensor, refused.ptr()};
      return owned(PyObject_VectorcallMethod(keep_refused, arguments, 3, nullptr));
    }
  }
  static PyObject* const save_new = interned("save_new");
  PyObject* const arguments[] = {self, tensor, view, place.visit};
  return owned(PyObject_VectorcallMethod(save_new, arguments, 4, nullptr));
}

}  // namespace memswap
