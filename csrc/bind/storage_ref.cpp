// StorageRef, as Python sees it.
#include "storage_ref.h"

#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <new>
#include <utility>

#include "python_type.h"

namespace memswap {
namespace py = pybind11;

namespace {

PyTypeObject* storage_type = nullptr;  // set once, by bind_storage_ref

StorageRefPtr& ref_in(PyObject* self) { return reinterpret_cast<StorageObject*>(self)->ref; }

PyObject* make(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject* tensor = nullptr;
  if (!PyArg_UnpackTuple(args, "StorageRef", 1, 1, &tensor)) {
    return nullptr;
  }
  return guarded<PyObject*>(nullptr, [&]() -> PyObject* {
    if (!THPVariable_Check(tensor)) {
      throw py::type_error("StorageRef needs a torch.Tensor");
    }
    auto ref = std::make_shared<StorageRef>(THPVariable_Unpack(tensor).storage());
    PyObject* const self = type->tp_alloc(type, 0);
    if (self != nullptr) {
      new (&ref_in(self)) StorageRefPtr(std::move(ref));
    }
    return self;
  });
}

void dealloc(PyObject* self) {
  ref_in(self).~StorageRefPtr();
  free_instance(self);
}

PyObject* nbytes(PyObject* self, void*) {
  return PyLong_FromSize_t(ref_in(self)->storage.nbytes());
}

PyObject* key(PyObject* self, void*) {
  return PyLong_FromVoidPtr(ref_in(self)->storage.unsafeGetStorageImpl());
}

PyObject* use_count(PyObject* self, void*) {
  return PyLong_FromSize_t(ref_in(self)->storage.use_count());
}

PyObject* edited(PyObject* self, void*) {
  return PyBool_FromLong(ref_in(self)->version.current_version() != 0);
}

PyGetSetDef properties[] = {
    {"nbytes", nbytes, nullptr, nullptr, nullptr},
    {"key", key, nullptr, nullptr, nullptr},
    {"use_count", use_count, nullptr, nullptr, nullptr},
    {"edited", edited, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(make)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
    {Py_tp_getset, properties},
    {Py_tp_doc, const_cast<char*>("A share of one tensor storage.")},
    {0, nullptr},
};

PyType_Spec spec = {
    .name = "memswap._C.StorageRef",
    .basicsize = sizeof(StorageObject),
    .itemsize = 0,
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots,
};

}  // namespace

const StorageRefPtr* storage_in(PyObject* object) {
  return Py_IS_TYPE(object, storage_type) ? &ref_in(object) : nullptr;
}

PyObject* storage_object(StorageRefPtr ref) {
  if (!ref) {
    Py_RETURN_NONE;
  }
  PyObject* const object = storage_type->tp_alloc(storage_type, 0);
  if (object != nullptr) {
    new (&ref_in(object)) StorageRefPtr(std::move(ref));
  }
  return object;
}

void bind_storage_ref(py::module_& module) { storage_type = add_type(module, "StorageRef", spec); }

}  // namespace memswap
