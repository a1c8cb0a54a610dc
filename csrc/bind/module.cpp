// Table of contents of memswap._C; each part is bound in a file of its own.
#include <torch/version.h>

#include "bind.h"

namespace memswap {
void bind_storage(py::module_& module);    // storage.cpp: storages, views, lent memory
void bind_pools(py::module_& module);      // pools.cpp: tickets, blocks, pools; errors of the core
void bind_lanes(py::module_& module);      // lanes.cpp
void bind_codec(py::module_& module);      // codec.cpp: frames, codec lanes, backends
void bind_transfers(py::module_& module);  // transfers.cpp: away forms, expectations
void bind_engine(py::module_& module);     // engine.cpp: engine, ledger, windows, recipes, batches
void bind_entry(py::module_& module);      // entry.cpp: entries and iterations
void bind_hooks(py::module_& module);      // hooks.cpp: where autograd calls in, and what it holds
void bind_planning(py::module_& module);   // planning.cpp: records, rates and replays
}  // namespace memswap

PYBIND11_MODULE(_C, module) {
  module.doc() = "memswap's native layer. Use it through memswap._native.";
  module.attr("torch_version") = TORCH_VERSION;
  using namespace memswap;
  for (const auto bind : {bind_storage, bind_pools, bind_lanes, bind_codec, bind_transfers,
                          bind_engine, bind_entry, bind_hooks, bind_planning}) {
    bind(module);
  }
}
