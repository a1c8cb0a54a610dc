// Handles of Python's.
#pragma once

#include <pybind11/pybind11.h>

namespace memswap {

// The handle of a save whose storage leaves: an EntryObject, which it owns, and a SavedView.
pybind11::object moved(PyObject* entry, PyObject* view);

}  // namespace memswap
