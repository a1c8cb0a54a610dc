// Encoding and decoding on the GPU against a device-to-device copy of the same tensor.
//
//   memswap_cuda_bench [--small] [--repeats N]      prints JSON, a line per measurement
//
// GB/s are 10^9 bytes of the uncompressed tensor per second, for the copy as well (which moves that
// many bytes twice). Copy, encode and decode take turns within a repeat; the medians are of CUDA
// events' times: of one call alone, launch included, and ("row") of a call in a row of them, one
// per set of buffers. Buffers rotate, so that no tensor is found in the L2 cache. Every decoded
// tensor is compared with what was encoded. --small is for sanitizers: little of everything.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "memswap/codec.h"
#include "memswap/frame.h"
#include "patterns.h"  // kernels/tests

namespace {

using memswap::frame::Dtype;
using memswap::frame::Header;
using memswap::frame::Layout;
using memswap::frame::Shape;
using memswap::test::Kind;
using memswap::test::Pattern;

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
    std::exit(1);
  }
}

void check(bool is_right, const char* what) {
  if (!is_right) {
    std::fprintf(stderr, "%s\n", what);
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

struct Case {
  const char* name;
  Dtype dtype;
  Shape shape;
  Pattern pattern;
  bool is_fast;
};

constexpr Case kCases[] = {
    {"bf16 dense", Dtype::kBf16, Shape::kDense, {Kind::kNormal, 0}, false},
    {"bf16 dense fast", Dtype::kBf16, Shape::kDense, {Kind::kNormal, 0}, true},
    {"bf16 sparse half", Dtype::kBf16, Shape::kSparse, {Kind::kSparse, 8}, false},
    {"fp16 dense", Dtype::kFp16, Shape::kDense, {Kind::kNormal, 0}, false},
    {"fp32 dense", Dtype::kFp32, Shape::kDense, {Kind::kNormal, 0}, false},
    {"fp32 upcast", Dtype::kFp32, Shape::kUpcast, {Kind::kUpcast, 0}, false},
    {"e4m3 dense", Dtype::kE4m3, Shape::kDense, {Kind::kNormal, 0}, false},
    {"bool bits", Dtype::kBool, Shape::kBits, {Kind::kBooleans, 0}, false},
    {"int64 ints", Dtype::kInt64, Shape::kInts, {Kind::kRange, 15}, false},
};

// A tensor, its frame, the decoded tensor and a copy.
struct Buffers {
  Buffers(uint64_t bytes, uint64_t frame_bytes)
      : input(bytes), frame(frame_bytes), output(bytes), copy(bytes), status(4) {}
  DeviceBuffer input, frame, output, copy, status;
};

struct Times {
  std::vector<float> copy, encode, decode, encode_row, decode_row;
};

double median(std::vector<float> times) {
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

template <class Work>
float time_ms(Work work) {
  static cudaEvent_t begin, end;
  static const bool is_created = (check(cudaEventCreate(&begin), "cudaEventCreate"),
                                  check(cudaEventCreate(&end), "cudaEventCreate"), true);
  check(is_created, "events");
  check(cudaEventRecord(begin), "cudaEventRecord");
  work();
  check(cudaEventRecord(end), "cudaEventRecord");
  check(cudaEventSynchronize(end), "the work");
  float elapsed_ms = 0;
  check(cudaEventElapsedTime(&elapsed_ms, begin, end), "cudaEventElapsedTime");
  return elapsed_ms;
}

void measure(const Case& of, uint64_t bytes_wanted, uint32_t max_processors, int repeats,
             bool is_first) {
  const memswap_codec& codec = *memswap_codec_cuda();
  const uint32_t width = memswap::frame::width_of(of.dtype);
  const uint64_t bytes = bytes_wanted / 16 * 16;
  const uint64_t elements = bytes / width;
  const Layout layout = memswap::frame::layout_of(of.dtype, of.shape, elements);
  const uint64_t capacity = layout.max_var_units();
  // Four buffers of a tensor, several times the 60 MB that the largest L2 has so far.
  const int rotation =
      repeats < 10 ? 2 : static_cast<int>(std::max<uint64_t>(2, 256000000 / 4 / bytes + 1));

  // A million different elements, repeated: making patterns is slow.
  std::vector<uint8_t> tensor(bytes);
  const uint64_t distinct = std::min<uint64_t>(elements, 1 << 20);
  memswap::test::fill(of.pattern, of.dtype, 2, 0, distinct, tensor.data());
  for (uint64_t at = distinct * width; at < bytes; at += distinct * width) {
    std::memcpy(&tensor[at], tensor.data(), std::min(distinct * width, bytes - at));
  }
  std::vector<Buffers> buffers;
  for (int i = 0; i < rotation; ++i) {
    buffers.emplace_back(bytes, layout.bytes(capacity));
    check(cudaMemcpy(buffers[i].input.get(), tensor.data(), bytes, cudaMemcpyHostToDevice),
          "the copy of the tensor");
    check(cudaMemset(buffers[i].status.get(), 0, 4), "cudaMemset");
  }
  uint8_t center = 0;
  const DeviceBuffer workspace(codec.workspace_bytes);
  check(cudaMemset(workspace.get(), 0, codec.workspace_bytes), "cudaMemset");
  memswap_launch launch{};
  launch.max_processors = max_processors;
  launch.workspace = workspace.get();
  const auto encode = [&](const Buffers& in) {
    memswap_encode_job job{};
    job.input = in.input.get();
    job.elements = elements;
    job.dtype = static_cast<uint8_t>(of.dtype);
    job.shape = static_cast<uint8_t>(of.shape);
    job.profile = of.is_fast ? MEMSWAP_FAST : MEMSWAP_CANONICAL;
    job.center = center;
    job.frame = in.frame.get();
    job.var_capacity = capacity;
    const int error = codec.encode(&job, 1, &launch);
    check(error == 0, codec.message(error));
  };
  const auto decode = [&](const Buffers& in) {
    memswap_decode_job job{};
    job.frame = in.frame.get();
    job.frame_bytes = layout.bytes(capacity);
    job.output = in.output.get();
    job.elements = elements;
    job.dtype = static_cast<uint8_t>(of.dtype);
    job.shape_hint = static_cast<uint8_t>(1 + static_cast<uint32_t>(of.shape));
    job.status = reinterpret_cast<uint32_t*>(in.status.get());
    const int error = codec.decode(&job, 1, &launch);
    check(error == 0, codec.message(error));
  };
  if (of.is_fast) {
    // The centre that a step before this one would have seen.
    memswap_encode_job job{buffers[0].input.get(), elements};
    job.dtype = static_cast<uint8_t>(of.dtype);
    job.shape = static_cast<uint8_t>(of.shape);
    job.frame = buffers[0].frame.get();
    job.var_capacity = capacity;
    check(codec.encode(&job, 1, &launch) == 0, "encode");
    Header header;
    check(cudaMemcpy(&header, job.frame, sizeof(header), cudaMemcpyDeviceToHost), "the header");
    center = static_cast<uint8_t>(header.center_sum / header.blocks);
  }

  Times times;
  for (int repeat = -3; repeat < repeats; ++repeat) {
    const Buffers& in = buffers[static_cast<size_t>(repeat + 3) % buffers.size()];
    const float copy = time_ms([&] {
      check(cudaMemcpyAsync(in.copy.get(), in.input.get(), bytes, cudaMemcpyDeviceToDevice),
            "cudaMemcpyAsync");
    });
    const float encoded = time_ms([&] { encode(in); });
    const float decoded = time_ms([&] { decode(in); });
    if (repeat >= 0) {
      times.copy.push_back(copy);
      times.encode.push_back(encoded);
      times.decode.push_back(decoded);
    }
  }
  const auto in_a_row = [&](const auto& work) {
    return time_ms([&] {
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
  Header header;
  uint64_t frame_bytes = 0;
  for (const Buffers& in : buffers) {
    uint32_t status = 1;
    check(cudaMemcpy(&status, in.status.get(), 4, cudaMemcpyDeviceToHost), "the status");
    check(status == 0, "a frame did not decode");
    check(cudaMemcpy(decoded.data(), in.output.get(), bytes, cudaMemcpyDeviceToHost), "output");
    check(std::memcmp(decoded.data(), tensor.data(), bytes) == 0, "another tensor was decoded");
    check(cudaMemcpy(&header, in.frame.get(), sizeof(header), cudaMemcpyDeviceToHost), "header");
    frame_bytes = layout.bytes(header.var_used);
  }
  const double copy_ms = median(times.copy);
  const auto gigabytes_per_s = [&](double ms) { return static_cast<double>(bytes) / ms / 1e6; };
  const double encode_ms = median(times.encode), decode_ms = median(times.decode);
  std::printf(
      "%s\n  {\"case\": \"%s\", \"megabytes\": %.6g, \"max_processors\": %u, \"ratio\": %.4f, "
      "\"copy_gb_s\": %.1f, \"encode_gb_s\": %.1f, \"decode_gb_s\": %.1f, "
      "\"encode_row_gb_s\": %.1f, \"decode_row_gb_s\": %.1f, \"encode_of_copy\": %.3f, "
      "\"decode_of_copy\": %.3f, \"encode_us\": %.1f, \"decode_us\": %.1f}",
      is_first ? "" : ",", of.name, static_cast<double>(bytes_wanted) / 1e6, max_processors,
      static_cast<double>(bytes) / static_cast<double>(frame_bytes), gigabytes_per_s(copy_ms),
      gigabytes_per_s(encode_ms), gigabytes_per_s(decode_ms),
      gigabytes_per_s(median(times.encode_row)), gigabytes_per_s(median(times.decode_row)),
      copy_ms / encode_ms, copy_ms / decode_ms, encode_ms * 1e3, decode_ms * 1e3);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  int repeats = 51;
  bool is_small = false;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--small") == 0) {
      is_small = true;
      repeats = 2;
    } else if (std::strcmp(argv[i], "--repeats") == 0 && i + 1 < argc) {
      repeats = std::max(1, std::atoi(argv[++i]));
    } else {
      std::fprintf(stderr, "usage: %s [--small] [--repeats N]\n", argv[0]);
      return 2;
    }
  }
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, 0), "no CUDA device");
  std::printf("{\"device\": \"%s\", \"processors\": %d, \"repeats\": %d, \"results\": [",
              properties.name, properties.multiProcessorCount, repeats);
  bool is_first = true;
  constexpr uint64_t kMegabyte = 1000000;
  for (const Case& of : kCases) {
    for (const uint64_t megabytes : {1, 4, 16, 64, 256}) {
      if (!is_small) {
        measure(of, megabytes * kMegabyte, 0, repeats, is_first);
      } else if (megabytes == 1) {
        measure(of, kMegabyte / 5 + 48, 0, repeats, is_first);
      }
      is_first = false;
    }
  }
  for (const uint32_t bound : {4, 8, 16, 32, 64, 96}) {
    if (!is_small || bound == 4) {
      measure(kCases[0], is_small ? kMegabyte / 2 : 64 * kMegabyte, bound, repeats, is_first);
    }
  }
  std::printf("\n]}\n");
  return 0;
}
