// Encoding and decoding on the GPU against a device-to-device copy of the same tensor.
//
//   memswap_cuda_bench [--small] [--repeats N] [--case NAME] [--megabytes N]
//
// prints JSON, a line per measurement.
//
// What is measured, and how, is in device_bench.h.
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "device_bench.h"

namespace memswap::bench {
namespace {

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
    std::exit(1);
  }
}

class DeviceBuffer {
 public:
  explicit DeviceBuffer(uint64_t bytes) { check(cudaMalloc(&memory_, bytes + 1), "cudaMalloc"); }
  ~DeviceBuffer() { cudaFree(memory_); }
  DeviceBuffer(DeviceBuffer&& other) noexcept : memory_(other.memory_) { other.memory_ = nullptr; }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;
  uint8_t* get() const { return static_cast<uint8_t*>(memory_); }

 private:
  void* memory_ = nullptr;
};

// A tensor, its frame, the decoded tensor and a copy.
struct Buffers {
  Buffers(uint64_t bytes, uint64_t frame_bytes)
      : input(bytes), frame(frame_bytes), output(bytes), copy(bytes), status(4) {}
  DeviceBuffer input, frame, output, copy, status;
};

__global__ void __launch_bounds__(1) hold(uint64_t duration_ns) {
  uint64_t begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do {
    __nanosleep(500);
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - begin < duration_ns);
}

// `hold_us`: the device is held so long first, or the time of a small kernel would be that which
// the host takes to launch it: what is timed is all enqueued when it begins.
template <class Work>
float time_ms(uint64_t hold_us, Work work) {
  static cudaEvent_t begin, end;
  static const bool is_created = (check(cudaEventCreate(&begin), "cudaEventCreate"),
                                  check(cudaEventCreate(&end), "cudaEventCreate"), true);
  require(is_created, "events");
  if (hold_us != 0) {
    hold<<<1, 1>>>(1000 * hold_us);
    check(cudaGetLastError(), "hold");
  }
  check(cudaEventRecord(begin), "cudaEventRecord");
  work();
  check(cudaEventRecord(end), "cudaEventRecord");
  check(cudaEventSynchronize(end), "the work");
  float elapsed_ms = 0;
  check(cudaEventElapsedTime(&elapsed_ms, begin, end), "cudaEventElapsedTime");
  return elapsed_ms;
}

void measure(const Case& of, uint64_t bytes, uint32_t max_processors, int repeats, bool is_first) {
  const memswap_codec& codec = *memswap_codec_cuda();
  const uint64_t elements = bytes / of.width();
  const Sections sections = frame::sections_of(of.dtype, of.layout, elements);
  const uint64_t capacity = sections.max_var_units();
  const bool is_timed = repeats >= 10;  // else this is about what is computed
  // Four buffers of a tensor: together several times the 60 MB that the largest L2 has so far.
  const int rotation =
      is_timed ? static_cast<int>(std::max<uint64_t>(3, 256000000 / 4 / bytes + 1)) : 2;
  const std::vector<uint8_t> tensor = make_tensor(of, bytes);
  std::vector<Buffers> buffers;
  for (int i = 0; i < rotation; ++i) {
    buffers.emplace_back(bytes, sections.bytes(capacity));
    check(cudaMemcpy(buffers[i].input.get(), tensor.data(), bytes, cudaMemcpyHostToDevice),
          "the copy of the tensor");
    check(cudaMemset(buffers[i].status.get(), 0, 4), "cudaMemset");
  }
  const DeviceBuffer workspace(codec.workspace_bytes);
  check(cudaMemset(workspace.get(), 0, codec.workspace_bytes), "cudaMemset");
  memswap_launch launch{};
  launch.max_processors = max_processors;
  launch.workspace = workspace.get();
  uint8_t profile = MEMSWAP_CANONICAL, center = 0;
  const auto encode = [&](const Buffers& in) {
    memswap_encode_job job = encode_job(of, elements, in.input.get(), in.frame.get(), capacity);
    job.profile = profile;
    job.center = center;
    const int error = codec.encode(&job, &launch);
    require(error == 0, codec.message(error));
  };
  const auto decode = [&](const Buffers& in) {
    const memswap_decode_job job = decode_job(
        of, elements, in.frame.get(), sections.bytes(capacity), in.output.get(), in.status.get());
    const int error = codec.decode(&job, &launch);
    require(error == 0, codec.message(error));
  };
  const auto header_of = [&](const Buffers& in) {
    Header header;
    check(cudaMemcpy(&header, in.frame.get(), sizeof(header), cudaMemcpyDeviceToHost), "a header");
    return header;
  };
  if (of.is_fast) {
    encode(buffers[0]);
    center = center_of(header_of(buffers[0]));
    profile = MEMSWAP_FAST;
  }

  // An idle device has a low clock, and takes some milliseconds of work to raise it.
  const auto began = std::chrono::steady_clock::now();
  do {
    for (const Buffers& in : buffers) {
      encode(in);
      decode(in);
    }
    check(cudaDeviceSynchronize(), "the first encodes and decodes");
  } while (is_timed && std::chrono::steady_clock::now() - began < std::chrono::milliseconds(100));

  Times times;
  const uint64_t hold_us = is_timed ? 100 : 0;
  // Each has other buffers, or what one has read and written were in the cache for the next.
  const size_t apart = buffers.size() / 3;
  for (int repeat = -3; repeat < repeats; ++repeat) {
    const auto turn = static_cast<size_t>(repeat + 3);
    const auto take = [&](size_t i) -> const Buffers& {
      return buffers[(turn + i * apart) % buffers.size()];
    };
    const float copy = time_ms(hold_us, [&] {
      const Buffers& in = take(0);
      check(cudaMemcpyAsync(in.copy.get(), in.input.get(), bytes, cudaMemcpyDeviceToDevice),
            "cudaMemcpyAsync");
    });
    const float encoded = time_ms(hold_us, [&] { encode(take(1)); });
    const float decoded = time_ms(hold_us, [&] { decode(take(2)); });
    if (repeat >= 0) {
      times.copy.push_back(copy);
      times.encode.push_back(encoded);
      times.decode.push_back(decoded);
    }
  }
  const auto in_a_row = [&](const auto& work) {
    return time_ms(hold_us + (is_timed ? 15 * buffers.size() : 0),
                   [&] {
                     for (const Buffers& in : buffers) {
                       work(in);
                     }
                   }) /
           static_cast<float>(buffers.size());
  };
  for (int repeat = 0; repeat < std::max(repeats / 5, 1); ++repeat) {
    times.encode_row.push_back(in_a_row(encode));
    times.decode_row.push_back(in_a_row(decode));
  }

  std::vector<uint8_t> decoded(bytes);
  for (const Buffers& in : buffers) {
    uint32_t status = 1;
    check(cudaMemcpy(&status, in.status.get(), 4, cudaMemcpyDeviceToHost), "the status");
    require(status == 0, "a frame did not decode");
    check(cudaMemcpy(decoded.data(), in.output.get(), bytes, cudaMemcpyDeviceToHost), "output");
    require(decoded == tensor, "another tensor was decoded");
  }
  print(of, bytes, max_processors, sections.bytes(header_of(buffers[0]).var_used), times, is_first);
}

}  // namespace

int run(const Arguments& arguments) {
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, 0), "no CUDA device");
  print_head(properties.name, properties.multiProcessorCount, arguments);
  bool is_first = true;
  for_each(arguments, 200048, {4, 8, 16, 32, 64, 96},
           [&](const Case& of, uint64_t bytes, uint32_t bound) {
             measure(of, bytes, bound, arguments.repeats, is_first);
             is_first = false;
           });
  print_end();
  return 0;
}

}  // namespace memswap::bench

int main(int argc, char** argv) { return memswap::bench::run(memswap::bench::parse(argc, argv)); }
