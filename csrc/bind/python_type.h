// Types of Python's own kind, for what is made and asked for each saved tensor.
//
// pybind11 looks instances up in a registry when it makes and drops them and casts each argument,
// which together takes longer than what these types do.
#pragma once

#include <pybind11/pybind11.h>
#include <structmember.h>

#include <algorithm>
#include <array>
#include <cstddef>

#include "storage/saved_view.h"

namespace memswap {

// Runs a body that returns what a function of Python's C interface returns; `failed` is what that
// function returns with an exception set.
template <class Result, class Body>
Result guarded(Result failed, Body&& body) noexcept {
  try {
    return body();
  } catch (pybind11::error_already_set& error) {
    error.restore();
  } catch (...) {
    pybind11::detail::try_translate_exceptions();  // as for every function of this module
  }
  return failed;
}

// A method of any calling convention as a PyMethodDef takes it.
template <class Method>
PyCFunction as_method(Method method) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(method));
}

// Sorts the arguments of a METH_FASTCALL | METH_KEYWORDS method by their names; what is not given
// stays as it is. False with TypeError set: too many, or another name.
template <size_t count>
bool sort_arguments(const std::array<const char*, count>& names, PyObject* const* args,
                    Py_ssize_t positional, PyObject* given_names,
                    std::array<PyObject*, count>& sorted) {
  if (positional > static_cast<Py_ssize_t>(count)) {
    PyErr_Format(PyExc_TypeError, "expected at most %zu arguments, found %zd", count, positional);
    return false;
  }
  std::copy(args, args + positional, sorted.begin());
  const Py_ssize_t by_name = given_names == nullptr ? 0 : PyTuple_GET_SIZE(given_names);
  for (Py_ssize_t i = 0; i < by_name; ++i) {
    PyObject* const given = PyTuple_GET_ITEM(given_names, i);
    const auto known = std::find_if(names.begin(), names.end(), [&](const char* name) {
      return PyUnicode_CompareWithASCIIString(given, name) == 0;
    });
    if (known == names.end()) {
      PyErr_Format(PyExc_TypeError, "unexpected argument %R", given);
      return false;
    }
    sorted[static_cast<size_t>(known - names.begin())] = args[positional + i];
  }
  return true;
}

// Adds a type to a module and returns it, borrowed.
inline PyTypeObject* add_type(pybind11::module_& module, const char* name, PyType_Spec& spec) {
  PyObject* type = PyType_FromModuleAndSpec(module.ptr(), &spec, nullptr);
  if (type == nullptr) {
    throw pybind11::error_already_set();
  }
  module.add_object(name, pybind11::reinterpret_steal<pybind11::object>(type));
  return reinterpret_cast<PyTypeObject*>(type);
}

// A slot of an instance that holds nothing: never filled, or None.
inline bool empty(const PyObject* slot) { return slot == nullptr || slot == Py_None; }

// What a type that may be in a circle does with its slots, given as an array of members of
// `Object`. `object` and `self` are one and the same instance.

template <class Slots, class Object>
void fill_with_none(const Slots& slots, Object* object) {
  for (const auto slot : slots) {
    object->*slot = Py_NewRef(Py_None);
  }
}

template <class Slots, class Object>
int visit_slots(const Slots& slots, Object* object, PyObject* self, visitproc visit, void* arg) {
  for (const auto slot : slots) {
    Py_VISIT(object->*slot);
  }
  Py_VISIT(Py_TYPE(self));
  return 0;
}

template <class Slots, class Object>
void clear_slots(const Slots& slots, Object* object) {
  for (const auto slot : slots) {
    Py_CLEAR(object->*slot);
  }
}

// tp_setattro of a type whose members native code reads without asking whether they are there: they
// may be set, and are never deleted.
inline int set_attribute(PyObject* self, PyObject* name, PyObject* value) {
  if (value == nullptr) {
    PyObject* const found = PyObject_GetAttr(reinterpret_cast<PyObject*>(Py_TYPE(self)), name);
    const bool member = found != nullptr && Py_IS_TYPE(found, &PyMemberDescr_Type);
    Py_XDECREF(found);
    PyErr_Clear();
    if (member) {
      PyErr_Format(PyExc_TypeError, "%R of a %s cannot be deleted; set it to another value", name,
                   Py_TYPE(self)->tp_name);
      return -1;
    }
  }
  return PyObject_GenericSetAttr(self, name, value);
}

// The end of a tp_dealloc: an instance owns its type.
inline void free_instance(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

// The view in a SavedView of Python's. nullptr with TypeError set: it is none.
const SavedView* saved_view_of(PyObject* object);

}  // namespace memswap
