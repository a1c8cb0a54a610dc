// Handles, as Python sees them.
#pragma once

#include <pybind11/pybind11.h>

#include "engine/entry.h"
#include "engine/ledger.h"
#include "storage/saved_view.h"

namespace memswap {

// The handle of a save whose storage leaves, and that of one whose tensor stays. `owner`: the
// engine's object in Python, which is asked when bytes come back; it lives as long as the handle.
// `batch`: of a group, or None; it hears of each unpack. Both are borrowed.
pybind11::object moved_handle(EntryPtr entry, SavedView look, PyObject* owner, PyObject* batch);
pybind11::object kept_handle(PyObject* tensor, KnownPtr known, PyObject* owner);

}  // namespace memswap
