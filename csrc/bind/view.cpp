// SavedView, as Python sees it.
#include "view.h"

#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <new>
#include <string>
#include <utility>

#include "calls.h"
#include "python_type.h"
#include "storage/saved_view.h"
#include "storage_ref.h"

namespace memswap {
namespace py = pybind11;

namespace {

struct ViewObject {
  PyObject_HEAD SavedView view;
  bool of_subclass;
};

PyTypeObject* view_type = nullptr;  // set once, by bind_view

const SavedView& view_of(PyObject* self) { return reinterpret_cast<ViewObject*>(self)->view; }

// Whether the tensor, or the one that it is a view of, has a class of its own, as a Parameter has.
bool is_of_subclass(PyObject* object, const at::Tensor& tensor) {
  const auto plain = reinterpret_cast<PyTypeObject*>(THPVariableClass);
  if (!tensor.is_view()) {
    return !Py_IS_TYPE(object, plain);
  }
  const auto base = py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor._base()));
  return !Py_IS_TYPE(base.ptr(), plain);
}

PyObject* capture(PyObject*, PyObject* tensor) {
  return guarded<PyObject*>(nullptr, [&] { return captured(tensor).release().ptr(); });
}

void dealloc(PyObject* self) {
  reinterpret_cast<ViewObject*>(self)->view.~SavedView();
  free_instance(self);
}

PyObject* rebuild(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* given) {
  static constexpr std::array names = {"storage", "shares_counter"};
  std::array<PyObject*, 2> sorted = {};
  if (!sort_arguments(names, args, count, given, sorted)) {
    return nullptr;
  }
  return guarded<PyObject*>(nullptr, [&] {
    const auto [storage, shares_counter] = sorted;
    if (storage == nullptr || shares_counter == nullptr) {
      throw py::type_error("rebuild needs a storage and whether it shares the version counter");
    }
    const StorageRef& ref = *expect_storage(storage);
    return THPVariable_Wrap(view_of(self).rebuild(ref, is_true(shares_counter)));
  });
}

PyObject* describe(PyObject* self, PyObject*) {
  return guarded<PyObject*>(nullptr,
                            [&] { return py::str(view_of(self).describe()).release().ptr(); });
}

template <bool (SavedView::*get)() const>
PyObject* flag(PyObject* self, void*) {
  return PyBool_FromLong((view_of(self).*get)());
}

template <auto get>
PyObject* number(PyObject* self, void*) {
  return PyLong_FromSize_t((view_of(self).*get)());
}

PyObject* of_subclass(PyObject* self, void*) {
  return PyBool_FromLong(reinterpret_cast<ViewObject*>(self)->of_subclass);
}

PyObject* device_number(PyObject* self, void*) {
  const c10::Device device = view_of(self).device();
  return PyLong_FromLong(static_cast<long>(device.type()) << 16 | (device.index() + 1));
}

PyObject* key(PyObject* self, void*) {
  return PyLong_FromVoidPtr(const_cast<void*>(view_of(self).storage_key()));
}

PyMethodDef methods[] = {
    {"rebuild", as_method(rebuild), METH_FASTCALL | METH_KEYWORDS,
     "A new tensor of this look on a storage."},
    {"describe", describe, METH_NOARGS, "Dtype, size and device, in words."},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef properties[] = {
    {"edited", flag<&SavedView::edited>, nullptr, nullptr, nullptr},
    {"of_leaf", flag<&SavedView::of_leaf>, nullptr, nullptr, nullptr},
    {"of_subclass", of_subclass, nullptr, nullptr, nullptr},
    {"device_number", device_number, nullptr, "One number for each device.", nullptr},
    {"private_format", flag<&SavedView::private_format>, nullptr, nullptr, nullptr},
    {"edited_part", flag<&SavedView::edited_part>, nullptr, nullptr, nullptr},
    {"part_of_data", flag<&SavedView::part_of_data>, nullptr, nullptr, nullptr},
    {"computed", flag<&SavedView::computed>, nullptr, nullptr, nullptr},
    {"version", number<&SavedView::version>, nullptr, nullptr, nullptr},
    {"current_version", number<&SavedView::current_version>, nullptr, nullptr, nullptr},
    {"storage_nbytes", number<&SavedView::storage_nbytes>, nullptr, nullptr, nullptr},
    {"nbytes", number<&SavedView::nbytes>, nullptr, nullptr, nullptr},
    {"key", key, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
    {Py_tp_methods, methods},
    {Py_tp_getset, properties},
    {Py_tp_doc, const_cast<char*>("How a saved tensor looks at its storage.")},
    {0, nullptr},
};

PyType_Spec spec = {
    .name = "memswap._C.SavedView",
    .basicsize = sizeof(ViewObject),
    .itemsize = 0,
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = slots,
};

PyMethodDef functions[] = {
    {"capture", capture, METH_O, "The SavedView of a plain strided tensor, or None."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

py::object view_object(const SavedView& view) {
  py::object object = owned(view_type->tp_alloc(view_type, 0));
  auto* const made = reinterpret_cast<ViewObject*>(object.ptr());
  new (&made->view) SavedView(view);
  made->of_subclass = false;
  return object;
}

py::object captured(PyObject* tensor) {
  if (!THPVariable_Check(tensor)) {
    throw py::type_error("capture needs a torch.Tensor");
  }
  const at::Tensor& unpacked = THPVariable_Unpack(tensor);
  auto view = SavedView::capture(unpacked);
  if (!view) {
    return py::none();
  }
  const bool of_subclass = is_of_subclass(tensor, unpacked);
  py::object object = owned(view_type->tp_alloc(view_type, 0));
  auto* const made = reinterpret_cast<ViewObject*>(object.ptr());
  new (&made->view) SavedView(std::move(*view));
  made->of_subclass = of_subclass;
  return object;
}

bool view_of_subclass(PyObject* view) { return reinterpret_cast<ViewObject*>(view)->of_subclass; }

const SavedView* saved_view_of(PyObject* object) {
  if (!Py_IS_TYPE(object, view_type)) {
    PyErr_Format(PyExc_TypeError, "expected a SavedView, found %R", object);
    return nullptr;
  }
  return &view_of(object);
}

void bind_view(py::module_& module) {
  view_type = add_type(module, "SavedView", spec);
  if (PyModule_AddFunctions(module.ptr(), functions) != 0) {
    throw py::error_already_set();
  }
}

}  // namespace memswap
