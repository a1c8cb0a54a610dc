// Forecast, as Python sees it: made by a passage, followed by the next one.
#include "forecast.h"

#include <pybind11/pybind11.h>

#include <memory>
#include <new>
#include <utility>

#include "calls.h"
#include "python_type.h"

namespace memswap {
namespace py = pybind11;

namespace {

// Set once, by bind_forecast.
PyTypeObject* forecast_type = nullptr;

ForecastObject* forecast_of(PyObject* self) { return reinterpret_cast<ForecastObject*>(self); }

void dealloc(PyObject* self) {
  std::destroy_at(&forecast_of(self)->forecast);
  Py_CLEAR(forecast_of(self)->needed_at_once);
  Py_CLEAR(forecast_of(self)->never_freed);
  free_instance(self);
}

PyType_Slot slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
    {Py_tp_doc, const_cast<char*>("What a finished passage says about the next one.")},
    {0, nullptr},
};

PyType_Spec spec = {
    .name = "memswap._C.Forecast",
    .basicsize = sizeof(ForecastObject),
    .itemsize = 0,
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = slots,
};

}  // namespace

py::object new_forecast(Forecast forecast, PyObject* needed_at_once, PyObject* never_freed) {
  py::object made = owned(forecast_type->tp_alloc(forecast_type, 0));
  new (&forecast_of(made.ptr())->forecast) Forecast(std::move(forecast));
  forecast_of(made.ptr())->needed_at_once = Py_NewRef(needed_at_once);
  forecast_of(made.ptr())->never_freed = Py_NewRef(never_freed);
  return made;
}

ForecastObject* forecast_object(PyObject* object) {
  if (!Py_IS_TYPE(object, forecast_type)) {
    PyErr_Format(PyExc_TypeError, "expected a Forecast, found %R", object);
    return nullptr;
  }
  return forecast_of(object);
}

void bind_forecast(py::module_& module) { forecast_type = add_type(module, "Forecast", spec); }

}  // namespace memswap
