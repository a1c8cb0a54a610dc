#include "graph_capture.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <dlfcn.h>

namespace memswap {

namespace {

// The runtime that torch has loaded; nothing here is compiled or linked against it.
[[maybe_unused]] bool cuda_captures(void* stream) {
  using IsCapturing = int (*)(void* stream, int* status);  // status: 0 where nothing is captured
  static const auto is_capturing = [] {
    void* const library = dlopen("libc10_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    void* const found = library ? dlsym(library, "cudaStreamIsCapturing") : nullptr;
    TORCH_CHECK_NOT_IMPLEMENTED(
        found, "memswap: torch ", TORCH_VERSION,
        " does not tell whether a stream captures a graph, and the CUDA runtime that would tell is "
        "not a shared library beside libc10_cuda.so. Install torch 2.12 or a later one");
    return reinterpret_cast<IsCapturing>(found);
  }();
  int status = 0;
  const int error = is_capturing(stream, &status);
  TORCH_CHECK(error == 0, "memswap: cudaStreamIsCapturing failed with error ", error);
  return status != 0;
}

template <class Stream>
bool is_capturing(const Stream& stream) {
  if constexpr (requires { stream.is_capturing(); }) {
    return stream.is_capturing();
  } else {
    return cuda_captures(stream.native_handle());
  }
}

}  // namespace

bool captures_graph(c10::Stream stream) {
  const c10::Device device = stream.device();
  return !device.is_cpu() && (kEveryDeviceIsAsked || device.is_cuda()) && is_capturing(stream);
}

bool captures_graph(c10::Device device) {
  if (device.is_cpu()) {
    return false;
  }
  const c10::impl::VirtualGuardImpl guard(device.type());
  return captures_graph(guard.getStream(device.has_index() ? device : guard.getDevice()));
}

}  // namespace memswap
