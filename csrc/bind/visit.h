// Visits of Python's.
#pragma once

#include <pybind11/pybind11.h>

#include "save.h"

namespace memswap {

// Where a visit saves. Throws TypeError: it is none.
SavePlace place_of_visit(PyObject* visit);

}  // namespace memswap
