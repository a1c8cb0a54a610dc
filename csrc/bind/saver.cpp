// Saver, as Python sees it: the steps of every save and every demand that need no decision. What is
// to be done with a storage, python/memswap/engine/saver.py says, whose class is derived from this.
#include "saver.h"

#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <cstddef>
#include <memory>
#include <new>
#include <utility>

#include "calls.h"
#include "departing.h"
#include "handle.h"
#include "ledger.h"
#include "passage.h"
#include "python_type.h"
#include "script.h"
#include "storage/storage.h"
#include "storage_ref.h"

namespace memswap {
namespace py = pybind11;

namespace {

// Set once, by bind_saver.
PyTypeObject* saver_type = nullptr;
PyTypeObject* lock_type = nullptr;
struct Names {
  PyObject *demanded, *demanding, *held_by_handles_only, *learn, *look_ahead, *lost;
} names;
PyObject* out_of_memory = nullptr;  // torch.OutOfMemoryError
PyObject* transfer_error = nullptr;

SaverObject* saver_of(PyObject* self) { return reinterpret_cast<SaverObject*>(self); }
LockObject* lock_of(PyObject* self) { return reinterpret_cast<LockObject*>(self); }

// --- the lock -----------------------------------------------------------------------------------

void acquire(LockObject* lock) {
  if (!lock->mutex.try_lock()) {
    const py::gil_scoped_release release;
    lock->mutex.lock();
  }
}

PyObject* make_lock(PyTypeObject* type, PyObject*, PyObject*) {
  PyObject* const self = type->tp_alloc(type, 0);
  if (self != nullptr) {
    new (&lock_of(self)->mutex) std::recursive_mutex();
  }
  return self;
}

void dealloc_lock(PyObject* self) {
  std::destroy_at(&lock_of(self)->mutex);
  free_instance(self);
}

PyObject* enter(PyObject* self, PyObject*) {
  acquire(lock_of(self));
  return Py_NewRef(self);
}

PyObject* leave_lock(PyObject* self, PyObject* const*, Py_ssize_t) {
  lock_of(self)->mutex.unlock();
  Py_RETURN_NONE;
}

PyMethodDef lock_methods[] = {
    {"__enter__", enter, METH_NOARGS, nullptr},
    {"__exit__", as_method(leave_lock), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot lock_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(make_lock)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc_lock)},
    {Py_tp_methods, lock_methods},
    {Py_tp_doc, const_cast<char*>("A lock for `with`, which its thread may take again: an entry "
                                  "may die wherever Python collects.")},
    {0, nullptr},
};

PyType_Spec lock_spec = {
    .name = "memswap._C.Lock",
    .basicsize = sizeof(LockObject),
    .itemsize = 0,
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = lock_slots,
};

// --- save ---------------------------------------------------------------------------------------

// Sends the storage of a tensor that was admitted last. Its handle; or where there was no room, its
// entry, which stays.
PyObject* swap_out(PyObject* object, PyObject* const* args, Py_ssize_t count) {
  if (count != 3) {
    PyErr_SetString(PyExc_TypeError, "swap needs a tensor, its view and a way");
    return nullptr;
  }
  return guarded<PyObject*>(nullptr, [&] {
    SaverObject* const self = saver_of(object);
    Made made = make_entry(self, args[0], args[1]);
    EntryObject* const entry = entry_of(made.entry.ptr());
    if (!swap(entry, args[2], made.storage.ptr())) {
      return made.entry.release().ptr();
    }
    add_departing(self->departing, entry);
    return moved(made.entry.ptr(), args[1]).release().ptr();
  });
}

// --- demand -------------------------------------------------------------------------------------

// What comes next is brought back, as far as there is memory: the demand itself will ask again.
void look_ahead(SaverObject* self, EntryObject* entry) {
  const py::object passage = py::reinterpret_borrow<py::object>(entry->passage);
  if (self->looks_ahead == 0) {
    const py::object index = owned(PyLong_FromSsize_t(entry->index));
    PyObject* const arguments[] = {reinterpret_cast<PyObject*>(self), passage.ptr(), index.ptr()};
    owned(PyObject_VectorcallMethod(names.look_ahead, arguments, 3, nullptr));
    return;
  }
  try {
    for (const py::object& next :
         demand(passage_object(passage.ptr()), static_cast<size_t>(entry->index))) {
      fetch_ahead(entry_of(next.ptr()));
    }
  } catch (const c10::OutOfMemoryError&) {
  } catch (const py::error_already_set& error) {
    if (!error.matches(out_of_memory)) {
      throw;
    }
  }
}

void wait_for_arrival(SaverObject* self, PyObject* arrival) {
  if (guarded<bool>(false, [&] {
        wait_on_ledger(reinterpret_cast<LedgerObject*>(self->ledger), arrival);
        return true;
      })) {
    return;
  }
  const py::error_already_set failed;
  if (failed.matches(transfer_error)) {
    owned(PyObject_CallMethodOneArg(reinterpret_cast<PyObject*>(self), names.lost,
                                    failed.value().ptr()));
  }
  throw failed;
}

// Who hears of a demand: the script of its passage, and the director where that is not enough.
class Told {
 public:
  Told(SaverObject* saver, PyObject* entry)
      : saver_(saver),
        entry_(entry),
        director_(py::reinterpret_borrow<py::object>(saver->director)) {}

  // Under the saver's lock.
  void demanding() {
    hears_ = !director_.is_none() && director_hears(saver_, entry_of(entry_));
    if (hears_) {
      owned(PyObject_CallMethodOneArg(director_.ptr(), names.demanding, entry_));
    }
  }

  void demanded() const {
    served(saver_, entry_of(entry_));
    if (hears_) {
      owned(PyObject_CallMethodOneArg(director_.ptr(), names.demanded, entry_));
    }
  }

 private:
  SaverObject* const saver_;
  PyObject* const entry_;
  const py::object director_;
  bool hears_ = false;
};

// What has stayed alive although it had left: if only handles hold it, next time it would be freed.
void may_leave_next_time(EntryObject* entry) {
  auto* const passage = reinterpret_cast<PassageObject*>(entry->passage);
  if (PySet_GET_SIZE(passage->held) == 0 ||
      passage->passage.was_demanded(static_cast<size_t>(entry->index))) {
    return;
  }
  const py::object index = owned(PyLong_FromSsize_t(entry->index));
  if (PySet_Contains(passage->held, index.ptr()) == 1 &&
      truth(PyObject_CallMethodNoArgs(object_of(entry), names.held_by_handles_only))) {
    PySet_Discard(passage->held, index.ptr());
  }
}

PyObject* py_demand(PyObject* self, PyObject* entry) {
  return guarded<PyObject*>(nullptr, [&] {
    if (entry_object(entry) == nullptr) {
      throw py::error_already_set();
    }
    return demand(saver_of(self), entry).release().ptr();
  });
}

PyObject* py_demand_kept(PyObject* self, PyObject* entry) {
  return guarded<PyObject*>(nullptr, [&]() -> PyObject* {
    if (entry_object(entry) == nullptr) {
      throw py::error_already_set();
    }
    demand_kept(saver_of(self), entry);
    Py_RETURN_NONE;
  });
}

// --- life ---------------------------------------------------------------------------------------

constexpr std::array kSlots = {
    &SaverObject::ledger,     &SaverObject::lock,       &SaverObject::departing,
    &SaverObject::encoding,   &SaverObject::passage,    &SaverObject::director,
    &SaverObject::persistent, &SaverObject::entry_type, &SaverObject::backward,
};

PyObject* make(PyTypeObject* type, PyObject* args, PyObject* named) {
  PyObject *ledger = nullptr, *entry_type = nullptr, *encoding = nullptr;
  static const char* words[] = {"ledger", "entry_type", "encoding", nullptr};
  if (!PyArg_ParseTupleAndKeywords(args, named, "OOO", const_cast<char**>(words), &ledger,
                                   &entry_type, &encoding)) {
    return nullptr;
  }
  if (ledger_object(ledger) == nullptr) {
    return nullptr;
  }
  return guarded<PyObject*>(nullptr, [&] {
    const py::object lock = owned(PyObject_CallNoArgs(reinterpret_cast<PyObject*>(lock_type)));
    const py::object departing = new_departing();
    const py::object persistent = py::dict();
    py::object made = owned(type->tp_alloc(type, 0));
    SaverObject* const self = saver_of(made.ptr());
    fill_with_none(kSlots, self);
    put(self->ledger, ledger);
    put(self->lock, lock.ptr());
    put(self->departing, departing.ptr());
    put(self->encoding, encoding);
    put(self->entry_type, entry_type);
    put(self->persistent, persistent.ptr());
    self->looks_ahead = 1;
    return made.release().ptr();
  });
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  return visit_slots(kSlots, saver_of(self), self, visit, arg);
}

// What stays is in no circle, and its entries may still ask for it.
int clear(PyObject* self) {
  for (const auto slot : {&SaverObject::passage, &SaverObject::director, &SaverObject::backward}) {
    put(saver_of(self)->*slot, Py_None);
  }
  return 0;
}

void dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  clear_slots(kSlots, saver_of(self));
  free_instance(self);
}

PyMethodDef methods[] = {
    {"swap", as_method(swap_out), METH_FASTCALL,
     "swap(tensor, view, way): make the entry of what its passage admitted last, and send it by a "
     "SwapWay. Its handle; or the entry, where there was no room."},
    {"demand", py_demand, METH_O,
     "The storage of an entry, ordered before what the caller does next."},
    {"demand_kept", py_demand_kept, METH_O,
     "A storage that stayed is demanded: what comes next may have to come back."},
    {nullptr, nullptr, 0, nullptr},
};

#define MEMSWAP_SLOT(name, access) \
  {#name, T_OBJECT_EX, offsetof(SaverObject, name), access, nullptr}
PyMemberDef members[] = {
    MEMSWAP_SLOT(ledger, READONLY),
    MEMSWAP_SLOT(lock, READONLY),
    MEMSWAP_SLOT(departing, READONLY),
    MEMSWAP_SLOT(encoding, READONLY),
    MEMSWAP_SLOT(passage, 0),
    MEMSWAP_SLOT(director, 0),
    MEMSWAP_SLOT(persistent, 0),
    MEMSWAP_SLOT(backward, 0),
    {"watched", T_BOOL, offsetof(SaverObject, watched), 0, nullptr},
    {"looks_ahead", T_BOOL, offsetof(SaverObject, looks_ahead), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};
#undef MEMSWAP_SLOT

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(make)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(clear)},
    {Py_tp_methods, methods},
    {Py_tp_setattro, reinterpret_cast<void*>(set_attribute)},
    {Py_tp_members, members},
    {Py_tp_doc, const_cast<char*>("What every save and every demand needs of a saver.")},
    {0, nullptr},
};

PyType_Spec spec = {
    .name = "memswap._C.Saver",
    .basicsize = sizeof(SaverObject),
    .itemsize = 0,
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = slots,
};

}  // namespace

Locked::Locked(PyObject* lock) : lock_(py::reinterpret_borrow<py::object>(lock)) {
  acquire(lock_of(lock));
}

SaverObject* saver_object(PyObject* object) {
  return PyObject_TypeCheck(object, saver_type) ? saver_of(object) : nullptr;
}

Made make_entry(SaverObject* self, PyObject* tensor, PyObject* view) {
  PassageObject* const passage = passage_object(self->passage);
  if (passage == nullptr) {
    throw py::error_already_set();
  }
  if (!THPVariable_Check(tensor)) {
    throw py::type_error("expected a torch.Tensor to make an entry of");
  }
  py::object storage =
      owned(storage_object(std::make_shared<StorageRef>(THPVariable_Unpack(tensor).storage())));
  PyObject* const parts[] = {reinterpret_cast<PyObject*>(self), view, storage.ptr()};
  py::object made = owned(PyObject_Vectorcall(self->entry_type, parts, 3, nullptr));
  EntryObject* const entry = entry_object(made.ptr());
  if (entry == nullptr) {
    throw py::error_already_set();
  }
  place(passage, entry);
  return {std::move(made), std::move(storage)};
}

void learn_reports(SaverObject* self) {
  const Py_ssize_t waiting = PyObject_Size(self->encoding);
  if (waiting < 0) {
    throw py::error_already_set();
  }
  if (waiting > 0) {
    owned(PyObject_CallMethodNoArgs(reinterpret_cast<PyObject*>(self), names.learn));
  }
}

py::object demand(SaverObject* self, PyObject* given) {
  EntryObject* const entry = entry_of(given);
  Told told(self, given);
  py::object storage, arrival;
  {
    const Locked locked(self->lock);
    learn_reports(self);
    told.demanding();
    storage = bring(entry);
    arrival = py::reinterpret_borrow<py::object>(entry->arrival);
    if (!empty(entry->passage)) {
      look_ahead(self, entry);
    }
  }
  if (!arrival.is_none()) {
    wait_for_arrival(self, arrival.ptr());
  }
  told.demanded();
  return storage;
}

void demand_kept(SaverObject* self, PyObject* given) {
  EntryObject* const entry = entry_of(given);
  Told told(self, given);
  {
    const Locked locked(self->lock);
    if (empty(entry->passage)) {
      return;
    }
    told.demanding();
    may_leave_next_time(entry);
    look_ahead(self, entry);
  }
  told.demanded();
}

void bind_saver(py::module_& module) {
  names = {.demanded = interned("demanded"),
           .demanding = interned("demanding"),
           .held_by_handles_only = interned("held_by_handles_only"),
           .learn = interned("_learn"),
           .look_ahead = interned("look_ahead"),
           .lost = interned("lost")};
  out_of_memory = py::object(py::module_::import("torch").attr("OutOfMemoryError")).release().ptr();
  transfer_error = py::object(module.attr("TransferError")).release().ptr();
  lock_type = add_type(module, "Lock", lock_spec);
  saver_type = add_type(module, "Saver", spec);
}

}  // namespace memswap
