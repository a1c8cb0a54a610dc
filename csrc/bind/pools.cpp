// Tickets, blocks and pools; what the core says of Python's lock, of its errors and of its end.
#include <system_error>

#include "bind.h"
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
  return py::dict("in_use_bytes"_a = all.in_use_bytes, "peak_bytes"_a = all.peak_bytes,
                  "waste_bytes"_a = all.waste_bytes, "pending_bytes"_a = all.pending_bytes,
                  "free_bytes"_a = all.free_bytes, "largest_free_bytes"_a = all.largest_free_bytes,
                  "reserved_bytes"_a = all.reserved_bytes, "slabs"_a = all.slabs,
                  "blocks"_a = all.blocks, "pending"_a = all.pending, "waits"_a = all.waits,
                  "refusals"_a = all.refusals, "last_refusal"_a = all.last_refusal,
                  "slabs_acquired"_a = all.slabs_acquired,
                  "grown_in_background"_a = all.grown_in_background, "acquire_s"_a = all.acquire_s,
                  "pageable_bytes"_a = all.pageable_bytes, "why_pageable"_a = all.why_pageable,
                  "written_bytes"_a = all.written_bytes);
}

static py::object fields_of(const HostLimits& all) {
  return with_attributes("available"_a = all.available, "group"_a = all.group,
                         "lockable"_a = all.lockable, "locked"_a = all.locked,
                         "free_bytes"_a = all.free());
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

// First byte of a contiguous tensor in host memory that is as long as the block.
void* bytes_of(const at::Tensor& tensor, const Block& block) {
  if (!tensor.device().is_cpu() || !tensor.is_contiguous()) {
    throw py::value_error("needs a contiguous tensor in host memory");
  }
  if (tensor.nbytes() != block.nbytes()) {
    throw py::value_error("needs a tensor as long as the block: expected " +
                          std::to_string(block.nbytes()) + " bytes, found " +
                          std::to_string(tensor.nbytes()));
  }
  return tensor.data_ptr();
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

  py::class_<Ticket, TicketPtr>(module, "Ticket")
      .def("wait", &Ticket::wait, without_gil())
      .def("done", &Ticket::done, without_gil())
      .def("synchronize", &Ticket::synchronize, without_gil())
      .def("abandon", &Ticket::abandon, without_gil())
      .def("failed", &Ticket::failed)
      .def("storage", &Ticket::kept_storage);
  py::class_<Block, BlockPtr>(module, "Block")
      .def_property_readonly("nbytes", &Block::nbytes)
      .def_property_readonly("data_ptr", [](const Block& block) { return as_int(block.data()); })
      .def(
          "write",
          [](Block& block, const at::Tensor& source) { block.write(bytes_of(source, block)); },
          "source"_a, without_gil())
      .def(
          "read",
          [](Block& block, const at::Tensor& destination) {
            block.read(bytes_of(destination, block));
          },
          "destination"_a, without_gil())
      .def("used_by", &Block::used_by, "ticket"_a, without_gil())
      .def("uses", &Block::uses);
  py::class_<Pool, std::shared_ptr<Pool>>(module, "Pool")
      .def("allocate", &Pool::allocate, "nbytes"_a, without_gil())
      .def("reserve", &Pool::reserve, "nbytes"_a, without_gil())
      .def("wait_reserved", &Pool::wait_reserved, without_gil())
      .def("trim", &Pool::trim, without_gil())
      .def("set_overflow", &Pool::set_overflow, "overflow"_a)
      // Asked for in each forward, where making an object of all statistics would take a while.
      .def_property_readonly("pageable_bytes",
                             [](const Pool& pool) { return pool.statistics().pageable_bytes; })
      .def("statistics", &Pool::statistics);
  module.def("make_host_pool", &open_host_pool, "device"_a, "budget"_a, "slab"_a,
             "numa_node"_a = py::none(), "pageable"_a = true, "keeps_pages"_a = true);
  module.def("make_disk_pool", &open_disk_pool, "path"_a, "budget"_a, "extent"_a, without_gil());
  module.def(
      "host_limits", [](const std::string& root) { return host_limits(root); }, "root"_a = "/");
  module.def("numa_nodes", &numa_nodes, "root"_a = "/");
  module.def("numa_node_of_pci", &numa_node_of_pci, "address"_a, "root"_a = "/");
}

}  // namespace memswap
