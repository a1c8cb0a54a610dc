// Tickets, blocks and pools; what the core says of Python's lock, of its errors and of its end.
#include <system_error>

#include "bind.h"
#include "lane/gather.h"
#include "pool/block.h"
#include "pool/host_limits.h"
#include "pool/numa.h"
#include "pool/open_pools.h"
#include "pool/pool.h"
#include "work/stop_at_exit.h"
#include "work/ticket.h"
#include "work/without_gil.h"

namespace memswap {

static py::object fields_of(const PoolStatistics& all) {
  using P = PoolStatistics;
  return as_dict<&P::in_use_bytes, &P::peak_bytes, &P::waste_bytes, &P::pending_bytes,
                 &P::free_bytes, &P::largest_free_bytes, &P::reserved_bytes, &P::slabs, &P::blocks,
                 &P::pending, &P::waits, &P::refusals, &P::last_refusal, &P::slabs_acquired,
                 &P::grown_in_background, &P::acquire_s, &P::pageable_bytes, &P::why_pageable,
                 &P::written_bytes>(all);
}

static py::object fields_of(const HostLimits& all) {
  using H = HostLimits;
  py::object fields = as_object<&H::available, &H::group, &H::lockable, &H::locked>(all);
  fields.attr("free_bytes") = all.free();
  return fields;
}

namespace {

GilHooks python_gil_hooks() {
  return {
      .release_if_held = []() -> void* {
        return Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr;
      },
      .take_back =
          [](void* released) { PyEval_RestoreThread(static_cast<PyThreadState*>(released)); },
      .take = []() -> void* {
        return Py_IsInitialized() ? new py::gil_scoped_acquire : nullptr;  // NOLINT: to be released
      },
      .release = [](void* taken) { delete static_cast<py::gil_scoped_acquire*>(taken); },
  };
}

// As Python raises it: OSError(number, words), so that FileNotFoundError and its kin appear.
void translate(std::exception_ptr thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (const std::system_error& error) {
    const py::object arguments = py::make_tuple(error.code().value(), error.what());
    PyErr_SetObject(PyExc_OSError, arguments.ptr());
  }
}

}  // namespace

void bind_pools(py::module_& module) {
  set_gil_hooks(python_gil_hooks());
  const auto stop = py::cpp_function([] { stop_at_exit().stop_all(); }, without_gil());
  from("atexit", "register")(stop);
  // The Python floors say it in the words of memswap.TransferError.
  py::register_local_exception<TransferError>(module, "TransferError", PyExc_RuntimeError);
  py::register_local_exception_translator(translate);

  Bound<Ticket, TicketPtr>(module, "Ticket")
      .calls<&Ticket::wait, &Ticket::done, &Ticket::synchronize, &Ticket::abandon>(without_gil())
      .calls<&Ticket::failed>()
      .def("storage", &Ticket::kept_storage);
  Bound<Block, BlockPtr>(module, "Block")
      .reads<&Block::nbytes>()
      .calls<&Block::uses>()
      .calls<&Block::used_by>(without_gil())
      .def_property_readonly("data_ptr", [](const Block& block) { return as_int(block.data()); })
      .def(
          "write",
          [](Block& block, const at::Tensor& from) { block.write(bytes_for(block, from)); },
          "source"_a, without_gil())
      .def(
          "read", [](Block& block, const at::Tensor& to) { block.read(bytes_for(block, to)); },
          "destination"_a, without_gil());
  Bound<Pool, std::shared_ptr<Pool>>(module, "Pool")
      .calls<&Pool::allocate, &Pool::reserve, &Pool::wait_reserved, &Pool::trim>(without_gil())
      .calls<&Pool::set_overflow, &Pool::statistics>()
      // Asked for in each forward, where making an object of all statistics would take a while.
      .def_property_readonly("pageable_bytes",
                             [](const Pool& pool) { return pool.statistics().pageable_bytes; });
  module.def("make_host_pool", &open_host_pool, "device"_a, "budget"_a, "slab"_a,
             "numa_node"_a = py::none(), "pageable"_a = true, "keeps_pages"_a = true);
  module.def("make_disk_pool", &open_disk_pool, "path"_a, "budget"_a, "extent"_a, without_gil());
  module.def(
      "host_limits", [](const std::string& root) { return host_limits(root); }, "root"_a = "/");
  module.def("numa_nodes", &numa_nodes, "root"_a = "/");
  module.def("numa_node_of_pci", &numa_node_of_pci, "address"_a, "root"_a = "/");
}

}  // namespace memswap
