// A SavedView of Python's.
#pragma once

#include <pybind11/pybind11.h>

namespace memswap {

class SavedView;

// The SavedView of a tensor, or None where a storage alone does not say what it is. Throws
// TypeError for what is no tensor.
pybind11::object captured(PyObject* tensor);

// A SavedView that was captured before, of a plain tensor.
pybind11::object view_object(const SavedView& view);

// Whether the tensor of a SavedView, or what it is a view of, has a class of its own.
bool view_of_subclass(PyObject* view);

}  // namespace memswap
