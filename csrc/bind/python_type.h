// Types of Python's own kind, for what is made and asked for each saved tensor: pybind11 looks
// instances up in a registry when it makes and drops them and casts each argument, which together
// takes longer than what these types do.
#pragma once

#include <pybind11/pybind11.h>
#include <structmember.h>

namespace memswap {

// Runs a body that returns what a function of Python's C interface returns: nullptr with an
// exception set where it fails.
template <class Body>
PyObject* guarded(Body&& body) noexcept {
  try {
    return body();
  } catch (pybind11::error_already_set& error) {
    error.restore();
  } catch (...) {
    pybind11::detail::try_translate_exceptions();  // as for every function of this module
  }
  return nullptr;
}

// The new reference that a call of Python's C interface returned, or the exception that it set.
inline pybind11::object owned(PyObject* result) {
  if (result == nullptr) {
    throw pybind11::error_already_set();
  }
  return pybind11::reinterpret_steal<pybind11::object>(result);
}

// A name to look attributes up by, for as long as the process lives.
inline PyObject* interned(const char* name) {
  return owned(PyUnicode_InternFromString(name)).release().ptr();
}

// Calls a method by its interned name.
template <class... Arguments>
pybind11::object call_method(PyObject* self, PyObject* name, Arguments*... arguments) {
  PyObject* const all[] = {self, arguments...};
  return owned(PyObject_VectorcallMethod(name, all, sizeof...(arguments) + 1, nullptr));
}

// Adds a type to a module and returns it, borrowed.
inline PyTypeObject* add_type(pybind11::module_& module, const char* name, PyType_Spec& spec) {
  PyObject* const type =
      owned(PyType_FromModuleAndSpec(module.ptr(), &spec, nullptr)).release().ptr();
  module.add_object(name, pybind11::reinterpret_steal<pybind11::object>(type));
  return reinterpret_cast<PyTypeObject*>(type);
}

// The end of a tp_dealloc: an instance owns its type.
inline void free_instance(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

}  // namespace memswap
