// The Python module fake_acl._C: the machine under torch_npu, for the tests to steer and to read.
#include <ATen/core/CachingHostAllocator.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch_npu/csrc/core/npu/NPUStream.h>

#include "../../simdev/csrc/backend/state.h"
#include "../../simdev/csrc/runtime/runtime.h"
#include "../acl/calls.h"
#include "../acl/streams.h"
#include "allocator_trace.h"
#include "ascend_kernels.h"
#include "operators.h"

namespace py = pybind11;

namespace fake_acl {
namespace {

// simdev's [Note: blocking and the GIL]: called on threads that may or may not hold it.
void* release_gil() {
  return Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr;
}
void acquire_gil(void* token) { PyEval_RestoreThread(static_cast<PyThreadState*>(token)); }

using Pairs = std::optional<std::vector<std::pair<int, int64_t>>>;

// Of (device, torch's stream id) pairs; ids that torch_npu has given to no stream are left out.
simdev::StreamSet streams_of(const Pairs& pairs) {
  if (!pairs) return std::nullopt;
  std::vector<simdev::StreamId> streams;
  for (const auto& [device, id] : *pairs) {
    try {
      const auto stream = c10_npu::NPUStream::unpack3(id, static_cast<c10::DeviceIndex>(device),
                                                      c10::DeviceType::PrivateUse1);
      streams.push_back(stream_id(stream.stream(false)));
    } catch (const std::exception&) {
      continue;
    }
  }
  return streams;
}

py::dict memory_stats(int device) {
  const simdev::MemoryStats s = simdev::memory_stats(device);
  using namespace py::literals;
  return py::dict("reserved"_a = s.reserved, "peak"_a = s.peak, "capacity"_a = s.capacity,
                  "requests"_a = s.requests, "frees"_a = s.frees,
                  "out_of_memory"_a = s.out_of_memory, "deferred"_a = deferred_frees(device));
}

py::dict pinned_stats() {
  const simdev::PinnedStats s = simdev::pinned_stats();
  using namespace py::literals;
  return py::dict("reserved"_a = s.reserved, "peak"_a = s.peak, "requests"_a = s.requests,
                  "deferred"_a = 0);
}

py::dict counters() {
  const simdev::Counters c = simdev::counters();
  using namespace py::literals;
  return py::dict("host_syncs"_a = c.host_syncs, "device_allocations"_a = c.device_allocations,
                  "pinned_allocations"_a = c.pinned_allocations, "enqueued"_a = c.enqueued,
                  "executed"_a = c.executed);
}

void bind_schedules(py::module_& m) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  py::enum_<simdev::Policy>(m, "Policy")
      .value("eager", simdev::Policy::kEager)
      .value("lazy", simdev::Policy::kLazy)
      .value("side_first", simdev::Policy::kSideFirst)
      .value("main_first", simdev::Policy::kMainFirst)
      .value("random", simdev::Policy::kRandom)
      .value("free", simdev::Policy::kFree);
  py::enum_<simdev::Check>(m, "Check")
      .value("off", simdev::Check::kOff)
      .value("collect", simdev::Check::kCollect)
      .value("throw_", simdev::Check::kThrow);
  m.def("set_policy", &simdev::set_policy, NoGil());
  m.def("set_check", &simdev::set_check, NoGil());
  m.def("take_reports", &simdev::take_reports, NoGil());
  m.def("quiesce", &simdev::quiesce, NoGil());
  m.def("host_access", [](uintptr_t pointer, size_t bytes, bool write, const std::string& name) {
    simdev::host_access(reinterpret_cast<const void*>(pointer), bytes, write, simdev::intern(name));
  });
}

void bind_memory(py::module_& m) {
  m.attr("device_count") = 1;
  m.def("set_capacity", &simdev::set_capacity);
  m.def("memory_stats", &memory_stats);
  m.def("pinned_stats", &pinned_stats);
  m.def("reset_peak", &simdev::reset_peak);
  m.def("last_serial", &last_tensor_serial);
  m.def("live_tensors", [](uint64_t after) {
    std::vector<std::tuple<size_t, uint64_t, int>> found;
    for (const LiveTensor& t : live_tensors(after)) found.emplace_back(t.bytes, t.serial, t.device);
    return found;
  });
  m.def("empty_pinned_cache",
        [] { at::getHostAllocator(c10::DeviceType::PrivateUse1)->empty_cache(); });
  m.def("fail_device_requests", &simdev::fail_device_requests);
  m.def("fail_pinned_requests", &simdev::fail_pinned_requests);
  m.def("set_pinned_budget", &simdev::set_pinned_budget);
}

void bind_time_and_counters(py::module_& m) {
  m.def("counters", &counters);
  m.def("reset_counters", &simdev::reset_counters);
  m.def("set_cost_model", [](double host_us, double launch_us, double hbm, double h2d, double d2h,
                             double matrix, bool queries_wait) {
    simdev::set_cost_model({host_us, launch_us, hbm, h2d, d2h, matrix, queries_wait});
  });
  m.def("host_virtual_us", &simdev::host_virtual_us);
  m.def("reset_virtual_time", &simdev::reset_virtual_time);
  m.def("operator_counts", &simdev::operator_count_table);
}

void bind_mutations(py::module_& m) {
  m.def("mutate_drop_waits", [](const Pairs& waiters, const Pairs& sources) {
    return simdev::mutate_drop_waits(streams_of(waiters), streams_of(sources));
  });
  m.def("mutate_drop_synchronizes",
        [](const Pairs& sources) { return simdev::mutate_drop_synchronizes(streams_of(sources)); });
  m.def("mutate_lying_queries",
        [](const Pairs& sources) { return simdev::mutate_lying_queries(streams_of(sources)); });
  m.def("mutate_drop_record_stream", &simdev::mutate_drop_record_stream);
  m.def("mutation_hits", &simdev::mutation_hits);
  m.def("remove_mutation", &simdev::remove_mutation);
  m.def("clear_mutations", &simdev::clear_mutations);
}

void bind_calls(py::module_& m) {
  m.def("fail_calls", &fail_calls, py::arg("call"), py::arg("skip"), py::arg("count"),
        py::arg("code"));
  m.def("lose_device", &lose_device);
  m.def("repair", &repair);
  m.def("call_counts", &call_counts);
  m.def("event_counts", &event_counts);
  m.def("failed_counts", &failed_counts);
  m.def("reset_call_counts", &reset_call_counts);
}

PYBIND11_MODULE(_C, m) {
  simdev::set_blocking_hooks({&release_gil, &acquire_gil});
  bind_schedules(m);
  bind_memory(m);
  bind_time_and_counters(m);
  bind_mutations(m);
  bind_calls(m);
  m.def("install", [] {
    register_operators();
    trace_allocator();
  });
  m.def("ascend_codec", [] { return py::capsule(ascend_codec(), "memswap_codec"); });
  m.def("kernel_launches", &kernel_launches);
  m.def("lose_launches_of", &lose_launches_of);
}

}  // namespace
}  // namespace fake_acl
