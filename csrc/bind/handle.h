// Handles of Python's.
#pragma once

#include <pybind11/pybind11.h>

#include "ledger.h"
#include "storage/saved_view.h"

namespace memswap {

// The handle of a save whose storage leaves: an EntryObject, which it owns, and a SavedView.
pybind11::object moved(PyObject* entry, PyObject* view);

// The handle of a save whose tensor stays: its EntryObject, its stay or None.
pybind11::object kept(PyObject* tensor, PyObject* entry);

// A storage that stays for good: known, and counted once.
pybind11::object new_stay(LedgerObject* ledger, const SavedView& look);

}  // namespace memswap
