// Table of contents of memswap._C; each part is bound in a file of its own.
#include <pybind11/pybind11.h>

namespace memswap {
void bind_storage(pybind11::module_& module);  // bind_storage.cpp
void bind_pools(pybind11::module_& module);    // bind_pools.cpp
void bind_stream_lane(pybind11::module_& module);
}  // namespace memswap

PYBIND11_MODULE(_C, module) {
  module.doc() = "memswap's native layer: storages, pools, lanes. Use it through memswap._native.";
  memswap::bind_storage(module);
  memswap::bind_pools(module);
  memswap::bind_stream_lane(module);
}
