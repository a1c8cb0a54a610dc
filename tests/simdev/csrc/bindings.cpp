// The Python module simdev._C: a table of contents of the runtime.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>

#include "backend/state.h"
#include "codec/codec.h"
#include "runtime/launch.h"
#include "runtime/runtime.h"

namespace py = pybind11;

namespace simdev {
namespace {

// [Note: blocking and the GIL]: called on threads that may or may not hold it.
void* release_gil() { return PyGILState_Check() ? PyEval_SaveThread() : nullptr; }
void acquire_gil(void* token) { PyEval_RestoreThread(static_cast<PyThreadState*>(token)); }

using Pairs = std::optional<std::vector<std::pair<int, int>>>;

StreamSet streams_of(const Pairs& pairs) {
  if (!pairs) return std::nullopt;
  std::vector<StreamId> streams;
  for (const auto& [device, index] : *pairs) streams.push_back({device, index});
  return streams;
}

template <class Function>
int64_t address_of(Function* function) {
  return static_cast<int64_t>(reinterpret_cast<intptr_t>(function));
}

py::dict memory_stats_dict(int device) {
  const MemoryStats s = memory_stats(device);
  using namespace py::literals;
  return py::dict("allocated"_a = s.allocated, "peak"_a = s.peak, "reserved"_a = s.reserved,
                  "capacity"_a = s.capacity, "deferred"_a = s.deferred, "requests"_a = s.requests,
                  "frees"_a = s.frees, "out_of_memory"_a = s.out_of_memory,
                  "recorded"_a = s.recorded);
}

py::dict pinned_stats_dict() {
  const PinnedStats s = pinned_stats();
  using namespace py::literals;
  return py::dict("allocated"_a = s.allocated, "peak"_a = s.peak, "reserved"_a = s.reserved,
                  "deferred"_a = s.deferred, "requests"_a = s.requests);
}

py::dict counters_dict() {
  const Counters c = counters();
  using namespace py::literals;
  return py::dict("host_syncs"_a = c.host_syncs, "device_allocations"_a = c.device_allocations,
                  "pinned_allocations"_a = c.pinned_allocations, "enqueued"_a = c.enqueued,
                  "executed"_a = c.executed);
}

std::vector<std::tuple<size_t, uint64_t, bool, int, int>> live_blocks_list(uint64_t after) {
  std::vector<std::tuple<size_t, uint64_t, bool, int, int>> blocks;
  for (const LiveBlock& b : live_blocks(after))
    blocks.emplace_back(b.bytes, b.serial, b.pinned, b.stream.device, b.stream.index);
  return blocks;
}

PYBIND11_MODULE(_C, m) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  set_blocking_hooks({&release_gil, &acquire_gil});

  py::enum_<Policy>(m, "Policy")
      .value("eager", Policy::kEager)
      .value("lazy", Policy::kLazy)
      .value("side_first", Policy::kSideFirst)
      .value("main_first", Policy::kMainFirst)
      .value("random", Policy::kRandom)
      .value("free", Policy::kFree);
  py::enum_<Check>(m, "Check")
      .value("off", Check::kOff)
      .value("collect", Check::kCollect)
      .value("throw_", Check::kThrow);

  // schedules and the detector
  m.def("set_policy", &set_policy, NoGil());
  m.def("set_check", &set_check, NoGil());
  m.def("take_reports", &take_reports, NoGil());
  m.def("set_stream_delay_us",
        [](int device, int stream, double us) { set_stream_delay_us({device, stream}, us); });
  m.def("host_access", [](uintptr_t pointer, size_t bytes, bool write, const std::string& name) {
    host_access(reinterpret_cast<const void*>(pointer), bytes, write, intern(name));
  });
  m.def("quiesce", &quiesce, NoGil());
  m.def("rewind_stream_pool", &rewind_stream_pool);
  m.def("in_forked_child", &in_forked_child);

  // devices and memory
  m.attr("device_count") = kDevices;
  m.attr("pool_streams") = kPoolStreams;
  m.def("synchronize_device", &synchronize_device, NoGil());
  m.def("empty_cache", &empty_cache, NoGil());
  m.def("pinned_empty_cache", &pinned_empty_cache, NoGil());
  m.def("set_capacity", &set_capacity);
  m.def("memory_stats", &memory_stats_dict);
  m.def("reset_peak", &reset_peak);
  m.def("pinned_stats", &pinned_stats_dict);
  m.def("live_blocks", &live_blocks_list);
  m.def("last_serial", &last_serial);
  m.def("fail_device_requests", &fail_device_requests);
  m.def("fail_pinned_requests", &fail_pinned_requests);
  m.def("set_pinned_budget", &set_pinned_budget);

  // counters and virtual time
  m.def("counters", &counters_dict);
  m.def("reset_counters", &reset_counters);
  m.def(
      "set_cost_model",
      [](double host_us, double launch_us, double hbm, double h2d, double d2h, double matrix,
         bool queries_wait, double duplex) {
        set_cost_model({host_us, launch_us, hbm, h2d, d2h, matrix, queries_wait, duplex});
      },
      py::arg("host_us"), py::arg("launch_us"), py::arg("hbm"), py::arg("h2d"), py::arg("d2h"),
      py::arg("matrix"), py::arg("queries_wait"), py::arg("duplex") = 1.0);
  m.def("host_virtual_us", &host_virtual_us);
  m.def("reset_virtual_time", &reset_virtual_time);

  // mutations
  m.def("mutate_drop_waits", [](const Pairs& waiters, const Pairs& sources) {
    return mutate_drop_waits(streams_of(waiters), streams_of(sources));
  });
  m.def("mutate_drop_synchronizes",
        [](const Pairs& sources) { return mutate_drop_synchronizes(streams_of(sources)); });
  m.def(
      "mutate_lying_queries",
      [](const Pairs& sources) { return mutate_lying_queries(streams_of(sources)); },
      py::arg("sources") = py::none());
  m.def("mutate_allocate_on", [](std::pair<int, int> tagged, const Pairs& current) {
    return mutate_allocate_on({tagged.first, tagged.second}, streams_of(current));
  });
  m.def("mutate_drop_record_stream", &mutate_drop_record_stream);
  m.def("mutation_hits", &mutation_hits);
  m.def("remove_mutation", &remove_mutation);
  m.def("clear_mutations", &clear_mutations);

  // the torch backend
  m.def("register_hooks", &register_hooks);
  m.def("generator_state", &generator_state);
  m.def("set_generator_state", &set_generator_state);
  m.def("operator_counts", &operator_count_table);
  m.def("memo_size", &memo_size);
  m.def("set_capturing", &set_capturing);

  // codec/codec.h; both capsules are named memswap_codec
  m.def("codec_on_streams", [](const py::capsule& host) {
    return py::capsule(codec_on_streams(host.get_pointer<const memswap_codec>()), "memswap_codec");
  });

  // runtime/launch.h, for native code under test
  m.def("c_functions", [] {
    return std::map<std::string, int64_t>{{"launch", address_of(&simdev_launch)},
                                          {"memcpy_async", address_of(&simdev_memcpy_async)},
                                          {"memset_async", address_of(&simdev_memset_async)},
                                          {"last_error", address_of(&simdev_last_error)}};
  });
}

}  // namespace
}  // namespace simdev
