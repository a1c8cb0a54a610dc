// A Ledger of Python's.
#pragma once

#include <pybind11/pybind11.h>

#include "residence.h"

namespace memswap {

struct LedgerObject {
  PyObject_HEAD Ledger ledger;
};

// An object as a ledger, borrowed. nullptr with TypeError set: it is none.
LedgerObject* ledger_object(PyObject* object);

}  // namespace memswap
