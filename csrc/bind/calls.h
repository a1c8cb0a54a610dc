// What functions of Python's C interface return, with their failures as exceptions of C++.
#pragma once

#include <pybind11/pybind11.h>

namespace memswap {

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

// Whether an object is true.
inline bool is_true(PyObject* object) {
  const int answer = PyObject_IsTrue(object);
  if (answer < 0) {
    throw pybind11::error_already_set();
  }
  return answer != 0;
}

// Whether the result of such a call is true.
inline bool truth(PyObject* result) { return is_true(owned(result).ptr()); }

}  // namespace memswap
