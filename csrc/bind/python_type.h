// What Python's C interface takes, for calls that must cost no more than 100 ns: pybind11 looks
// instances up in a registry when it makes and drops them and casts each argument, which together
// takes longer than what a handle does.
#pragma once

#include <pybind11/pybind11.h>

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

}  // namespace memswap
