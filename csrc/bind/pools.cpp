// Pools, blocks, tickets and the worker lane, as Python sees them.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <utility>

#include "lane/worker_lane.h"
#include "pool/block.h"
#include "pool/file_slabs.h"
#include "pool/host_limits.h"
#include "pool/host_slabs.h"
#include "pool/numa.h"
#include "pool/pinned_slabs.h"
#include "pool/pool.h"
#include "pool/slab_source.h"
#include "pool/spare_slabs.h"
#include "stop_at_exit.h"
#include "storage/storage.h"
#include "storage_ref.h"
#include "work/ticket.h"
#include "work/without_gil.h"

namespace memswap {
namespace py = pybind11;

namespace {

using without_gil = py::call_guard<py::gil_scoped_release>;

GilHooks python_gil_hooks() {
  return {
      .release_if_held = []() -> void* {
        return Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr;
      },
      .take_back =
          [](void* released) { PyEval_RestoreThread(static_cast<PyThreadState*>(released)); },
  };
}

std::shared_ptr<Pool> stopped_at_exit(StopAtExit& at_exit, SlabSourcePtr source,
                                      const PoolOptions& options) {
  // Dropping a pool may wait for its background thread and for copies: not with the GIL.
  std::shared_ptr<Pool> pool(new Pool(std::move(source), options), [](Pool* dropped) {
    const WithoutGil without;
    std::unique_ptr<Pool>(dropped).reset();
  });
  at_exit.add<Pool>(pool, [](Pool& known) { known.stop_background(); });
  return pool;
}

SlabSourcePtr within_budget(SlabSourcePtr source, std::optional<size_t> budget) {
  if (!budget) {
    return source;
  }
  return std::make_shared<BudgetedSlabs>(std::move(source), *budget);
}

SlabSourcePtr host_source(const c10::Device& device, std::optional<int> node, bool pageable) {
  SlabSourcePtr source;
  if (device.is_cpu()) {
    source = std::make_shared<OrdinarySlabs>();
  } else {
    source =
        std::make_shared<SpareSlabs>(std::make_shared<PinnedSlabs>(device),
                                     SpareSlabs::Options{.memory = SpareSlabs::Memory::kPinned});
    if (pageable) {
      source = std::make_shared<PageableSlabs>(
          std::move(source), std::make_shared<SpareSlabs>(
                                 std::make_shared<OrdinarySlabs>(),
                                 SpareSlabs::Options{.memory = SpareSlabs::Memory::kOrdinary}));
    }
  }
  return node ? std::make_shared<NumaSlabs>(std::move(source), *node) : source;
}

py::dict as_dict(const PoolStatistics& statistics) {
  py::dict dict;
  dict["in_use_bytes"] = statistics.in_use_bytes;
  dict["peak_bytes"] = statistics.peak_bytes;
  dict["waste_bytes"] = statistics.waste_bytes;
  dict["pending_bytes"] = statistics.pending_bytes;
  dict["free_bytes"] = statistics.free_bytes;
  dict["largest_free_bytes"] = statistics.largest_free_bytes;
  dict["reserved_bytes"] = statistics.reserved_bytes;
  dict["slabs"] = statistics.slabs;
  dict["blocks"] = statistics.blocks;
  dict["pending"] = statistics.pending;
  dict["waits"] = statistics.waits;
  dict["refusals"] = statistics.refusals;
  dict["last_refusal"] = statistics.last_refusal;
  dict["slabs_acquired"] = statistics.slabs_acquired;
  dict["grown_in_background"] = statistics.grown_in_background;
  dict["acquire_s"] = statistics.acquire_s;
  dict["pageable_bytes"] = statistics.pageable_bytes;
  dict["why_pageable"] = statistics.why_pageable;
  dict["written_bytes"] = statistics.written_bytes;
  return dict;
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

void bind_tickets_and_blocks(py::module_& module) {
  py::class_<Ticket, TicketPtr>(module, "Ticket", "The completion of a transfer.")
      .def("wait", &Ticket::wait, without_gil())
      .def("done", &Ticket::done, without_gil())
      .def("synchronize", &Ticket::synchronize, without_gil())
      .def("abandon", &Ticket::abandon, without_gil())
      .def("failed", &Ticket::failed)
      .def("storage", &Ticket::kept_storage,
           "The storage of a send that failed, as it was; None for any other ticket.");

  py::class_<Block, BlockPtr>(module, "Block", "Bytes of a pool, owned.")
      .def_property_readonly("nbytes", &Block::nbytes)
      .def_property_readonly(
          "data_ptr", [](const Block& block) { return reinterpret_cast<uintptr_t>(block.data()); },
          "Address in host memory; 0 where the block has none (a file).")
      .def(
          "write",
          [](Block& block, const at::Tensor& source) {
            const void* bytes = bytes_of(source, block);
            const py::gil_scoped_release release;
            block.write(bytes);
          },
          py::arg("source"))
      .def(
          "read",
          [](Block& block, const at::Tensor& destination) {
            void* bytes = bytes_of(destination, block);
            const py::gil_scoped_release release;
            block.read(bytes);
          },
          py::arg("destination"))
      .def("used_by", &Block::used_by, py::arg("ticket"), without_gil())
      .def("uses", &Block::uses);
}

void bind_pool(py::module_& module, StopAtExit& at_exit) {
  py::class_<Pool, std::shared_ptr<Pool>>(module, "Pool", "Slabs cut into blocks of exact size.")
      .def("allocate", &Pool::allocate, py::arg("nbytes"), without_gil(),
           "A Block, or None when the budget is spent or the system has refused.")
      .def("reserve", &Pool::reserve, py::arg("nbytes"), without_gil())
      .def("wait_reserved", &Pool::wait_reserved, without_gil())
      .def("trim", &Pool::trim, without_gil())
      .def("set_overflow", &Pool::set_overflow, py::arg("overflow"),
           "Where requests go that this pool cannot serve.")
      .def("statistics", [](const Pool& pool) { return as_dict(pool.statistics()); });

  module.def(
      "make_host_pool",
      [&at_exit](const c10::Device& device, std::optional<size_t> budget, size_t slab,
                 std::optional<int> numa_node, bool pageable) {
        return stopped_at_exit(at_exit,
                               within_budget(host_source(device, numa_node, pageable), budget),
                               {.slab_bytes = slab,
                                .alignment = 512,
                                .grow_ahead_bytes = device.is_cpu() ? 0 : slab / 4});
      },
      py::arg("device"), py::arg("budget"), py::arg("slab"), py::arg("numa_node") = py::none(),
      py::arg("pageable") = true,
      "A Pool of host memory: pinned for an accelerator (where that is refused, ordinary, if "
      "`pageable`), ordinary for the CPU. Bytes; None: no budget, any NUMA node.");
  module.def(
      "make_disk_pool",
      [&at_exit](const std::string& path, std::optional<size_t> budget, size_t extent) {
        return stopped_at_exit(at_exit, within_budget(std::make_shared<FileSlabs>(path), budget),
                               {.slab_bytes = extent, .alignment = FileSlabs::kAlignment});
      },
      py::arg("path"), py::arg("budget"), py::arg("extent"), without_gil(),
      "A Pool of one nameless file. Bytes; None: no budget. OSError if no file can be made.");
  py::class_<HostLimits>(module, "HostLimits", "What the system leaves of host memory.")
      .def_readonly("available", &HostLimits::available)
      .def_readonly("group", &HostLimits::group)
      .def_readonly("lockable", &HostLimits::lockable)
      .def_readonly("locked", &HostLimits::locked)
      .def_property_readonly("free_bytes", &HostLimits::free);
  module.def(
      "host_limits", [](const std::string& root) { return host_limits(root); },
      py::arg("root") = "/", "What the system leaves of host memory now; bytes.");
  module.def("numa_nodes", &numa_nodes, py::arg("root") = "/",
             "Online NUMA nodes of this machine.");
  module.def("numa_node_of_pci", &numa_node_of_pci, py::arg("address"), py::arg("root") = "/",
             "NUMA node of a PCI device such as '0000:17:00.0', or None.");
}

void bind_worker_lane(py::module_& module, StopAtExit& at_exit) {
  py::class_<WorkerLane, Lane, std::shared_ptr<WorkerLane>>(
      module, "WorkerLane", "Transfers of storages in host memory, done by threads.")
      .def(py::init([&at_exit](size_t workers, size_t max_leaving_bytes) {
             auto lane = std::make_shared<WorkerLane>(workers, max_leaving_bytes);
             at_exit.add<WorkerLane>(lane, [](WorkerLane& known) { known.stop(); });
             return lane;
           }),
           py::arg("workers") = 1, py::arg("max_leaving_bytes") = 0)
      .def("stop", &WorkerLane::stop);
}

void bind_errors(py::module_& module) {
  // The Python floors say it in the words of memswap.TransferError.
  py::register_local_exception<TransferError>(module, "TransferError", PyExc_RuntimeError);
  py::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) {
        std::rethrow_exception(thrown);
      }
    } catch (const std::system_error& error) {
      // As Python raises it: OSError(number, words), so that FileNotFoundError and its kin appear.
      const py::object arguments = py::make_tuple(error.code().value(), error.what());
      PyErr_SetObject(PyExc_OSError, arguments.ptr());
    }
  });
}

}  // namespace

void bind_pools(py::module_& module) {
  set_gil_hooks(python_gil_hooks());
  StopAtExit& at_exit = stop_at_exit();
  bind_errors(module);
  bind_tickets_and_blocks(module);
  bind_pool(module, at_exit);
  bind_worker_lane(module, at_exit);
  const auto stop = py::cpp_function([] {
    const py::gil_scoped_release release;
    stop_at_exit().stop_all();
  });
  py::module_::import("atexit").attr("register")(stop);
}

}  // namespace memswap
