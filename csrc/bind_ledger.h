// A Ledger of Python's.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <unordered_map>

#include "residence.h"

namespace memswap {

struct LedgerObject {
  struct Known {
    PyObject* holder;  // borrowed: it takes itself off the list when it dies
    uint32_t version;
  };

  PyObject_HEAD Ledger ledger;
  std::unordered_map<const void*, Known> known;  // by the address of the storage
};

// An object as a ledger, borrowed. nullptr with TypeError set: it is none.
LedgerObject* ledger_object(PyObject* object);

// From here on `holder` stands for the storage at an address, with the content of a version; until
// `forget`, which it calls before another storage can have that address.
void remember(LedgerObject* ledger, const void* key, uint32_t version, PyObject* holder);
void forget(LedgerObject* ledger, const void* key, const PyObject* holder);

// Waits for a ticket; for as long as the host is blocked, that counts.
void wait_on_ledger(LedgerObject* ledger, PyObject* ticket);

}  // namespace memswap
