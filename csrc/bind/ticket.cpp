#include "ticket.h"

#include <torch/csrc/utils/pybind.h>

#include "calls.h"
#include "lane/work_ticket.h"
#include "work/ticket.h"

namespace memswap {
namespace py = pybind11;

namespace {

PyTypeObject* ticket_type = nullptr;  // set once, by bind_ticket
struct Names {
  PyObject *abandon, *done, *failed, *wait;
} names;

Ticket* native_ticket(PyObject* ticket) {
  return Py_IS_TYPE(ticket, ticket_type) ? py::handle(ticket).cast<Ticket*>() : nullptr;
}

}  // namespace

bool is_done(PyObject* ticket) {
  Ticket* const native = native_ticket(ticket);
  return native ? native->done() : truth(PyObject_CallMethodNoArgs(ticket, names.done));
}

bool has_failed(PyObject* ticket) {
  Ticket* const native = native_ticket(ticket);
  return native ? failed(*native) : truth(PyObject_CallMethodNoArgs(ticket, names.failed));
}

void wait_for(PyObject* ticket) {
  if (Ticket* const native = native_ticket(ticket)) {
    native->wait();
  } else {
    owned(PyObject_CallMethodNoArgs(ticket, names.wait));
  }
}

void abandon(PyObject* ticket) {
  if (Ticket* const native = native_ticket(ticket)) {
    native->abandon();
  } else {
    owned(PyObject_CallMethodNoArgs(ticket, names.abandon));
  }
}

void bind_ticket(py::module_&) {
  ticket_type = reinterpret_cast<PyTypeObject*>(py::type::of<Ticket>().release().ptr());
  names = {.abandon = interned("abandon"),
           .done = interned("done"),
           .failed = interned("failed"),
           .wait = interned("wait")};
}

}  // namespace memswap
