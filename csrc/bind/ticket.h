// Tickets, asked from the native side: Ticket itself, or whatever has its methods in Python.
#pragma once

#include <pybind11/pybind11.h>

namespace memswap {

// Tickets let go of the GIL themselves where they have to ([Note: No lock while holding the GIL]),
// so these are called with it. They throw what the ticket throws.
bool is_done(PyObject* ticket);
bool has_failed(PyObject* ticket);
void wait_for(PyObject* ticket);
void abandon(PyObject* ticket);

}  // namespace memswap
