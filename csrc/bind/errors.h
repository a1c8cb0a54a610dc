// Errors of C++ as those of memswap.errors.
#pragma once

#include <pybind11/pybind11.h>

namespace memswap {

// Sets an error of memswap.errors by its name.
inline void set_error(const char* name, const char* message) {
  const pybind11::object error = pybind11::module_::import("memswap.errors").attr(name);
  PyErr_SetString(error.ptr(), message);
}

}  // namespace memswap
