// A Forecast of Python's: what a finished passage says about the next one.
#pragma once

#include <pybind11/pybind11.h>

#include "engine/passage.h"

namespace memswap {

// What a passage predicts. Its words are Python's.
struct ForecastObject {
  PyObject_HEAD Forecast forecast;
  PyObject* needed_at_once;
  PyObject* never_freed;
};

// With the words for what backward demands first, and for what was held.
pybind11::object new_forecast(Forecast forecast, PyObject* needed_at_once, PyObject* never_freed);

// An object as a forecast, borrowed. nullptr with TypeError set: it is none.
ForecastObject* forecast_object(PyObject* object);

}  // namespace memswap
