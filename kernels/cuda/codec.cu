// The backend's table: arguments, tables of jobs, launches. Every function returns as soon as its
// work is enqueued; nothing is allocated and nothing waits.
#include <cuda_runtime.h>

#include "encode.cuh"
#include "jobs.h"
#include "memswap/arguments.h"
#include "memswap/codec.h"
#include "warp.cuh"

namespace memswap::cuda {
namespace {

using frame::Dtype;
using frame::Shape;

uint32_t tiles_of(uint64_t elements) {
  return static_cast<uint32_t>((elements + frame::kTileElements - 1) / frame::kTileElements);
}

EncodeJob to_device(const memswap_encode_job& job) {
  EncodeJob to{};
  to.input = static_cast<const uint8_t*>(job.input);
  to.frame = static_cast<uint8_t*>(job.frame);
  to.overflow = static_cast<uint8_t*>(job.overflow);
  to.overflow_cursor = reinterpret_cast<unsigned long long*>(job.overflow_cursor);
  to.elements = job.elements;
  to.var_capacity = job.var_capacity;
  to.overflow_capacity = static_cast<uint32_t>(job.overflow_capacity);
  to.dtype = job.dtype;
  to.shape = job.shape;
  to.fast = job.profile == MEMSWAP_FAST;
  to.center = job.center;
  to.checked = job.checksum != 0;
  return to;
}

DecodeJob to_device(const memswap_decode_job& job) {
  DecodeJob to{};
  to.frame = static_cast<const uint8_t*>(job.frame);
  to.overflow = static_cast<const uint8_t*>(job.overflow);
  to.output = static_cast<uint8_t*>(job.output);
  to.status = job.status;
  to.frame_bytes = job.frame_bytes;
  to.elements = job.elements;
  to.overflow_capacity = job.overflow == nullptr ? 0 : static_cast<uint32_t>(job.overflow_capacity);
  to.dtype = job.dtype;
  to.verify = job.verify != 0;
  to.is_alone = job.shape_hint != 0;
  if (to.is_alone) {
    to.slab_bytes =
        frame::slab_bytes(static_cast<Dtype>(job.dtype), static_cast<Shape>(job.shape_hint - 1));
  }
  return to;
}

// A frame without elements has no tile, but a header to be written, or to be looked at.
template <class Job>
uint32_t tiles_of(const Job& job) {
  return job.elements == 0 ? 1 : tiles_of(job.elements);
}

// What a job takes: one kernel, or two that share its frames (see [Note: shapes]).
template <class Kernel>
struct Kernels {
  Kernel first;
  Kernel second;  // of no function: there is none

  bool operator==(const Kernels& other) const {
    return first.function == other.first.function && second.function == other.second.function;
  }
};

Kernels<EncodeKernel> kernels_of(const memswap_encode_job& job) {
  const Dtype dtype = static_cast<Dtype>(job.dtype);
  const Shape shape = static_cast<Shape>(job.shape);
  switch (shape) {
    case Shape::kDense:
    case Shape::kUpcast:
      return {dense_encode_kernel(dtype, shape), {}};
    case Shape::kSparse:
      return {sparse_encode_kernel(dtype), {}};
    default:
      return {other_encode_kernel(dtype, shape), {}};
  }
}

Kernels<DecodeKernel> kernels_of(const memswap_decode_job& job) {
  const Dtype dtype = static_cast<Dtype>(job.dtype);
  if (frame::split_of(dtype).exponent_bits == 0) {
    return {other_decode_kernel(dtype), {}};
  }
  if (job.shape_hint == 0) {
    return {float_decode_kernel(dtype), sparse_decode_kernel(dtype)};
  }
  const bool is_sparse = static_cast<Shape>(job.shape_hint - 1) == Shape::kSparse;
  return {is_sparse ? sparse_decode_kernel(dtype) : float_decode_kernel(dtype), {}};
}

// Without a workspace: headers whose counters are 0, by a launch in stream order before the tiles'.
__global__ void __launch_bounds__(kLanes) write_headers(const __grid_constant__ EncodeTable table) {
  const EncodeJob& job = table.jobs[blockIdx.x];
  const frame::Layout layout =
      frame::layout_of(static_cast<Dtype>(job.dtype), static_cast<Shape>(job.shape), job.elements);
  reinterpret_cast<uint32_t*>(job.frame)[threadIdx.x] =
      header_word(job, layout.blocks, layout.slab_bytes, threadIdx.x);
}

template <class Parameter>
cudaError_t launch(void (*kernel)(Parameter), const Parameter& parameter, uint32_t blocks,
                   uint32_t threads, uint32_t shared_bytes, void* stream) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  return cudaLaunchKernelEx(&config, kernel, parameter);
}

// [Note: processors] Without a bound, the grid is what the device holds at once, in thread blocks
// of one tile, and walks over the tiles. With a bound of p, it is p thread blocks, which no more
// than p processors can hold; each then has two tiles at a time, so that a processor has 16 warps.
template <class Job>
cudaError_t launch_tiles(const Kernel<Job>& kernel, const Table<Job>& table,
                         const memswap_launch& where) {
  int device = 0, processors = 0, shared_limit = 0, resident = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&shared_limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }
  if (error != cudaSuccess) {
    return error;
  }
  const uint32_t bound = where.max_processors;
  const bool is_bounded = bound != 0 && bound < static_cast<uint32_t>(processors);
  const uint32_t most =
      kMaxTiles * kernel.shared_bytes <= static_cast<uint32_t>(shared_limit) ? kMaxTiles : 1;
  const uint32_t slots = is_bounded ? most : 1;
  const uint32_t shared_bytes = slots * kernel.shared_bytes;
  if (shared_bytes > 48 * 1024) {
    // What any launch may need: of two threads, one must not lower what the other has just raised.
    error = cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(most * kernel.shared_bytes));
    if (error != cudaSuccess) {
      return error;
    }
  }
  // What little a tile reads twice is in shared memory: as much of it, and so as many tiles, as a
  // processor can have.
  error = cudaFuncSetAttribute(kernel.function, cudaFuncAttributePreferredSharedMemoryCarveout,
                               cudaSharedmemCarveoutMaxShared);
  if (error != cudaSuccess) {
    return error;
  }
  const uint32_t wanted = (table.tiles + slots - 1) / slots;
  uint32_t blocks = bound;
  if (!is_bounded) {
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel.function, kTileThreads,
                                                          shared_bytes);
    if (error != cudaSuccess) {
      return error;
    }
    blocks = static_cast<uint32_t>(processors) * static_cast<uint32_t>(resident > 0 ? resident : 1);
  }
  return launch(kernel.function, table, wanted < blocks ? wanted : blocks, slots * kTileThreads,
                shared_bytes, where.stream);
}

cudaError_t launch_table(const Kernels<EncodeKernel>& kernels, EncodeTable& table,
                         const memswap_launch& where) {
  table.workspace = static_cast<EncodeSlot*>(where.workspace);
  if (table.workspace == nullptr) {
    const cudaError_t error = launch(write_headers, table, table.count, kLanes, 0, where.stream);
    if (error != cudaSuccess) {
      return error;
    }
  }
  return launch_tiles(kernels.first, table, where);
}

cudaError_t launch_table(const Kernels<DecodeKernel>& kernels, DecodeTable& table,
                         const memswap_launch& where) {
  const cudaError_t error = launch_tiles(kernels.first, table, where);
  return error != cudaSuccess || kernels.second.function == nullptr
             ? error
             : launch_tiles(kernels.second, table, where);
}

// Jobs of the same kernels share launches, whatever their order among the others.
template <class DeviceJob, class Job>
int run(const Job* jobs, size_t count, const memswap_launch* launch_or_null) {
  const memswap_launch where = launch_or_null != nullptr ? *launch_or_null : memswap_launch{};
  if (!arguments::are_valid(jobs, count) ||
      !arguments::is_aligned(where.workspace, frame::kAlignmentBytes)) {
    return MEMSWAP_CODEC_BAD_ARGUMENT;
  }
  constexpr uint32_t kMaxTilesOfLaunch = 1u << 30;  // tile numbers and strides stay in 32 bits
  for (size_t first = 0; first < count; ++first) {
    const auto kernels = kernels_of(jobs[first]);
    const auto is_same = [&](size_t i) { return kernels_of(jobs[i]) == kernels; };
    bool is_done = false;
    for (size_t i = 0; i < first && !is_done; ++i) {
      is_done = is_same(i);
    }
    if (is_done) {
      continue;
    }
    Table<DeviceJob> table{};
    for (size_t i = first; i <= count; ++i) {
      const bool is_end = i == count;
      if (!is_end && !is_same(i)) {
        continue;
      }
      const bool is_full =
          table.count == kTableJobs ||
          (!is_end && table.count != 0 && tiles_of(jobs[i]) > kMaxTilesOfLaunch - table.tiles);
      if (is_full || (is_end && table.count != 0)) {
        const cudaError_t error = launch_table(kernels, table, where);
        if (error != cudaSuccess) {
          // The caller hears of it here; whoever asks the runtime next has launched something else.
          (void)cudaGetLastError();
          return static_cast<int>(error);
        }
        table = {};
      }
      if (!is_end) {
        DeviceJob& job = table.jobs[table.count++] = to_device(jobs[i]);
        job.first_tile = table.tiles;
        table.tiles += tiles_of(jobs[i]);
      }
    }
  }
  return MEMSWAP_CODEC_OK;
}

int encode(const memswap_encode_job* jobs, size_t count, const memswap_launch* launch) {
  return run<EncodeJob>(jobs, count, launch);
}

int decode(const memswap_decode_job* jobs, size_t count, const memswap_launch* launch) {
  return run<DecodeJob>(jobs, count, launch);
}

const char* message(int code) {
  switch (code) {
    case MEMSWAP_CODEC_OK:
      return "success";
    case MEMSWAP_CODEC_BAD_ARGUMENT:
      return arguments::kBadArgument;
    case MEMSWAP_CODEC_NOT_SUPPORTED:
      return "not supported by the CUDA codec";
    default:
      return code > 0 ? cudaGetErrorString(static_cast<cudaError_t>(code)) : "unknown code";
  }
}

constexpr memswap_codec kCodec = {MEMSWAP_CODEC_VERSION, "cuda", &encode, &decode, &message, 1, 1,
                                  kWorkspaceBytes};

}  // namespace
}  // namespace memswap::cuda

const memswap_codec* memswap_codec_cuda(void) { return &memswap::cuda::kCodec; }
