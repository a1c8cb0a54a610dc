// Departing, as Python sees it: entries whose storages were sent, until these are gone.
#include "departing.h"

#include <pybind11/pybind11.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <memory>
#include <new>

#include "calls.h"
#include "python_type.h"

namespace memswap {
namespace py = pybind11;

EntryRow::~EntryRow() {
  while (first_ != nullptr) {
    remove(first_);
  }
}

void EntryRow::append(EntryObject* entry) {
  depart_no_more(entry);
  entry->row = this;
  entry->before = last_;
  entry->after = nullptr;
  (last_ == nullptr ? first_ : last_->after) = entry;
  last_ = entry;
  ++size_;
}

void EntryRow::remove(EntryObject* entry) {
  (entry->before == nullptr ? first_ : entry->before->after) = entry->after;
  (entry->after == nullptr ? last_ : entry->after->before) = entry->before;
  entry->row = nullptr;
  entry->before = entry->after = nullptr;
  --size_;
}

void depart_no_more(EntryObject* entry) {
  if (entry->row != nullptr) {
    entry->row->remove(entry);
  }
}

namespace {

struct DepartingObject {
  PyObject_HEAD EntryRow leaving;  // whose sends may be under way, in the order of these
  EntryRow lingering;              // sent, and held by somebody
};

constexpr Py_ssize_t kLooks = 3;

PyTypeObject* departing_type = nullptr;  // set once, by bind_departing

DepartingObject* departing_of(PyObject* self) { return reinterpret_cast<DepartingObject*>(self); }

PyObject* make(PyTypeObject* type, PyObject*, PyObject*) {
  PyObject* const self = type->tp_alloc(type, 0);
  if (self != nullptr) {
    new (&departing_of(self)->leaving) EntryRow();
    new (&departing_of(self)->lingering) EntryRow();
  }
  return self;
}

void dealloc(PyObject* self) {
  std::destroy_at(&departing_of(self)->leaving);
  std::destroy_at(&departing_of(self)->lingering);
  free_instance(self);
}

PyObject* add(PyObject* self, PyObject* given) {
  EntryObject* const entry = entry_object(given);
  if (entry == nullptr) {
    return nullptr;
  }
  add_departing(self, entry);
  Py_RETURN_NONE;
}

// The first of a row, if it is not just being deallocated: then it leaves by itself.
py::object first_of(EntryRow& row) {
  while (row.front() != nullptr) {
    if (py::object entry = held_entry(row.front())) {
      return entry;
    }
    row.remove(row.front());
  }
  return {};
}

// Asking an entry may run code of Python's and let other threads run: what it leaves of the rows is
// looked at anew each time.
void notice_gone(DepartingObject* self, Py_ssize_t looks) {
  EntryRow& leaving = self->leaving;
  EntryRow& lingering = self->lingering;
  for (looks = std::min(looks, lingering.size()); looks > 0; --looks) {
    const py::object held = first_of(lingering);
    if (!held) {
      break;
    }
    EntryObject* const entry = entry_of(held.ptr());
    lingering.remove(entry);
    if (lingers(entry) && entry->row == nullptr) {
      lingering.append(entry);
    }
  }
  while (const py::object held = first_of(leaving)) {
    EntryObject* const entry = entry_of(held.ptr());
    const bool waits = lingers(entry);
    if (waits && !sent(entry)) {
      return;
    }
    // A send that has failed gives the storage back.
    const bool stays = waits && lingers(entry);
    if (entry->row == &leaving) {
      leaving.remove(entry);
      if (stays) {
        lingering.append(entry);
      }
    }
  }
}

PyObject* py_notice_gone(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* given) {
  static constexpr std::array words = {"looks"};
  std::array<PyObject*, 1> sorted = {nullptr};
  if (!sort_arguments(words, args, count, given, sorted)) {
    return nullptr;
  }
  return guarded<PyObject*>(nullptr, [&]() -> PyObject* {
    Py_ssize_t looks = PY_SSIZE_T_MAX;
    if (sorted[0] != nullptr) {
      looks = PyLong_AsSsize_t(sorted[0]);
      if (looks == -1 && PyErr_Occurred()) {
        throw py::error_already_set();
      }
    }
    // It is not dropped while entries are asked.
    const auto alive = py::reinterpret_borrow<py::object>(self);
    notice_gone(departing_of(self), looks);
    Py_RETURN_NONE;
  });
}

PyObject* py_notice_some(PyObject* self, PyObject*) {
  return guarded<PyObject*>(nullptr, [&]() -> PyObject* {
    notice_some(self);
    Py_RETURN_NONE;
  });
}

Py_ssize_t length(PyObject* self) {
  return departing_of(self)->leaving.size() + departing_of(self)->lingering.size();
}

PyMethodDef methods[] = {
    {"add", add, METH_O, "An entry was sent."},
    {"notice_gone", as_method(py_notice_gone), METH_FASTCALL | METH_KEYWORDS,
     "notice_gone(looks=all): account for storages that went away since the last look, oldest "
     "first. `looks` bounds how many of those are looked at that were sent and are still held."},
    {"notice_some", py_notice_some, METH_NOARGS, "What each save does: look at a few of those."},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(make)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
    {Py_tp_methods, methods},
    {Py_sq_length, reinterpret_cast<void*>(length)},
    {Py_tp_doc, const_cast<char*>("Entries whose storages were sent, until these are gone. Owned "
                                  "by nobody here.")},
    {0, nullptr},
};

PyType_Spec spec = {
    .name = "memswap._C.Departing",
    .basicsize = sizeof(DepartingObject),
    .itemsize = 0,
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots,
};

}  // namespace

py::object new_departing() {
  return owned(PyObject_CallNoArgs(reinterpret_cast<PyObject*>(departing_type)));
}

void add_departing(PyObject* departing, EntryObject* entry) {
  departing_of(departing)->leaving.append(entry);
}

void notice_some(PyObject* departing) {
  const auto alive = py::reinterpret_borrow<py::object>(departing);
  notice_gone(departing_of(departing), kLooks);
}

void bind_departing(py::module_& module) { departing_type = add_type(module, "Departing", spec); }

}  // namespace memswap
