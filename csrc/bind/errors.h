// Errors and warnings of C++ as those of memswap.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

namespace memswap {

// Sets an error of memswap.errors by its name.
inline void set_error(const char* name, const char* message) {
  const pybind11::object error = pybind11::module_::import("memswap.errors").attr(name);
  PyErr_SetString(error.ptr(), message);
}

// Warns at the line of the user's that led here.
inline void warn(const std::string& message) {
  const pybind11::gil_scoped_acquire gil;
  pybind11::module_::import("memswap._warn").attr("warn")("memswap: " + message);
}

}  // namespace memswap
