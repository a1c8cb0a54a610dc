// Storages on their way from Python.
#pragma once

#include <pybind11/pybind11.h>

#include "storage/storage.h"

namespace memswap {

// A storage, for who cannot go on without one. Throws TypeError for None.
inline const StorageRefPtr& some(const StorageRefPtr& storage) {
  if (!storage) {
    throw pybind11::type_error("expected a StorageRef, found None");
  }
  return storage;
}

}  // namespace memswap
