// The backend's table: arguments, tables of jobs, launches. Every function returns as soon as its
// work is enqueued; nothing is allocated and nothing waits.
#include <cuda_runtime.h>

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
  return to;
}

// A frame without elements has no tile to encode, but a header to be checked.
uint32_t tiles_of(const memswap_encode_job& job) { return tiles_of(job.elements); }
uint32_t tiles_of(const memswap_decode_job& job) {
  return job.elements == 0 ? 1 : tiles_of(job.elements);
}

EncodeKernel kernel_of(const memswap_encode_job& job) {
  const Dtype dtype = static_cast<Dtype>(job.dtype);
  switch (static_cast<Shape>(job.shape)) {
    case Shape::kDense:
    case Shape::kUpcast:
      return dense_encode_kernel(dtype, static_cast<Shape>(job.shape));
    case Shape::kSparse:
      return sparse_encode_kernel(dtype);
    default:
      return other_encode_kernel(dtype, static_cast<Shape>(job.shape));
  }
}

DecodeKernel kernel_of(const memswap_decode_job& job) {
  const Dtype dtype = static_cast<Dtype>(job.dtype);
  return frame::split_of(dtype).exponent_bits != 0 ? float_decode_kernel(dtype)
                                                   : other_decode_kernel(dtype);
}

// [Note: headers] The cursor and the counters of a header have to be 0 before the first tile adds
// to them, and a kernel's thread blocks start in no order. So headers are written by a launch of
// their own, in stream order before the tiles': some 2 microseconds for up to kTableJobs frames.
__global__ void __launch_bounds__(kLanes) write_headers(const __grid_constant__ EncodeTable table) {
  const EncodeJob& job = table.jobs[blockIdx.x];
  if (threadIdx.x != 0) {
    return;
  }
  const frame::Layout layout =
      frame::layout_of(static_cast<Dtype>(job.dtype), static_cast<Shape>(job.shape), job.elements);
  frame::Header header{};
  header.magic = frame::kMagic;
  header.version = frame::kVersion;
  header.dtype = job.dtype;
  header.shape = job.shape;
  header.flags = job.checked ? frame::kChecked : 0;
  header.elements = job.elements;
  header.blocks = layout.blocks;
  header.slab_bytes = layout.slab_bytes;
  header.var_capacity = job.var_capacity;
  *reinterpret_cast<frame::Header*>(job.frame) = header;
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
  const uint32_t slots =
      is_bounded && kMaxTiles * kernel.shared_bytes <= static_cast<uint32_t>(shared_limit)
          ? kMaxTiles
          : 1;
  const uint32_t shared_bytes = slots * kernel.shared_bytes;
  if (shared_bytes > 48 * 1024) {
    error = cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(shared_bytes));
    if (error != cudaSuccess) {
      return error;
    }
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

cudaError_t launch_table(const EncodeKernel& kernel, const EncodeTable& table,
                         const memswap_launch& where) {
  const cudaError_t error = launch(write_headers, table, table.count, kLanes, 0, where.stream);
  return error != cudaSuccess || table.tiles == 0 ? error : launch_tiles(kernel, table, where);
}

// See [Note: shapes].
cudaError_t launch_table(const DecodeKernel& kernel, const DecodeTable& table,
                         const memswap_launch& where) {
  const cudaError_t error = launch_tiles(kernel, table, where);
  const DecodeKernel sparse = sparse_decode_kernel(static_cast<Dtype>(table.jobs[0].dtype));
  return error != cudaSuccess || sparse.function == nullptr ? error
                                                            : launch_tiles(sparse, table, where);
}

// Jobs of the same kernel share launches, whatever their order among the others.
template <class DeviceJob, class Job>
int run(const Job* jobs, size_t count, const memswap_launch* launch_or_null) {
  if (!arguments::are_valid(jobs, count)) {
    return MEMSWAP_CODEC_BAD_ARGUMENT;
  }
  constexpr uint32_t kMaxTilesOfLaunch = 1u << 30;  // tile numbers and strides stay in 32 bits
  const memswap_launch where = launch_or_null != nullptr ? *launch_or_null : memswap_launch{};
  for (size_t first = 0; first < count; ++first) {
    const auto kernel = kernel_of(jobs[first]);
    const auto is_same = [&](size_t i) { return kernel_of(jobs[i]).function == kernel.function; };
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
        const cudaError_t error = launch_table(kernel, table, where);
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

constexpr memswap_codec kCodec = {MEMSWAP_CODEC_VERSION, "cuda", &encode, &decode, &message, 1, 0};

}  // namespace
}  // namespace memswap::cuda

const memswap_codec* memswap_codec_cuda(void) { return &memswap::cuda::kCodec; }
