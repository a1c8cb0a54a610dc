// Passage, as Python sees it: the books of one forward. What they predict, and all that is rare,
// stand in python/memswap/engine/timeline.py, whose class is derived from this one.
#include "passage.h"

#include <pybind11/pybind11.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <new>
#include <span>
#include <string>
#include <utility>

#include "calls.h"
#include "forecast.h"
#include "python_type.h"
#include "script.h"

namespace memswap {
namespace py = pybind11;

namespace {

constexpr std::array kSlots = {
    &PassageObject::forecast,
    &PassageObject::held,
    &PassageObject::course,
    &PassageObject::script,
};

// Set once, by bind_passage.
PyTypeObject* passage_type = nullptr;
PyObject* expected_name = nullptr;

PassageObject* passage_of(PyObject* self) { return reinterpret_cast<PassageObject*>(self); }

// What it predicts, or nullptr.
const ForecastObject* known_forecast(const PassageObject* self) {
  return empty(self->forecast) ? nullptr : reinterpret_cast<ForecastObject*>(self->forecast);
}

size_t place_in(const PassageObject* self, PyObject* index) {
  const Py_ssize_t number = PyLong_AsSsize_t(index);
  if (number == -1 && PyErr_Occurred()) {
    throw py::error_already_set();
  }
  if (number < 0 || static_cast<size_t>(number) >= self->passage.size()) {
    throw py::index_error("expected a place in a passage of " +
                          std::to_string(self->passage.size()) + " storages, found " +
                          std::to_string(number));
  }
  return static_cast<size_t>(number);
}

std::vector<size_t> places(const py::handle& numbers) {
  std::vector<size_t> found;
  for (const py::handle number : numbers) {
    found.push_back(number.cast<size_t>());
  }
  return found;
}

// --- saving -------------------------------------------------------------------------------------

void add_place(PyObject* set, size_t index) {
  if (PySet_Add(set, owned(PyLong_FromSize_t(index)).ptr()) != 0) {
    throw py::error_already_set();
  }
}

// The verdict about a storage; a passage whose storages are other ones has no more verdicts.
Verdict verdict(PassageObject* self, size_t index, int64_t nbytes) {
  const ForecastObject* const known = known_forecast(self);
  if (known == nullptr) {
    return {Py_None, false};
  }
  if (!known->forecast.expects(index, nbytes)) {
    put(self->forecast, Py_None);
    return {Py_None, false};
  }
  switch (known->forecast.verdicts[index]) {
    case Forecast::Verdict::kNone:
      break;
    case Forecast::Verdict::kNeededAtOnce:
      return {known->needed_at_once, false};
    case Forecast::Verdict::kNeverFreed:
      add_place(self->held, index);
      return {known->never_freed, true};
  }
  return {Py_None, false};
}

PyObject* py_admit(PyObject* object, PyObject* const* args, Py_ssize_t count, PyObject* given) {
  static constexpr std::array words = {"nbytes", "decoded", "group"};
  std::array<PyObject*, 3> sorted = {nullptr, Py_False, Py_None};
  if (!sort_arguments(words, args, count, given, sorted)) {
    return nullptr;
  }
  return guarded<PyObject*>(nullptr, [&] {
    const auto [size, decoded, group] = sorted;
    if (size == nullptr) {
      throw py::type_error("admit needs a number of bytes");
    }
    const int64_t nbytes = PyLong_AsLongLong(size);
    const int64_t region = group == Py_None ? kNoGroup : PyLong_AsLongLong(group);
    if (PyErr_Occurred() != nullptr) {
      throw py::error_already_set();
    }
    return Py_NewRef(admit(passage_of(object), nbytes, decoded == Py_True, region).why);
  });
}

PyObject* py_place(PyObject* object, PyObject* given) {
  return guarded<PyObject*>(nullptr, [&]() -> PyObject* {
    EntryObject* const entry = entry_object(given);
    if (entry == nullptr) {
      throw py::error_already_set();
    }
    place(passage_of(object), entry);
    Py_RETURN_NONE;
  });
}

// --- demanding ----------------------------------------------------------------------------------

// Where no plan says what comes next, the window does.
std::span<const size_t> next_in_window(PassageObject* self, size_t index) {
  Passage& passage = self->passage;
  if (!passage.expects_all()) {
    const ForecastObject* const known = known_forecast(self);
    if (known != nullptr && known->forecast.sizes.size() == passage.size()) {
      passage.expect(known->forecast.order, known->forecast.window_bytes);
    } else {
      const py::object expected =
          owned(PyObject_CallMethodNoArgs(reinterpret_cast<PyObject*>(self), expected_name));
      const auto [order, window] = expected.cast<std::pair<py::object, int64_t>>();
      passage.expect(places(order), window);
    }
  }
  return passage.advance(index);
}

// What is at a place and has not been demanded yet; or nothing.
py::object to_bring(const PassageObject* self, size_t index) {
  return self->passage.was_demanded(index) ? py::object() : held_entry(self->entries.at(index));
}

// Where a script knows all storages of a passage, and no others, it says what comes next too.
const ScriptObject* whole_script(const PassageObject* self) {
  const ScriptObject* const script = script_of(self);
  return script != nullptr && script->places.size() == self->passage.size() ? script : nullptr;
}

PyObject* py_demand(PyObject* object, PyObject* index) {
  return guarded<PyObject*>(nullptr, [&] {
    PassageObject* const self = passage_of(object);
    py::list entries;
    for (const py::object& entry : demand(self, place_in(self, index))) {
      entries.append(entry);
    }
    return entries.release().ptr();
  });
}

PyObject* was_demanded(PyObject* object, PyObject* index) {
  return guarded<PyObject*>(nullptr, [&] {
    const PassageObject* const self = passage_of(object);
    return PyBool_FromLong(self->passage.was_demanded(place_in(self, index)));
  });
}

PyObject* entry(PyObject* object, PyObject* index) {
  return guarded<PyObject*>(nullptr, [&]() -> PyObject* {
    PassageObject* const self = passage_of(object);
    py::object found = held_entry(self->entries[place_in(self, index)]);
    return found ? found.release().ptr() : Py_NewRef(Py_None);
  });
}

// --- what was taken down ------------------------------------------------------------------------

PyObject* get_count(PyObject* self, void*) {
  return PyLong_FromSize_t(passage_of(self)->passage.size());
}

PyObject* get_nbytes(PyObject* self, void*) {
  const Passage& passage = passage_of(self)->passage;
  return PyLong_FromLongLong(passage.raw().nbytes + passage.decoded().nbytes);
}

PyObject* get_alive_bytes(PyObject* object, void*) {
  const PassageObject* const self = passage_of(object);
  int64_t nbytes = 0;
  for (size_t index = 0; index < self->entries.size(); ++index) {
    nbytes += held_entry(self->entries[index]) ? self->passage.nbytes(index) : 0;
  }
  return PyLong_FromLongLong(nbytes);
}

PyObject* get_sizes(PyObject* object, void*) {
  return guarded<PyObject*>(nullptr, [&] {
    const Passage& passage = passage_of(object)->passage;
    py::list sizes(passage.size());
    for (size_t index = 0; index < passage.size(); ++index) {
      sizes[index] = py::int_(passage.nbytes(index));
    }
    return sizes.release().ptr();
  });
}

PyObject* get_order(PyObject* object, void*) {
  return guarded<PyObject*>(nullptr, [&] {
    py::list order;
    for (const size_t index : passage_of(object)->passage.demanded()) {
      order.append(py::int_(index));
    }
    return order.release().ptr();
  });
}

PyObject* get_groups(PyObject* object, void*) {
  return guarded<PyObject*>(nullptr, [&] {
    py::list groups;
    for (const int64_t group : passage_of(object)->groups) {
      groups.append(group == kNoGroup ? py::object(py::none()) : py::int_(group));
    }
    return groups.release().ptr();
  });
}

PyObject* get_began_backward(PyObject* self, void*) {
  return PyBool_FromLong(!passage_of(self)->passage.demanded().empty());
}

PyObject* get_predicted_window_bytes(PyObject* self, void*) {
  const ForecastObject* const known = known_forecast(passage_of(self));
  if (known == nullptr) {
    Py_RETURN_NONE;
  }
  return PyLong_FromLongLong(known->forecast.window_bytes);
}

PyObject* get_returns_as_planned(PyObject* self, void*) {
  return PyBool_FromLong(whole_script(passage_of(self)) != nullptr);
}

PyObject* get_script(PyObject* self, void*) { return Py_NewRef(passage_of(self)->script); }

int set_script(PyObject* self, PyObject* given, void*) {
  PyObject* const script = script_or_none(given == nullptr ? Py_None : given);
  if (script == nullptr) {
    return -1;
  }
  put(passage_of(self)->script, script);
  return 0;
}

PyObject* py_release(PyObject* object, PyObject* const* args, Py_ssize_t count) {
  return guarded<PyObject*>(nullptr, [&]() -> PyObject* {
    SaverObject* const saver = count == 2 ? saver_object(args[0]) : nullptr;
    if (saver == nullptr) {
      throw py::type_error("release needs a saver and a place");
    }
    PassageObject* const self = passage_of(object);
    const size_t index = place_in(self, args[1]);
    release(saver, self, index);
    if (const py::object held = held_entry(self->entries[index])) {
      release_frame(entry_of(held.ptr()));
    }
    Py_RETURN_NONE;
  });
}

PyObject* open_window(PyObject* self, PyObject* room_bytes) {
  const double room = PyFloat_AsDouble(room_bytes);
  if (room == -1.0 && PyErr_Occurred() != nullptr) {
    return nullptr;
  }
  passage_of(self)->passage.open_window(room);
  Py_RETURN_NONE;
}

PyObject* get_bytes_ahead(PyObject* self, void*) {
  return guarded<PyObject*>(
      nullptr, [&] { return PyLong_FromLongLong(passage_of(self)->passage.bytes_ahead()); });
}

PyObject* note_peak(PyObject* self, PyObject* nbytes) {
  const long long number = PyLong_AsLongLong(nbytes);
  if (number == -1 && PyErr_Occurred()) {
    return nullptr;
  }
  int64_t& peak = passage_of(self)->peak_bytes;
  peak = std::max<int64_t>(peak, number);
  Py_RETURN_NONE;
}

template <auto share, auto number>
PyObject* get_share(PyObject* self, void*) {
  return PyLong_FromLongLong((passage_of(self)->passage.*share)().*number);
}

// --- forecasts ----------------------------------------------------------------------------------

PyObject* make_forecast(PyObject* object, PyObject* const* args, Py_ssize_t count) {
  if (count != 3) {
    PyErr_SetString(PyExc_TypeError, "forecast needs bytes of a window and two words");
    return nullptr;
  }
  return guarded<PyObject*>(nullptr, [&] {
    const PassageObject* const self = passage_of(object);
    const int64_t window = PyLong_AsLongLong(args[0]);
    if (window == -1 && PyErr_Occurred()) {
      throw py::error_already_set();
    }
    Forecast forecast(self->passage, places(self->held), window);
    return new_forecast(std::move(forecast), args[1], args[2]).release().ptr();
  });
}

PyObject* follow(PyObject* self, PyObject* forecast) {
  if (forecast_object(forecast) == nullptr) {
    return nullptr;
  }
  put(passage_of(self)->forecast, forecast);
  Py_RETURN_NONE;
}

// --- life ---------------------------------------------------------------------------------------

PyObject* make(PyTypeObject* type, PyObject*, PyObject*) {
  return guarded<PyObject*>(nullptr, [&] {
    const py::object held = owned(PySet_New(nullptr));
    py::object made = owned(type->tp_alloc(type, 0));
    PassageObject* const self = passage_of(made.ptr());
    new (&self->passage) Passage();
    new (&self->entries) std::vector<EntryObject*>();
    new (&self->groups) std::vector<int64_t>();
    new (&self->released) std::vector<size_t>();
    new (&self->postponed) std::vector<size_t>();
    fill_with_none(kSlots, self);
    put(self->held, held.ptr());
    return made.release().ptr();
  });
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  return visit_slots(kSlots, passage_of(self), self, visit, arg);
}

// What is left can make no circle.
int clear(PyObject* self) {
  put(passage_of(self)->course, Py_None);
  put(passage_of(self)->script, Py_None);
  return 0;
}

// No entry is in it any more: each of them owns it.
void dealloc(PyObject* object) {
  PassageObject* const self = passage_of(object);
  PyObject_GC_UnTrack(object);
  clear_slots(kSlots, self);
  std::destroy_at(&self->passage);
  std::destroy_at(&self->entries);
  std::destroy_at(&self->groups);
  std::destroy_at(&self->released);
  std::destroy_at(&self->postponed);
  free_instance(object);
}

PyMethodDef methods[] = {
    {"admit", as_method(py_admit), METH_FASTCALL | METH_KEYWORDS,
     "admit(nbytes, decoded=False, group=None): the next storage is saved. Why it should stay, or "
     "None."},
    {"place", py_place, METH_O, "The entry of the storage that was admitted last."},
    {"follow", follow, METH_O,
     "follow(forecast): what `admit` answers and `demand` expects, for as long as sizes agree."},
    {"forecast", as_method(make_forecast), METH_FASTCALL,
     "forecast(window_bytes, needed_at_once, never_freed): what it predicts, with the words for "
     "what backward demands first, up to a window, and for what was held."},
    {"demand", py_demand, METH_O,
     "A storage is demanded, by its place. The entries that are to be brought back now."},
    {"release", as_method(py_release), METH_FASTCALL,
     "release(saver, index): wait until what leaves has left, and its frame too."},
    {"open_window", open_window, METH_O,
     "open_window(room_bytes): an operator is launched, and about so many bytes can be decoded "
     "beside it; 0: nobody knows yet."},
    {"note_peak", note_peak, METH_O, "So many bytes are resident at a mark of its script."},
    {"was_demanded", was_demanded, METH_O, nullptr},
    {"entry", entry, METH_O, "What is at a place, if it is alive."},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef properties[] = {
    {"count", get_count, nullptr, "Number of storages.", nullptr},
    {"nbytes", get_nbytes, nullptr, "Of all storages.", nullptr},
    {"alive_bytes", get_alive_bytes, nullptr, "Of those whose entries are alive.", nullptr},
    {"sizes", get_sizes, nullptr, "Their bytes, a new list.", nullptr},
    {"order", get_order, nullptr, "Places in the order of first demands, a new list.", nullptr},
    {"groups", get_groups, nullptr, "Groups as they were admitted, a new list.", nullptr},
    {"script", get_script, set_script, "What a plan says of its storages, or None.", nullptr},
    {"returns_as_planned", get_returns_as_planned, nullptr,
     "Whether its script says what comes back, and not the window.", nullptr},
    {"began_backward", get_began_backward, nullptr, nullptr, nullptr},
    {"predicted_window_bytes", get_predicted_window_bytes, nullptr,
     "The forecast's, for as long as the sizes agree with it; then None.", nullptr},
    {"bytes_ahead", get_bytes_ahead, nullptr,
     "Bytes ahead of the latest demand that its windows would have had to know of, or 0.", nullptr},
    {"raw_bytes", get_share<&Passage::raw, &Passage::Share::nbytes>, nullptr, nullptr, nullptr},
    {"raw_most", get_share<&Passage::raw, &Passage::Share::most>, nullptr, nullptr, nullptr},
    {"decoded_bytes", get_share<&Passage::decoded, &Passage::Share::nbytes>, nullptr, nullptr,
     nullptr},
    {"decoded_most", get_share<&Passage::decoded, &Passage::Share::most>, nullptr, nullptr,
     nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyMemberDef members[] = {
    {"held", T_OBJECT_EX, offsetof(PassageObject, held), READONLY, nullptr},
    {"course", T_OBJECT_EX, offsetof(PassageObject, course), 0, nullptr},
    {"alone", T_BOOL, offsetof(PassageObject, alone), 0, nullptr},
    {"peak_bytes", T_LONGLONG, offsetof(PassageObject, peak_bytes), READONLY, nullptr},
    {"limit_bytes", T_LONGLONG, offsetof(PassageObject, limit_bytes), 0,
     "Resident bytes that what starts back stays below; 0: as many as come."},
    {nullptr, 0, 0, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(make)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(clear)},
    {Py_tp_methods, methods},
    {Py_tp_setattro, reinterpret_cast<void*>(set_attribute)},
    {Py_tp_members, members},
    {Py_tp_getset, properties},
    {Py_tp_doc, const_cast<char*>("The books of one forward, and of the demands for it.")},
    {0, nullptr},
};

PyType_Spec spec = {
    .name = "memswap._C.Passage",
    .basicsize = sizeof(PassageObject),
    .itemsize = 0,
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = slots,
};

}  // namespace

PassageObject* passage_object(PyObject* object) {
  if (!PyObject_TypeCheck(object, passage_type)) {
    PyErr_Format(PyExc_TypeError, "expected a Passage, found %R", object);
    return nullptr;
  }
  return passage_of(object);
}

void take_off(EntryObject* entry) {
  if (!empty(entry->passage)) {
    passage_of(entry->passage)->entries[static_cast<size_t>(entry->index)] = nullptr;
  }
}

void note_held(PyObject* passage, Py_ssize_t index) {
  add_place(passage_of(passage)->held, static_cast<size_t>(index));
}

Verdict admit(PassageObject* self, int64_t nbytes, bool decoded, int64_t group) {
  const size_t index = self->passage.size();
  self->groups.push_back(group);
  self->entries.push_back(nullptr);
  self->passage.save(nbytes, decoded);
  return verdict(self, index, nbytes);
}

void place(PassageObject* self, EntryObject* entry) {
  if (!empty(entry->passage) || self->entries.empty() || self->entries.back() != nullptr) {
    throw py::value_error("place needs an entry without a passage, for what was admitted last");
  }
  self->entries.back() = entry;
  entry->index = static_cast<Py_ssize_t>(self->entries.size()) - 1;
  put(entry->passage, reinterpret_cast<PyObject*>(self));
}

std::vector<py::object> demand(PassageObject* self, size_t index) {
  std::vector<py::object> entries;
  if (!self->passage.demand(index)) {
    return entries;
  }
  const ScriptObject* const script = whole_script(self);
  const auto coming =
      script == nullptr ? next_in_window(self, index) : std::span(script->places[index].fetches);
  if (self->limit_bytes == 0) {
    for (const size_t next : coming) {
      if (py::object entry = to_bring(self, next)) {
        entries.push_back(std::move(entry));
      }
    }
    return entries;
  }
  // As a plan has it there is room for all of them. Sizes may be other ones.
  std::vector<size_t>& postponed = self->postponed;
  postponed.insert(postponed.end(), coming.begin(), coming.end());
  int64_t nbytes = 0;
  auto next = postponed.begin();
  for (; next != postponed.end(); ++next) {
    py::object entry = to_bring(self, *next);
    if (!entry) {
      continue;
    }
    Residence& residence = *entry_of(entry.ptr())->residence;
    nbytes += returning_nbytes(entry_of(entry.ptr()));
    if (residence.ledger().resident_bytes + nbytes > self->limit_bytes) {
      break;
    }
    entries.push_back(std::move(entry));
  }
  postponed.erase(postponed.begin(), next);
  return entries;
}

void bind_passage(py::module_& module) {
  expected_name = interned("expected");
  passage_type = add_type(module, "Passage", spec);
}

}  // namespace memswap
