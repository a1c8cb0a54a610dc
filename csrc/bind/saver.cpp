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
#include "engine/block_form.h"
#include "engine/recipes.h"
#include "handle.h"
#include "ledger.h"
#include "passage.h"
#include "python_type.h"
#include "save.h"
#include "script.h"
#include "storage/storage.h"
#include "storage_ref.h"
#include "visit.h"

namespace memswap {
namespace py = pybind11;

namespace {

// Set once, by bind_saver.
PyTypeObject* saver_type = nullptr;
PyTypeObject* lock_type = nullptr;
struct Names {
  PyObject *demanded, *demanding, *learn, *look_ahead, *lost;
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
    PyErr_SetString(PyExc_TypeError, "swap needs a tensor, its view and a BlockSender");
    return nullptr;
  }
  return guarded<PyObject*>(nullptr, [&] {
    SaverObject* const self = saver_of(object);
    auto& sender = py::handle(args[2]).cast<BlockSender&>();
    Made made = make_entry(self, args[0], args[1]);
    EntryObject* const entry = entry_of(made.entry.ptr());
    if (!swap(entry, sender, made.storage)) {
      return made.entry.release().ptr();
    }
    add_departing(self->departing, entry);
    return moved(made.entry.ptr(), args[1]).release().ptr();
  });
}

// Sorts an action of Python's: what the table knows, and what is asked about.
SaveTable::Action action_of(PyObject* word) {
  if (PyUnicode_CompareWithASCIIString(word, "swap") == 0) {
    return SaveTable::Action::kSwap;
  }
  return PyUnicode_CompareWithASCIIString(word, "keep") == 0 ? SaveTable::Action::kKeep
                                                             : SaveTable::Action::kAsk;
}

PyObject* py_set_policy(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  if (count != 2 || (args[1] != Py_None && !PyUnicode_Check(args[1]))) {
    PyErr_SetString(PyExc_TypeError, "set_policy needs the least bytes, and an action or None");
    return nullptr;
  }
  return guarded<PyObject*>(nullptr, [&]() -> PyObject* {
    SaveTable& table = *saver_of(self)->table;
    const long long min_bytes = PyLong_AsLongLong(args[0]);
    if (min_bytes == -1 && PyErr_Occurred() != nullptr) {
      throw py::error_already_set();
    }
    table.min_bytes = min_bytes;
    table.by_device = args[1] == Py_None;
    table.action = table.by_device ? SaveTable::Action::kAsk : action_of(args[1]);
    Py_RETURN_NONE;
  });
}

PyObject* py_set_device(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  if (count != 3 || !PyUnicode_Check(args[1])) {
    PyErr_SetString(PyExc_TypeError, "set_device needs a device, an action and a BlockSender");
    return nullptr;
  }
  return guarded<PyObject*>(nullptr, [&]() -> PyObject* {
    const auto device = py::handle(args[0]).cast<c10::Device>();
    auto sender = py::handle(args[2]).cast<std::shared_ptr<BlockSender>>();
    auto& devices = saver_of(self)->table->devices;
    std::erase_if(devices, [&](const SaveTable::DeviceRow& row) { return row.device == device; });
    devices.push_back({device, action_of(args[1]), std::move(sender)});
    Py_RETURN_NONE;
  });
}

// Whether these are a tensor and a view. False with TypeError set: they are not.
bool check_saved(PyObject* tensor, PyObject* view) {
  if (!THPVariable_Check(tensor)) {
    PyErr_Format(PyExc_TypeError, "expected a torch.Tensor to save, found %R", tensor);
    return false;
  }
  return saved_view_of(view) != nullptr;
}

PyObject* py_save(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  if (count != 3) {
    PyErr_SetString(PyExc_TypeError, "save needs a tensor, its view and a visit");
    return nullptr;
  }
  if (!check_saved(args[0], args[1])) {
    return nullptr;
  }
  return guarded<PyObject*>(nullptr, [&] {
    return save(saver_of(self), args[0], args[1], place_of_visit(args[2])).release().ptr();
  });
}

PyObject* py_keep(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  if (count != 3 || !PyUnicode_Check(args[2])) {
    PyErr_SetString(PyExc_TypeError, "keep needs a tensor, its view and a reason");
    return nullptr;
  }
  if (!check_saved(args[0], args[1])) {
    return nullptr;
  }
  return guarded<PyObject*>(nullptr, [&] {
    const char* const reason = PyUnicode_AsUTF8(args[2]);
    if (reason == nullptr) {
      throw py::error_already_set();
    }
    return keep(saver_of(self), args[0], args[1], reason).release().ptr();
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

void wait_for_arrival(SaverObject* self, Ticket& arrival) {
  try {
    wait_on_ledger(reinterpret_cast<LedgerObject*>(self->ledger), arrival);
  } catch (const TransferError& error) {
    const py::object words = py::handle(transfer_error)(error.what());
    owned(PyObject_CallMethodOneArg(reinterpret_cast<PyObject*>(self), names.lost, words.ptr()));
    throw;
  }
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
  if (PySet_Contains(passage->held, index.ptr()) == 1 && held_by_handles_only(entry)) {
    PySet_Discard(passage->held, index.ptr());
  }
}

PyObject* py_demand(PyObject* self, PyObject* entry) {
  return guarded<PyObject*>(nullptr, [&] {
    if (entry_object(entry) == nullptr) {
      throw py::error_already_set();
    }
    return storage_object(demand(saver_of(self), entry));
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
    &SaverObject::ledger,  &SaverObject::lock,     &SaverObject::departing,  &SaverObject::encoding,
    &SaverObject::passage, &SaverObject::director, &SaverObject::persistent, &SaverObject::backward,
};

PyObject* make(PyTypeObject* type, PyObject* args, PyObject* named) {
  PyObject *ledger = nullptr, *encoding = nullptr;
  static const char* words[] = {"ledger", "encoding", nullptr};
  if (!PyArg_ParseTupleAndKeywords(args, named, "OO", const_cast<char**>(words), &ledger,
                                   &encoding)) {
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
    put(self->persistent, persistent.ptr());
    self->looks_ahead = 1;
    new (&self->table) std::unique_ptr<SaveTable>(std::make_unique<SaveTable>());
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
  std::destroy_at(&saver_of(self)->table);
  free_instance(self);
}

PyMethodDef methods[] = {
    {"save", as_method(py_save), METH_FASTCALL,
     "save(tensor, view, visit): a plain tensor's handle."},
    {"keep", as_method(py_keep), METH_FASTCALL,
     "keep(tensor, view, reason): a tensor stays, and nothing is known of its storage."},
    {"set_policy", as_method(py_set_policy), METH_FASTCALL,
     "set_policy(min_bytes, action): what is done with every storage; None: as its device's row "
     "says. 'ask' and what is not known here: `save_new` decides."},
    {"set_device", as_method(py_set_device), METH_FASTCALL,
     "set_device(device, action, sender): what a policy without an action means there, and how "
     "storages are swapped."},
    {"swap", as_method(swap_out), METH_FASTCALL,
     "swap(tensor, view, sender): make the entry of what its passage admitted last, and send it by "
     "a BlockSender. Its handle; or the entry, where there was no room."},
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
    {"shares_batches", T_BOOL, offsetof(SaverObject, shares_batches), 0, nullptr},
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
  auto storage = std::make_shared<StorageRef>(THPVariable_Unpack(tensor).storage());
  const SavedView* const look = saved_view_of(view);
  if (look == nullptr) {
    throw py::error_already_set();
  }
  py::object made = new_entry(reinterpret_cast<PyObject*>(self),
                              reinterpret_cast<LedgerObject*>(self->ledger), *look, *storage);
  place(passage, entry_of(made.ptr()));
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

StorageRefPtr demand(SaverObject* self, PyObject* given) {
  EntryObject* const entry = entry_of(given);
  Told told(self, given);
  StorageRefPtr storage;
  TicketPtr arrival;
  {
    const Locked locked(self->lock);
    learn_reports(self);
    told.demanding();
    storage = bring(entry);
    arrival = entry->arrival;
    if (!empty(entry->passage)) {
      look_ahead(self, entry);
    }
  }
  if (arrival) {
    wait_for_arrival(self, *arrival);
  }
  if (entry->trial) {
    entry->trial->demanded();
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
  if (entry->trial) {
    entry->trial->demanded();
  }
  told.demanded();
}

void bind_saver(py::module_& module) {
  names = {.demanded = interned("demanded"),
           .demanding = interned("demanding"),
           .learn = interned("_learn"),
           .look_ahead = interned("look_ahead"),
           .lost = interned("lost")};
  out_of_memory = py::object(py::module_::import("torch").attr("OutOfMemoryError")).release().ptr();
  transfer_error = py::object(module.attr("TransferError")).release().ptr();
  lock_type = add_type(module, "Lock", lock_spec);
  saver_type = add_type(module, "Saver", spec);
}

}  // namespace memswap
