// Holds a stream for a given time, so that a missing wait shows as wrong data on a real device.
// torch.cuda._sleep counts clock cycles; the tests need a time that does not depend on the clock.
#include <cuda_runtime.h>

#include <cstdint>

namespace {

__device__ uint64_t now_ns() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}

__global__ void __launch_bounds__(1) hold(uint64_t duration_ns) {
  const uint64_t begin = now_ns();
  while (now_ns() - begin < duration_ns) {
    __nanosleep(1000);
  }
}

}  // namespace

// Enqueues the delay on `stream` (a cudaStream_t). Returns nullptr, or CUDA's words for what
// failed.
extern "C" const char* memswap_delay(void* stream, uint64_t duration_ns) {
  hold<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(duration_ns);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
