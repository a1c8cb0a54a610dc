// A StorageRef of Python's, and what passes it to and from functions that pybind11 binds: to be
// included by every file that binds one.
#pragma once

#include <pybind11/pybind11.h>

#include "storage/storage.h"

namespace memswap {

struct StorageObject {
  PyObject_HEAD StorageRefPtr ref;  // never nullptr
};

// The storage in an object, or nullptr: it is no StorageRef.
const StorageRefPtr* storage_in(PyObject* object);

// A new reference; None for nullptr.
PyObject* storage_object(StorageRefPtr ref);

// The same, for who cannot go on with anything else. Throws TypeError.
inline const StorageRefPtr& expect_storage(PyObject* object) {
  const StorageRefPtr* const ref = storage_in(object);
  if (ref == nullptr) {
    throw pybind11::type_error("expected a StorageRef");
  }
  return *ref;
}

}  // namespace memswap

namespace pybind11::detail {

template <>
struct type_caster<memswap::StorageRefPtr> {
  PYBIND11_TYPE_CASTER(memswap::StorageRefPtr, const_name("memswap._C.StorageRef"));

  bool load(handle source, bool) {
    if (source.is_none()) {
      value = nullptr;
      return true;
    }
    const memswap::StorageRefPtr* const ref = memswap::storage_in(source.ptr());
    if (ref != nullptr) {
      value = *ref;
    }
    return ref != nullptr;
  }

  static handle cast(memswap::StorageRefPtr source, return_value_policy, handle) {
    return memswap::storage_object(std::move(source));
  }
};

template <>
struct type_caster<memswap::StorageRef> {
  static constexpr auto name = const_name("memswap._C.StorageRef");
  template <class T>
  using cast_op_type = pybind11::detail::cast_op_type<T>;

  bool load(handle source, bool) {
    const memswap::StorageRefPtr* const ref = memswap::storage_in(source.ptr());
    value = ref == nullptr ? nullptr : ref->get();
    return value != nullptr;
  }

  operator memswap::StorageRef*() { return value; }
  operator memswap::StorageRef&() { return *value; }

 private:
  memswap::StorageRef* value = nullptr;
};

}  // namespace pybind11::detail
