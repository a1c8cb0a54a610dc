// SwapWay, as Python sees it. Taking a block and sending are one call, and so is bringing back.
#include "way.h"

#include <pybind11/pybind11.h>
#include <torch/csrc/utils/pybind.h>

#include <cstddef>
#include <new>
#include <utility>

#include "calls.h"
#include "pool/block.h"
#include "python_type.h"
#include "storage/memory_share.h"
#include "storage/storage.h"
#include "storage_ref.h"
#include "work/ticket.h"

namespace memswap {
namespace py = pybind11;

namespace {

// Set once, by bind_way.
PyTypeObject* way_type = nullptr;
struct Names {
  PyObject *allocate, *fetch, *send;
} names;

SwapWayObject* way_of(PyObject* self) { return reinterpret_cast<SwapWayObject*>(self); }

py::object call(PyObject* object, PyObject* name, PyObject* one, PyObject* other = nullptr) {
  PyObject* const arguments[] = {object, one, other};
  const size_t count = other == nullptr ? 2 : 3;
  return owned(PyObject_VectorcallMethod(name, arguments, count, nullptr));
}

template <class Native>
std::shared_ptr<Native> as_native(PyObject* object) {
  const py::handle handle(object);
  return py::isinstance<Native>(handle) ? handle.cast<std::shared_ptr<Native>>() : nullptr;
}

PyObject* make(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *lane = nullptr, *blocks = nullptr;
  if (!PyArg_UnpackTuple(args, "SwapWay", 2, 2, &lane, &blocks)) {
    return nullptr;
  }
  return guarded<PyObject*>(nullptr, [&] {
    auto native_lane = as_native<Lane>(lane);
    auto native_blocks = as_native<Pool>(blocks);
    py::object made = owned(type->tp_alloc(type, 0));
    SwapWayObject* const self = way_of(made.ptr());
    new (&self->native_lane) std::shared_ptr<Lane>(std::move(native_lane));
    new (&self->native_blocks) std::shared_ptr<Pool>(std::move(native_blocks));
    self->lane = Py_NewRef(lane);
    self->blocks = Py_NewRef(blocks);
    return made.release().ptr();
  });
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(way_of(self)->lane);
  Py_VISIT(way_of(self)->blocks);
  Py_VISIT(Py_TYPE(self));
  return 0;
}

void dealloc(PyObject* object) {
  SwapWayObject* const self = way_of(object);
  PyObject_GC_UnTrack(object);
  Py_CLEAR(self->lane);
  Py_CLEAR(self->blocks);
  self->native_lane.~shared_ptr();
  self->native_blocks.~shared_ptr();
  free_instance(object);
}

PyObject* py_send(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  if (count < 1 || count > 2) {
    PyErr_SetString(PyExc_TypeError, "send needs a storage, and takes no expectation");
    return nullptr;
  }
  return guarded<PyObject*>(nullptr, [&]() -> PyObject* {
    const Sent sent = send(way_of(self), args[0]);
    if (!sent.away) {
      Py_RETURN_NONE;
    }
    return PyTuple_Pack(2, sent.away.ptr(), sent.departure.ptr());
  });
}

PyObject* py_bring(PyObject* self, PyObject* block) {
  return guarded<PyObject*>(nullptr, [&] {
    const Brought brought = bring(way_of(self), block);
    return PyTuple_Pack(2, brought.storage.ptr(), brought.arrival.ptr());
  });
}

PyMethodDef methods[] = {
    {"send", as_method(py_send), METH_FASTCALL,
     "send(storage, expectation=None): start sending it into a block. The block and the ticket, or "
     "None: there is no room, and nothing was started."},
    {"bring", py_bring, METH_O, "Start bringing a block back: a new storage, and the ticket."},
    {nullptr, nullptr, 0, nullptr},
};

PyMemberDef members[] = {
    {"lane", T_OBJECT_EX, offsetof(SwapWayObject, lane), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(make)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {Py_tp_doc, const_cast<char*>("SwapWay(lane, blocks): raw bytes, in blocks of a pool.")},
    {0, nullptr},
};

PyType_Spec spec = {
    .name = "memswap._C.SwapWay",
    .basicsize = sizeof(SwapWayObject),
    .itemsize = 0,
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = slots,
};

// A block for a lane of Python's, or None.
py::object allocate(SwapWayObject* way, size_t nbytes) {
  if (!way->native_blocks) {
    return call(way->blocks, names.allocate, owned(PyLong_FromSize_t(nbytes)).ptr());
  }
  BlockPtr block;
  {
    const py::gil_scoped_release release;
    block = way->native_blocks->allocate(nbytes);
  }
  return py::cast(block);  // of nullptr: None
}

}  // namespace

SwapWayObject* swap_way(PyObject* object) {
  return object != nullptr && PyObject_TypeCheck(object, way_type) ? way_of(object) : nullptr;
}

Sent send(SwapWayObject* way, PyObject* storage) {
  const StorageRefPtr ref = expect_storage(storage);
  const size_t nbytes = ref->storage.nbytes();
  if (way->native_lane && way->native_blocks) {
    BlockPtr block;
    TicketPtr departure;
    if (ref->storage.device().is_cpu()) {
      share_memory(*ref);
    }
    {
      const py::gil_scoped_release release;
      block = way->native_blocks->allocate(nbytes);
      if (block) {
        departure = way->native_lane->send(ref, block);
      }
    }
    return block ? Sent{py::cast(block), py::cast(departure)} : Sent{};
  }
  py::object block = allocate(way, nbytes);
  if (block.is_none()) {
    return {};
  }
  py::object departure = call(way->lane, names.send, storage, block.ptr());
  return {std::move(block), std::move(departure)};
}

Brought bring(SwapWayObject* way, PyObject* block) {
  if (!way->native_lane) {
    return brought_by(call(way->lane, names.fetch, block));
  }
  const auto source = py::handle(block).cast<BlockPtr>();
  std::pair<StorageRefPtr, TicketPtr> fetched;
  {
    const py::gil_scoped_release release;
    fetched = way->native_lane->fetch(source);
  }
  return {owned(storage_object(std::move(fetched.first))), py::cast(fetched.second)};
}

Brought brought_by(const py::object& pair) {
  if (!PyTuple_CheckExact(pair.ptr()) || PyTuple_GET_SIZE(pair.ptr()) != 2) {
    throw py::type_error("bring() of a way returns a storage and a ticket");
  }
  return {py::reinterpret_borrow<py::object>(PyTuple_GET_ITEM(pair.ptr(), 0)),
          py::reinterpret_borrow<py::object>(PyTuple_GET_ITEM(pair.ptr(), 1))};
}

void bind_way(py::module_& module) {
  names = {.allocate = interned("allocate"), .fetch = interned("fetch"), .send = interned("send")};
  way_type = add_type(module, "SwapWay", spec);
}

}  // namespace memswap
