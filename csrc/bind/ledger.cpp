// Ledger, as Python sees it: what a saver counts, and which storages it knows.
#include "ledger.h"

#include <ATen/SequenceNumber.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <new>

#include "python_type.h"

namespace memswap {
namespace py = pybind11;

namespace {

PyTypeObject* ledger_type = nullptr;  // set once, by bind_ledger

Ledger& ledger_in(PyObject* self) { return reinterpret_cast<LedgerObject*>(self)->ledger; }

using Known = std::unordered_map<const void*, LedgerObject::Known>;
Known& known_in(PyObject* self) { return reinterpret_cast<LedgerObject*>(self)->known; }

using Kept = std::map<std::string, LedgerObject::Kept, std::less<>>;
Kept& kept_in(PyObject* self) { return *reinterpret_cast<LedgerObject*>(self)->kept; }

PyObject* make(PyTypeObject* type, PyObject*, PyObject*) {
  PyObject* self = type->tp_alloc(type, 0);
  if (self != nullptr) {
    new (&ledger_in(self)) Ledger();
    new (&known_in(self)) Known();
    new (&reinterpret_cast<LedgerObject*>(self)->kept)
        std::unique_ptr<Kept>(std::make_unique<Kept>());
  }
  return self;
}

void dealloc(PyObject* self) {
  known_in(self).~Known();
  std::destroy_at(&reinterpret_cast<LedgerObject*>(self)->kept);
  free_instance(self);
}

// A method that takes one number of bytes.
template <void (Ledger::*count)(int64_t)>
PyObject* counted(PyObject* self, PyObject* nbytes) {
  const long long number = PyLong_AsLongLong(nbytes);
  if (number == -1 && PyErr_Occurred()) {
    return nullptr;
  }
  (ledger_in(self).*count)(number);
  Py_RETURN_NONE;
}

// c10 has no name for the identity of a counter: it is the one pointer that a counter consists of.
const void* identity_of(const c10::VariableVersion& counter) {
  const void* identity = nullptr;
  static_assert(sizeof(counter) == sizeof(identity));
  std::memcpy(&identity, static_cast<const void*>(&counter), sizeof(identity));
  return identity;
}

// [Note: Several counters on one storage]
// Views share their base's version counter, so a number tells whether the bytes are the same. But
// some tensors share a storage and count for themselves: the outputs of unsafe_chunk and
// unsafe_split (torch's recurrent cells on a CPU edit them one after another), `.data`, buffers
// that inductor reinterprets. Equal numbers say nothing there, unless neither was ever edited. An
// edited part stays, because its sister may be edited while the storage is on its way.

// [Note: Parts that nobody has saved yet]
// What fills memory part after part need not count: numpy, a collective, a kernel of the user's
// own. Autograd reads a part in place, whenever it was filled, but a storage that left took along
// what was there then. So a part that nothing had saved by then is not taken for what left, unless
// the same node saves it, in one go with the others; it stays. This is asked of memory that no
// operator made (an empty tensor, an array): results of operators are complete when they are first
// saved.

PyObject* py_find(PyObject* self, PyObject* view) {
  const SavedView* const look = saved_view_of(view);
  return look == nullptr ? nullptr
                         : find(reinterpret_cast<LedgerObject*>(self), *look).release().ptr();
}

PyObject* py_keep(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  if (count != 2) {
    PyErr_SetString(PyExc_TypeError, "keep needs a reason and a number of bytes");
    return nullptr;
  }
  return guarded<PyObject*>(nullptr, [&]() -> PyObject* {
    const long long nbytes = PyLong_AsLongLong(args[1]);
    if (nbytes == -1 && PyErr_Occurred() != nullptr) {
      throw py::error_already_set();
    }
    count_kept(reinterpret_cast<LedgerObject*>(self), args[0], nbytes);
    Py_RETURN_NONE;
  });
}

template <int64_t LedgerObject::Kept::* number>
PyObject* get_kept(PyObject* self, void*) {
  return guarded<PyObject*>(nullptr, [&] {
    py::dict numbers;
    for (const auto& [reason, kept] : kept_in(self)) {
      numbers[py::str(reason)] = kept.*number;
    }
    return numbers.release().ptr();
  });
}

PyObject* offer(PyObject* self, PyObject* view) {
  const SavedView* const look = saved_view_of(view);
  if (look == nullptr) {
    return nullptr;
  }
  ledger_in(self).offer(static_cast<int64_t>(look->nbytes()));
  Py_RETURN_NONE;
}

PyObject* wait(PyObject* self, PyObject* ticket) {
  return guarded<PyObject*>(nullptr, [&]() -> PyObject* {
    wait_on_ledger(reinterpret_cast<LedgerObject*>(self), py::handle(ticket).cast<Ticket&>());
    Py_RETURN_NONE;
  });
}

PyObject* known_storages(PyObject* self, void*) { return PyLong_FromSize_t(known_in(self).size()); }

PyObject* reset(PyObject* self, PyObject*) {
  ledger_in(self).reset();
  kept_in(self).clear();
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"offer", offer, METH_O, "A tensor was saved."},
    {"find", py_find, METH_O,
     "The entry or stay of a view's very storage and content; None; or False, where the storage is "
     "known with a version counter of another tensor's, and one of them was edited."},
    {"keep", as_method(py_keep), METH_FASTCALL, "keep(reason, nbytes): a tensor stays."},
    {"wait", wait, METH_O, "Wait for a ticket; for as long as the host is blocked, that counts."},
    {"resident", counted<&Ledger::resident>, METH_O, "So many more bytes are on the device."},
    {"set_recomputed", counted<&Ledger::set_recomputed>, METH_O,
     "So many of the resident bytes are what regions saved again in backward."},
    {"set_reserved", counted<&Ledger::set_reserved>, METH_O,
     "So many of the resident bytes are set aside for overflows of frames."},
    {"away", counted<&Ledger::away>, METH_O, "So many more bytes are in pools."},
    {"reset", reset, METH_NOARGS, "Count anew; what is resident and away stays known."},
    {nullptr, nullptr, 0, nullptr},
};

#define MEMSWAP_NUMBER(name) \
  {#name, T_LONGLONG, offsetof(LedgerObject, ledger) + offsetof(Ledger, name), 0, nullptr}
static_assert(sizeof(long long) == sizeof(int64_t));

PyMemberDef members[] = {
    MEMSWAP_NUMBER(offered_tensors),
    MEMSWAP_NUMBER(offered_bytes),
    MEMSWAP_NUMBER(deduplicated_tensors),
    MEMSWAP_NUMBER(deduplicated_bytes),
    MEMSWAP_NUMBER(moved_storages),
    MEMSWAP_NUMBER(moved_bytes),
    MEMSWAP_NUMBER(encoded_storages),
    MEMSWAP_NUMBER(encoded_bytes),
    MEMSWAP_NUMBER(frame_bytes),
    MEMSWAP_NUMBER(returned_storages),
    MEMSWAP_NUMBER(returned_bytes),
    MEMSWAP_NUMBER(freed_bytes),
    MEMSWAP_NUMBER(stalls),
    {"exposed_wait_s", T_DOUBLE, offsetof(LedgerObject, ledger) + offsetof(Ledger, exposed_wait_s),
     0, nullptr},
    MEMSWAP_NUMBER(resident_bytes),
    MEMSWAP_NUMBER(peak_resident_bytes),
    MEMSWAP_NUMBER(away_bytes),
    MEMSWAP_NUMBER(peak_away_bytes),
    {nullptr, 0, 0, 0, nullptr},
};
#undef MEMSWAP_NUMBER

PyGetSetDef properties[] = {
    {"kept_tensors", get_kept<&LedgerObject::Kept::tensors>, nullptr,
     "Reason -> tensors that stayed, a new dict.", nullptr},
    {"kept_bytes", get_kept<&LedgerObject::Kept::nbytes>, nullptr,
     "Reason -> bytes of their storages, a new dict.", nullptr},
    {"known_storages", known_storages, nullptr, "Number of storages that `find` knows.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(make)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {Py_tp_getset, properties},
    {Py_tp_doc, const_cast<char*>("What a saver counts (csrc/engine/residence.h).")},
    {0, nullptr},
};

PyType_Spec spec = {
    .name = "memswap._C.Ledger",
    .basicsize = sizeof(LedgerObject),
    .itemsize = 0,
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .slots = slots,
};

}  // namespace

LedgerObject* ledger_object(PyObject* object) {
  if (!PyObject_TypeCheck(object, ledger_type)) {
    PyErr_Format(PyExc_TypeError, "expected a Ledger, found %R", object);
    return nullptr;
  }
  return reinterpret_cast<LedgerObject*>(object);
}

void remember(LedgerObject* ledger, const SavedView& look, PyObject* holder, bool stays) {
  ledger->known.insert_or_assign(
      look.storage_key(),
      LedgerObject::Known{holder, look.counter(), look.version(), stays, look.begin(), look.end(),
                          at::sequence_number::peek()});
}

void forget(LedgerObject* ledger, const void* key, const PyObject* holder) {
  const auto found = ledger->known.find(key);
  if (found != ledger->known.end() && found->second.holder == holder) {
    ledger->known.erase(found);
  }
}

py::object find(LedgerObject* ledger, const SavedView& look) {
  const auto found = ledger->known.find(look.storage_key());
  if (found == ledger->known.end()) {
    return py::none();
  }
  auto& [holder, counter, version, stays, begin, end, node] = found->second;
  if (stays) {
    // whatever the content
  } else if (identity_of(counter) != identity_of(look.counter())) {
    if (look.version() != 0 || version != 0 || counter.current_version() != 0) {
      return py::bool_(false);
    }
  } else if (version != look.version()) {
    return py::none();
  }
  // What is being deallocated may run code before it leaves the ledger, and must not come back.
  if (Py_REFCNT(holder) == 0) {
    return py::none();
  }
  if (!stays && !look.computed() && (look.begin() < begin || look.end() > end)) {
    if (node != at::sequence_number::peek()) {
      return py::bool_(false);
    }
    begin = std::min(begin, look.begin());
    end = std::max(end, look.end());
  }
  return py::reinterpret_borrow<py::object>(holder);
}

void count_kept(LedgerObject* ledger, std::string_view reason, int64_t nbytes) {
  auto found = ledger->kept->find(reason);
  if (found == ledger->kept->end()) {
    found = ledger->kept->emplace(reason, LedgerObject::Kept{}).first;
  }
  ++found->second.tensors;
  found->second.nbytes += nbytes;
}

void count_kept(LedgerObject* ledger, PyObject* reason, int64_t nbytes) {
  Py_ssize_t length = 0;
  const char* const word = PyUnicode_AsUTF8AndSize(reason, &length);
  if (word == nullptr) {
    throw py::error_already_set();
  }
  count_kept(ledger, std::string_view(word, static_cast<size_t>(length)), nbytes);
}

void wait_on_ledger(LedgerObject* ledger, Ticket& ticket) {
  const auto begin = std::chrono::steady_clock::now();
  ticket.wait();
  ledger->ledger.exposed_wait_s +=
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

void bind_ledger(py::module_& module) { ledger_type = add_type(module, "Ledger", spec); }

}  // namespace memswap
