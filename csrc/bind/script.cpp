// Script, as Python sees it, and how a saver follows it: for as long as what is saved is what the
// script expects, nobody has to be asked.
#include "script.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <new>
#include <utility>

#include "calls.h"
#include "departing.h"
#include "handle.h"
#include "ledger.h"
#include "python_type.h"
#include "storage/saved_view.h"
#include "view.h"

namespace memswap {
namespace py = pybind11;

namespace {

// Set once, by bind_script.
PyTypeObject* script_type = nullptr;
struct Names {
  PyObject *hurry, *keep_as_planned, *keep_refused;
} names;

ScriptObject* script_object(PyObject* self) { return reinterpret_cast<ScriptObject*>(self); }

Ledger& ledger_of(SaverObject* saver) {
  return reinterpret_cast<LedgerObject*>(saver->ledger)->ledger;
}

// --- saving -------------------------------------------------------------------------------------

bool same_text(PyObject* one, PyObject* other) {
  return one == other || (PyUnicode_CheckExact(one) && PyUnicode_CheckExact(other) &&
                          PyUnicode_Compare(one, other) == 0);
}

// A plan serves storages that are smaller by a quarter at most.
bool fits(int64_t nbytes, int64_t planned) {
  return nbytes <= planned && 4 * nbytes >= 3 * planned;
}

// The place of a storage in the script of a passage, if it is the one that is expected there.
const ScriptObject::Place* place_of(const ScriptObject* script, const PassageObject* passage,
                                    const Offer& offer, const SavedView& look) {
  const size_t index = passage->passage.size();
  if (index >= script->places.size()) {
    return nullptr;
  }
  const ScriptObject::Place& place = script->places[index];
  const auto nbytes = static_cast<int64_t>(look.storage_nbytes());
  if (place.action == ScriptObject::Action::kAsk || !fits(nbytes, place.nbytes) ||
      place.ordinal != offer.ordinal + 1 || nbytes < script->least_bytes ||
      look.device() != script->device || look.edited_part() || look.part_of_data() ||
      place.dtype != THPVariable_Unpack(offer.tensor).scalar_type() ||
      !same_text(place.unit.ptr(), offer.unit)) {
    return nullptr;
  }
  return &place;
}

// Bytes on the device at this moment of the plan.
void note_peak(SaverObject* saver, PassageObject* passage, int64_t more) {
  passage->peak_bytes = std::max(passage->peak_bytes, ledger_of(saver).resident_bytes + more);
}

// What comes next comes after the end of a send. One that failed gives the storage back, which its
// entry notices.
void wait_for_departure(const TicketPtr departure) {
  try {
    departure->wait();
  } catch (const TransferError&) {
  }
}

// What was released and is still held: by now it may be gone.
void look_at_released(PassageObject* passage) {
  if (passage->released.empty()) {
    return;
  }
  std::vector<size_t> looked_at;
  looked_at.swap(passage->released);
  for (const size_t index : looked_at) {
    const py::object held = held_entry(passage->entries.at(index));
    if (held && lingers(entry_of(held.ptr()))) {
      passage->released.push_back(index);
    }
  }
}

void saved(const ScriptObject* script, SaverObject* saver, EntryObject* entry) {
  PassageObject* const passage = passage_object(entry->passage);
  if (passage == nullptr) {
    throw py::error_already_set();
  }
  const auto index = static_cast<size_t>(entry->index);
  if (index < script->places.size()) {
    const ScriptObject::Place& place = script->places[index];
    for (const size_t released : place.releases) {
      release(saver, passage, released);
    }
    for (const size_t departed : place.departures) {
      if (const py::object held = held_entry(passage->entries.at(departed))) {
        release_frame(entry_of(held.ptr()));
      }
    }
  }
  note_peak(saver, passage, 0);
}

// --- the type -----------------------------------------------------------------------------------

std::vector<size_t> places_in(const py::handle& numbers, size_t most, const char* otherwise) {
  std::vector<size_t> found;
  for (const py::handle number : numbers) {
    found.push_back(number.cast<size_t>());
    if (found.back() > most) {
      throw py::value_error(otherwise);
    }
  }
  return found;
}

ScriptObject::Place read_place(const py::handle& given, size_t index, size_t count) {
  const auto parts = py::reinterpret_borrow<py::tuple>(given);
  if (!py::isinstance<py::tuple>(given) || parts.size() != 9) {
    throw py::type_error(
        "a place of a script is (unit, ordinal, nbytes, dtype, action, releases, departures, "
        "fetches, departs)");
  }
  ScriptObject::Place place;
  place.unit = parts[0];
  place.ordinal = parts[1].cast<int64_t>();
  place.nbytes = parts[2].cast<int64_t>();
  if (!THPDtype_Check(py::object(parts[3]).ptr())) {
    throw py::type_error("a place of a script has a torch.dtype");
  }
  place.dtype = reinterpret_cast<THPDtype*>(py::object(parts[3]).ptr())->scalar_type;
  const auto action = parts[4].cast<std::string>();
  if (action == "swap") {
    place.action = ScriptObject::Action::kSwap;
  } else if (action == "keep") {
    place.action = ScriptObject::Action::kKeep;
  } else if (action != "ask") {
    throw py::value_error("a script says swap, keep or ask, found " + action);
  }
  const char* const early = "a script releases what was saved by then, and nothing later";
  place.releases = places_in(parts[5], index, early);
  place.departures = places_in(parts[6], index, early);
  place.fetches = places_in(parts[7], count - 1, "a script fetches what it has a place for");
  place.departs = parts[8].cast<bool>();
  return place;
}

PyObject* make(PyTypeObject* type, PyObject* args, PyObject* named) {
  PyObject *device = nullptr, *sender = nullptr, *places = nullptr, *refrains = Py_None;
  long long least_bytes = 0;
  static const char* words[] = {"device", "sender", "least_bytes", "places", "refrains", nullptr};
  if (!PyArg_ParseTupleAndKeywords(args, named, "OOLO|O", const_cast<char**>(words), &device,
                                   &sender, &least_bytes, &places, &refrains)) {
    return nullptr;
  }
  return guarded<PyObject*>(nullptr, [&] {
    if (!py::isinstance<BlockSender>(py::handle(sender))) {
      throw py::type_error("a script needs a BlockSender");
    }
    const auto where = py::handle(device).cast<c10::Device>();
    std::vector<ScriptObject::Place> read;
    const auto given = py::cast<py::list>(places);
    for (const py::handle place : given) {
      read.push_back(read_place(place, read.size(), given.size()));
    }
    py::object made = owned(type->tp_alloc(type, 0));
    ScriptObject* const self = script_object(made.ptr());
    new (&self->places) std::vector<ScriptObject::Place>(std::move(read));
    new (&self->device) c10::Device(where);
    new (&self->sender)
        std::shared_ptr<BlockSender>(py::handle(sender).cast<std::shared_ptr<BlockSender>>());
    self->refrains = Py_NewRef(refrains);
    self->least_bytes = least_bytes;
    return made.release().ptr();
  });
}

// Units are texts, which refer to nothing.
int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(script_object(self)->refrains);
  Py_VISIT(Py_TYPE(self));
  return 0;
}

void dealloc(PyObject* object) {
  ScriptObject* const self = script_object(object);
  PyObject_GC_UnTrack(object);
  std::destroy_at(&self->places);
  std::destroy_at(&self->sender);
  Py_CLEAR(self->refrains);
  free_instance(object);
}

PyObject* py_saved(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  if (count != 2) {
    PyErr_SetString(PyExc_TypeError, "saved needs a saver and an entry");
    return nullptr;
  }
  return guarded<PyObject*>(nullptr, [&]() -> PyObject* {
    SaverObject* const saver = saver_object(args[0]);
    EntryObject* const entry = entry_object(args[1]);
    if (entry == nullptr) {
      throw py::error_already_set();
    }
    if (saver == nullptr) {
      throw py::type_error("saved needs a saver");
    }
    saved(script_object(self), saver, entry);
    Py_RETURN_NONE;
  });
}

PyObject* py_look(PyObject*, PyObject* given) {
  return guarded<PyObject*>(nullptr, [&]() -> PyObject* {
    PassageObject* const passage = passage_object(given);
    if (passage == nullptr) {
      throw py::error_already_set();
    }
    look_at_released(passage);
    Py_RETURN_NONE;
  });
}

Py_ssize_t length(PyObject* self) {
  return static_cast<Py_ssize_t>(script_object(self)->places.size());
}

PyMethodDef methods[] = {
    {"saved", as_method(py_saved), METH_FASTCALL,
     "saved(saver, entry): what follows the save of an entry of a passage of this script: what has "
     "to be gone by then is waited for."},
    {"look", py_look, METH_O,
     "look(passage): notice what was released, was still held then, and is gone by now."},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(make)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
    {Py_tp_methods, methods},
    {Py_sq_length, reinterpret_cast<void*>(length)},
    {Py_tp_doc, const_cast<char*>(
                    "Script(device, sender, least_bytes, places, refrains=None): what a plan does "
                    "with each storage of a passage. A place is (unit, ordinal, nbytes, dtype, "
                    "'swap' | 'keep' | 'ask', releases, departures, fetches, departs).")},
    {0, nullptr},
};

PyType_Spec spec = {
    .name = "memswap._C.Script",
    .basicsize = sizeof(ScriptObject),
    .itemsize = 0,
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = slots,
};

}  // namespace

void release(SaverObject* saver, PassageObject* passage, size_t index) {
  const py::object held = held_entry(passage->entries.at(index));
  if (!held) {
    return;
  }
  EntryObject* const entry = entry_of(held.ptr());
  if (entry->residence->state() == State::kResident && entry->storage) {
    owned(PyObject_CallMethodOneArg(reinterpret_cast<PyObject*>(saver), names.hurry, held.ptr()));
  }
  if (entry->residence->state() != State::kLeaving) {
    return;
  }
  wait_for_departure(entry->departure);
  if (lingers(entry)) {
    passage->released.push_back(index);
  }
}

py::object follow(SaverObject* saver, const Offer& offer) {
  if (empty(saver->director) || saver->watched != 0) {
    return {};
  }
  const auto alive = py::reinterpret_borrow<py::object>(saver->passage);
  PassageObject* const passage = passage_object(alive.ptr());
  if (passage == nullptr) {
    throw py::error_already_set();
  }
  if (passage->alone == 0 || empty(passage->script) || !passage->passage.demanded().empty()) {
    return {};
  }
  const auto held = py::reinterpret_borrow<py::object>(passage->script);
  const ScriptObject* const script = script_object(held.ptr());
  const SavedView& look = *saved_view_of(offer.view);
  const ScriptObject::Place* const place = place_of(script, passage, offer, look);
  const auto* const books = reinterpret_cast<LedgerObject*>(saver->ledger);
  const auto nbytes = static_cast<int64_t>(look.storage_nbytes());
  const bool room =
      passage->limit_bytes == 0 || books->ledger.resident_bytes + nbytes <= passage->limit_bytes;
  if (place == nullptr || !room || books->known.contains(look.storage_key()) ||
      torch::autograd::get_current_graph_task_id() != -1) {
    return {};
  }
  if (script->refrains != Py_None && truth(PyObject_CallNoArgs(script->refrains))) {
    return {};
  }
  PyObject* const object = reinterpret_cast<PyObject*>(saver);
  notice_some(saver->departing);
  learn_reports(saver);
  look_at_released(passage);
  ++offer.ordinal;
  const int64_t group = offer.group == Py_None ? kNoGroup : PyLong_AsLongLong(offer.group);
  if (PyErr_Occurred() != nullptr) {
    throw py::error_already_set();
  }
  const auto [why, never_freed] = admit(passage, nbytes, false, group);
  const Made made = make_entry(saver, offer.tensor, offer.view);
  EntryObject* const entry = entry_of(made.entry.ptr());
  PyObject* reason = Py_None;  // as the plan says
  bool leaves = false, refused = false;
  if (place->action == ScriptObject::Action::kSwap) {
    if (never_freed) {
      reason = why;
    } else if (swap(entry, *script->sender, made.storage)) {
      add_departing(saver->departing, entry);
      leaves = true;
    } else {
      refused = true;
    }
  }
  py::object handle;
  if (leaves) {
    handle = moved(made.entry.ptr(), offer.view);
  } else if (refused) {
    PyObject* const arguments[] = {object, offer.tensor, made.entry.ptr()};
    handle = owned(PyObject_VectorcallMethod(names.keep_refused, arguments, 3, nullptr));
  } else {
    PyObject* const arguments[] = {object, offer.tensor, made.entry.ptr(), reason};
    handle = owned(PyObject_VectorcallMethod(names.keep_as_planned, arguments, 4, nullptr));
  }
  saved(script, saver, entry);
  return handle;
}

bool director_hears(const SaverObject* saver, EntryObject* entry) {
  if (saver->watched != 0 || empty(entry->passage) || entry->passage != saver->backward) {
    return true;
  }
  const auto* const passage = reinterpret_cast<const PassageObject*>(entry->passage);
  return passage->alone == 0 || empty(passage->script);
}

void served(SaverObject* saver, EntryObject* entry) {
  if (empty(entry->passage)) {
    return;
  }
  auto* const passage = reinterpret_cast<PassageObject*>(entry->passage);
  const ScriptObject* const script = script_of(passage);
  if (script == nullptr) {
    return;
  }
  // What every save has seen is off the books, while its last consumer still holds it.
  const bool used = entry->residence->state() == State::kAway;
  note_peak(saver, passage, used ? entry->residence->nbytes() : 0);
  const auto index = static_cast<size_t>(entry->index);
  if (index < script->places.size() && script->places[index].departs) {
    release_frame(entry);
  }
}

const ScriptObject* script_of(const PassageObject* passage) {
  return empty(passage->script) ? nullptr : script_object(passage->script);
}

PyObject* script_or_none(PyObject* object) {
  if (object != Py_None && !Py_IS_TYPE(object, script_type)) {
    PyErr_Format(PyExc_TypeError, "expected a Script or None, found %R", object);
    return nullptr;
  }
  return object;
}

void bind_script(py::module_& module) {
  names = {.hurry = interned("hurry"),
           .keep_as_planned = interned("keep_as_planned"),
           .keep_refused = interned("keep_refused")};
  script_type = add_type(module, "Script", spec);
}

}  // namespace memswap
