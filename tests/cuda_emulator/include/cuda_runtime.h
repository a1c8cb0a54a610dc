// Stands in for CUDA's header: with it a C++ compiler compiles the kernels, and a CPU runs them
// (emulator.h). Only what the kernels use is here. Never on an include path of the product.
#pragma once

#define MEMSWAP_CUDA_EMULATOR 1

#include <stddef.h>
#include <stdint.h>

#include <utility>

#include "emulator.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__

struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

struct dim3 {
  dim3(uint32_t x = 1) : x(x) {}
  uint32_t x;
};

using emulator::blockDim;
using emulator::blockIdx;
using emulator::gridDim;
using emulator::threadIdx;

// Synchronisation has a place in the source, so that a test can take one away.
#define __syncwarp() ::emulator::sync_warp(__FILE__, __LINE__)
#define __threadfence() ::emulator::fence(__FILE__, __LINE__)
#define __syncthreads() ::emulator::sync_block(__FILE__, __LINE__)

namespace memswap::cuda {
template <class Shared>
Shared& shared_of() {
  return *reinterpret_cast<Shared*>(emulator::shared_memory());
}
}  // namespace memswap::cuda

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline uint32_t min(uint32_t a, uint32_t b) { return a < b ? a : b; }
inline uint32_t max(uint32_t a, uint32_t b) { return a > b ? a : b; }

inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<uint32_t>(x)); }
inline int __clzll(long long x) {
  return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x));
}

// Three bits of each selector count: "selector[0] = s<2:0>, selector[1] = s<6:4>, ...".
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
  const uint64_t bytes = x | uint64_t{y} << 32;
  uint32_t result = 0;
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t byte = selector >> (4 * i) & 7;
    result |= (static_cast<uint32_t>(bytes >> (8 * byte)) & 0xff) << (8 * i);
  }
  return result;
}
inline uint32_t __funnelshift_l(uint32_t low, uint32_t high, uint32_t shift) {
  return static_cast<uint32_t>((low | uint64_t{high} << 32) << (shift & 31) >> 32);
}
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t shift) {
  return static_cast<uint32_t>((low | uint64_t{high} << 32) >> (shift & 31));
}
inline uint32_t __vmaxu2(uint32_t a, uint32_t b) {
  return max(a & 0xffff, b & 0xffff) | max(a >> 16, b >> 16) << 16;
}
inline uint32_t __vminu2(uint32_t a, uint32_t b) {
  return min(a & 0xffff, b & 0xffff) | min(a >> 16, b >> 16) << 16;
}
inline uint32_t __dp4a(uint32_t a, uint32_t b, uint32_t sum) {
  for (int i = 0; i < 32; i += 8) {
    sum += (a >> i & 0xff) * (b >> i & 0xff);
  }
  return sum;
}
// Good to two units in the last place: the emulator errs by that much, in either direction.
inline float __fdividef(float a, float b) { return emulator::about(a / b); }

template <class Value>
Value __ldcg(const Value* at) {
  return *at;
}

inline uint32_t __shfl_sync(uint32_t mask, uint32_t value, uint32_t lane) {
  return static_cast<uint32_t>(emulator::exchange(emulator::Exchange::kIndex, mask, value, lane));
}
inline uint32_t __shfl_up_sync(uint32_t mask, uint32_t value, uint32_t distance) {
  return static_cast<uint32_t>(emulator::exchange(emulator::Exchange::kUp, mask, value, distance));
}
inline uint32_t __shfl_down_sync(uint32_t mask, uint32_t value, uint32_t distance) {
  return static_cast<uint32_t>(
      emulator::exchange(emulator::Exchange::kDown, mask, value, distance));
}
inline uint64_t __shfl_xor_sync(uint32_t mask, uint64_t value, uint32_t lanes) {
  return emulator::exchange(emulator::Exchange::kXor, mask, value, lanes);
}
inline uint32_t __ballot_sync(uint32_t mask, int predicate) {
  return static_cast<uint32_t>(
      emulator::exchange(emulator::Exchange::kBallot, mask, predicate != 0, 0));
}
inline int __any_sync(uint32_t mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline uint32_t __reduce_add_sync(uint32_t mask, uint32_t value) {
  return static_cast<uint32_t>(emulator::exchange(emulator::Exchange::kAdd, mask, value, 0));
}
inline uint32_t __reduce_min_sync(uint32_t mask, uint32_t value) {
  return static_cast<uint32_t>(emulator::exchange(emulator::Exchange::kMin, mask, value, 0));
}
inline uint32_t __reduce_max_sync(uint32_t mask, uint32_t value) {
  return static_cast<uint32_t>(emulator::exchange(emulator::Exchange::kMax, mask, value, 0));
}

inline uint32_t atomicAdd(uint32_t* at, uint32_t value) {
  return emulator::atomic(at, [=](uint32_t old) { return old + value; });
}
inline unsigned long long atomicAdd(unsigned long long* at, unsigned long long value) {
  return emulator::atomic(at, [=](unsigned long long old) { return old + value; });
}
inline uint32_t atomicMin(uint32_t* at, uint32_t value) {
  return emulator::atomic(at, [=](uint32_t old) { return old < value ? old : value; });
}
inline unsigned long long atomicMin(unsigned long long* at, unsigned long long value) {
  return emulator::atomic(at, [=](unsigned long long old) { return old < value ? old : value; });
}
inline uint32_t atomicOr(uint32_t* at, uint32_t value) {
  return emulator::atomic(at, [=](uint32_t old) { return old | value; });
}

// The runtime, as far as the launches need it.
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorLaunchFailure = 719 };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };
enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize,
  cudaFuncAttributePreferredSharedMemoryCarveout,
};
enum cudaSharedCarveout { cudaSharedmemCarveoutMaxShared = 100 };
using cudaStream_t = void*;
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
};

inline cudaError_t cudaGetDevice(int* device) {
  *device = emulator::current_device();
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  ++emulator::questions;
  *value = static_cast<int>(emulator::machine.processors);
  return cudaSuccess;
}
template <class Function>
cudaError_t cudaFuncSetAttribute(Function* function, cudaFuncAttribute attribute, int value) {
  ++emulator::questions;
  if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) {
    emulator::allow_shared(reinterpret_cast<const void*>(function), static_cast<uint32_t>(value));
  }
  return cudaSuccess;
}
template <class Function>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Function*, int, size_t) {
  ++emulator::questions;
  *blocks = static_cast<int>(emulator::machine.blocks_per_processor);
  return cudaSuccess;
}
inline cudaError_t cudaGetLastError() {
  return static_cast<cudaError_t>(std::exchange(emulator::machine.last_error, 0));
}
inline const char* cudaGetErrorString(cudaError_t) { return "an emulated error"; }

template <class Parameter>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameter),
                               const Parameter& parameter) {
  const emulator::Launch launch{reinterpret_cast<const void*>(kernel), config->gridDim.x,
                                config->blockDim.x,
                                static_cast<uint32_t>(config->dynamicSmemBytes)};
  const emulator::Registered parameters(&parameter, sizeof(parameter), "the parameters");
  return static_cast<cudaError_t>(emulator::run(
      launch,
      [](void* context) {
        const auto& [function, value] =
            *static_cast<const std::pair<void (*)(Parameter), const Parameter*>*>(context);
        function(*value);
      },
      std::pair<void (*)(Parameter), const Parameter*>(kernel, &parameter)));
}
