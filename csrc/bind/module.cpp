// Table of contents of memswap._C; each part is bound in a file of its own.
#include <pybind11/pybind11.h>
#include <torch/version.h>

namespace memswap {
void bind_view(pybind11::module_& module);       // view.cpp
void bind_storage(pybind11::module_& module);    // storage.cpp
void bind_lanes(pybind11::module_& module);      // lanes.cpp
void bind_pools(pybind11::module_& module);      // pools.cpp
void bind_codec(pybind11::module_& module);      // codec.cpp
void bind_ledger(pybind11::module_& module);     // ledger.cpp
void bind_away(pybind11::module_& module);       // away.cpp
void bind_transfers(pybind11::module_& module);  // transfers.cpp
void bind_windows(pybind11::module_& module);    // windows.cpp
void bind_batch(pybind11::module_& module);      // batch.cpp
void bind_entry(pybind11::module_& module);      // entry.cpp
void bind_iteration(pybind11::module_& module);  // iteration.cpp
void bind_engine(pybind11::module_& module);     // engine.cpp
void bind_handle(pybind11::module_& module);     // handle.cpp
void bind_hooks(pybind11::module_& module);      // hooks.cpp
void bind_gauge(pybind11::module_& module);      // gauge.cpp
void bind_recipes(pybind11::module_& module);    // recipes.cpp
void bind_recorder(pybind11::module_& module);   // recorder.cpp
void bind_replay(pybind11::module_& module);     // replay.cpp
}  // namespace memswap

PYBIND11_MODULE(_C, module) {
  module.doc() = "memswap's native layer: storages, pools, lanes. Use it through memswap._native.";
  module.attr("torch_version") = TORCH_VERSION;
  memswap::bind_view(module);
  memswap::bind_storage(module);
  memswap::bind_lanes(module);
  memswap::bind_pools(module);
  memswap::bind_codec(module);
  memswap::bind_ledger(module);
  memswap::bind_away(module);
  memswap::bind_iteration(module);
  memswap::bind_transfers(module);
  memswap::bind_windows(module);
  memswap::bind_engine(module);
  memswap::bind_batch(module);
  memswap::bind_entry(module);
  memswap::bind_handle(module);
  memswap::bind_hooks(module);
  memswap::bind_gauge(module);
  memswap::bind_recipes(module);
  memswap::bind_recorder(module);
  memswap::bind_replay(module);
}
