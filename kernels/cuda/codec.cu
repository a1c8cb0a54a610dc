// The backend's table: arguments and launches, of which each tensor has one. Every function returns
// as soon as its work is enqueued; nothing is allocated and nothing waits.
#include <cuda_runtime.h>

#include <algorithm>
#include <utility>

#include "encode.cuh"
#include "jobs.h"
#include "memswap/arguments.h"
#include "memswap/codec.h"
#include "warp.cuh"

namespace memswap::cuda {
namespace {

using frame::Dtype;
using frame::Layout;

// A frame without elements has a tile: there is a header to be written, or to be looked at.
uint32_t tiles_of(uint64_t elements) {
  const uint64_t tiles = (elements + frame::kTileElements - 1) / frame::kTileElements;
  return tiles == 0 ? 1 : static_cast<uint32_t>(tiles);
}

EncodeJob to_device(const memswap_encode_job& job, void* workspace) {
  const frame::Sections sections = frame::sections_of(
      static_cast<Dtype>(job.dtype), static_cast<Layout>(job.layout), job.elements);
  EncodeJob to{};
  to.input = static_cast<const uint8_t*>(job.input);
  to.frame = static_cast<uint8_t*>(job.frame);
  to.records = to.frame + sections.records;
  to.var = to.frame + sections.var;
  to.overflow = static_cast<uint8_t*>(job.overflow);
  to.overflow_cursor = reinterpret_cast<unsigned long long*>(job.overflow_cursor);
  to.report = static_cast<uint32_t*>(job.report);
  to.counters = static_cast<frame::Header*>(workspace != nullptr ? workspace : job.frame);
  to.elements = job.elements;
  to.var_capacity = job.var_capacity;
  to.var_limit = job.var_capacity < frame::kMaxBaseUnits ? job.var_capacity : frame::kMaxBaseUnits;
  to.overflow_capacity = static_cast<uint32_t>(job.overflow_capacity);
  to.blocks = sections.blocks;
  to.tiles = tiles_of(job.elements);
  to.slab_bytes = sections.slab_bytes;
  to.dtype = job.dtype;
  to.layout = job.layout;
  to.fast = job.profile == MEMSWAP_FAST;
  to.center = job.center;
  to.checked = job.checksum != 0;
  to.is_counted_apart = workspace != nullptr;
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
  to.tiles = tiles_of(job.elements);
  to.dtype = job.dtype;
  to.verify = job.verify != 0;
  to.is_alone = job.layout_hint != 0;
  if (to.is_alone) {
    to.slab_bytes =
        frame::slab_bytes(static_cast<Dtype>(job.dtype), static_cast<Layout>(job.layout_hint - 1));
  }
  return to;
}

EncodeKernel* kernel_of(const memswap_encode_job& job) {
  const Dtype dtype = static_cast<Dtype>(job.dtype);
  const Layout layout = static_cast<Layout>(job.layout);
  switch (layout) {
    case Layout::kDense:
    case Layout::kUpcast:
      return dense_encode_kernel(dtype, layout);
    case Layout::kSparse:
      return sparse_encode_kernel(dtype);
    default:
      return other_encode_kernel(dtype, layout);
  }
}

// One kernel, or two that share a frame (see [Note: layouts]); the second is null where there is
// none.
std::pair<DecodeKernel*, DecodeKernel*> kernels_of(const memswap_decode_job& job) {
  const Dtype dtype = static_cast<Dtype>(job.dtype);
  if (frame::split_of(dtype).exponent_bits == 0) {
    return {other_decode_kernel(dtype), nullptr};
  }
  if (job.layout_hint == 0) {
    return {float_decode_kernel(dtype), sparse_decode_kernel(dtype)};
  }
  const bool is_sparse = static_cast<Layout>(job.layout_hint - 1) == Layout::kSparse;
  return {is_sparse ? sparse_decode_kernel(dtype) : float_decode_kernel(dtype), nullptr};
}

// Without a workspace: a header whose counters are 0, by a launch in stream order before the
// tiles'.
__global__ void __launch_bounds__(kLanes) write_header(const __grid_constant__ EncodeJob job) {
  reinterpret_cast<uint32_t*>(job.frame)[threadIdx.x] = header_word(job, threadIdx.x);
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

// What `device`, the current one, holds at once of a kernel: asks the runtime.
template <class Job>
cudaError_t ask_resident(const Kernel<Job>& kernel, int device, uint32_t& resident) {
  int processors = 0, blocks = 0;
  cudaError_t error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess && kernel.shared_bytes > 48 * 1024) {
    error = cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(kernel.shared_bytes));
  }
  if (error == cudaSuccess) {
    // What little a tile reads twice is in shared memory: as much of it, and so as many tiles, as a
    // processor can have.
    error = cudaFuncSetAttribute(kernel.function, cudaFuncAttributePreferredSharedMemoryCarveout,
                                 cudaSharedmemCarveoutMaxShared);
  }
  if (error == cudaSuccess) {
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel.function, kTileThreads,
                                                          kernel.shared_bytes);
  }
  resident = static_cast<uint32_t>(processors) * static_cast<uint32_t>(blocks > 0 ? blocks : 1);
  return error;
}

// The same, and sets what the kernel needs: once for each device. Two threads may both ask; they
// find the same.
template <class Job>
cudaError_t find_resident(Kernel<Job>& kernel, uint32_t& resident) {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) {
    return error;
  }
  if (device >= Kernel<Job>::kDevices) {
    return ask_resident(kernel, device, resident);
  }
  std::atomic<uint32_t>& known = kernel.resident[static_cast<size_t>(device)];
  resident = known.load(std::memory_order_acquire);
  if (resident != 0) {
    return cudaSuccess;
  }
  const cudaError_t asked = ask_resident(kernel, device, resident);
  if (asked == cudaSuccess) {
    known.store(resident, std::memory_order_release);
  }
  return asked;
}

// [Note: processors] The grid is what the device holds at once, and walks over the tiles. With a
// bound of p it is p thread blocks, which no more than p processors can hold.
template <class Job>
cudaError_t launch_tiles(Kernel<Job>& kernel, const Job& job, const memswap_launch& where) {
  uint32_t blocks = 0;
  const cudaError_t error = find_resident(kernel, blocks);
  if (error != cudaSuccess) {
    return error;
  }
  blocks = where.max_processors != 0 ? std::min(where.max_processors, blocks) : blocks;
  return launch(kernel.function, job, std::min({job.tiles, blocks, kMostThreadBlocks}),
                kTileThreads, kernel.shared_bytes, where.stream);
}

cudaError_t launch_job(const memswap_encode_job& job, const memswap_launch& where) {
  const EncodeJob to = to_device(job, where.workspace);
  if (!to.is_counted_apart) {
    const cudaError_t error = launch(write_header, to, 1, kLanes, 0, where.stream);
    if (error != cudaSuccess) {
      return error;
    }
  }
  return launch_tiles(*kernel_of(job), to, where);
}

cudaError_t launch_job(const memswap_decode_job& job, const memswap_launch& where) {
  const DecodeJob to = to_device(job);
  const auto [first, second] = kernels_of(job);
  const cudaError_t error = launch_tiles(*first, to, where);
  return error != cudaSuccess || second == nullptr ? error : launch_tiles(*second, to, where);
}

template <class Job>
int run(const Job* job, const memswap_launch& where) {
  if (!arguments::is_valid(job) ||
      !arguments::is_aligned(where.workspace, frame::kAlignmentBytes)) {
    return MEMSWAP_CODEC_BAD_ARGUMENT;
  }
  const cudaError_t error = launch_job(*job, where);
  if (error != cudaSuccess) {
    // The caller hears of it here; whoever asks the runtime next has launched something else.
    (void)cudaGetLastError();
    return static_cast<int>(error);
  }
  return MEMSWAP_CODEC_OK;
}

memswap_launch launch_of(const memswap_launch* launch) {
  return launch != nullptr ? *launch : memswap_launch{};
}

int encode(const memswap_encode_job* job, const memswap_launch* launch) {
  const memswap_launch where = launch_of(launch);
  // A header that is counted in the frame is complete when all kernels are, and then no warp looks.
  const bool is_finished_by_a_warp = where.workspace != nullptr;
  if (job != nullptr && job->report != nullptr && !is_finished_by_a_warp) {
    return MEMSWAP_CODEC_BAD_ARGUMENT;
  }
  return run(job, where);
}

int decode(const memswap_decode_job* job, const memswap_launch* launch) {
  return run(job, launch_of(launch));
}

const char* message(int code) {
  if (const char* shared = arguments::message_of(code)) {
    return shared;
  }
  return code > 0 ? cudaGetErrorString(static_cast<cudaError_t>(code)) : "unknown code";
}

constexpr memswap_codec kCodec = {MEMSWAP_CODEC_VERSION, "cuda", &encode, &decode, &message, 1, 1,
                                  kWorkspaceBytes,       1,      1};

}  // namespace
}  // namespace memswap::cuda

const memswap_codec* memswap_codec_cuda(void) { return &memswap::cuda::kCodec; }
