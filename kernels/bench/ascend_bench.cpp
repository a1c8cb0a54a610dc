// Encoding and decoding on the NPU against a device-to-device copy of the same tensor.
//
//   memswap_ascend_bench [--quick] [--repeats N]      prints JSON
//
// GB/s are 10^9 bytes of the uncompressed tensor per second, for the copy as well (which moves that
// many bytes twice). Copy, encode and decode take turns within a repeat; the medians are of ACL
// events' times. Buffers rotate, so that a tensor that fits into the L2 cache is not found there.
// Every decoded tensor is compared with what was encoded.
#include <acl/acl.h>

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

void check(aclError error, const char* what) {
  if (error != ACL_SUCCESS) {
    const char* more = aclGetRecentErrMsg();
    std::fprintf(stderr, "%s: error %d of the ACL runtime. %s\n", what, static_cast<int>(error),
                 more != nullptr ? more : "");
    std::exit(1);
  }
}

void require(bool is_right, const char* what) {
  if (!is_right) {
    std::fprintf(stderr, "%s\n", what);
    std::exit(1);
  }
}

class DeviceBuffer {
 public:
  explicit DeviceBuffer(uint64_t bytes) {
    check(aclrtMalloc(&memory_, bytes + kAlignment, ACL_MEM_MALLOC_HUGE_FIRST), "aclrtMalloc");
  }
  ~DeviceBuffer() { aclrtFree(memory_); }
  DeviceBuffer(DeviceBuffer&& other) noexcept : memory_(other.memory_) { other.memory_ = nullptr; }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;
  uint8_t* get() const {
    const auto address = reinterpret_cast<uintptr_t>(memory_);
    return static_cast<uint8_t*>(memory_) + (kAlignment - address % kAlignment) % kAlignment;
  }

 private:
  // aclrtMalloc promises 64; frames want 128, and DMA is best at 512.
  static constexpr uintptr_t kAlignment = 512;
  void* memory_ = nullptr;
};

// Work on a stream of its own, timed by two events.
class Stopwatch {
 public:
  Stopwatch() {
    check(aclrtCreateStream(&stream_), "aclrtCreateStream");
    check(aclrtCreateEventWithFlag(&begin_, ACL_EVENT_TIME_LINE), "aclrtCreateEventWithFlag");
    check(aclrtCreateEventWithFlag(&end_, ACL_EVENT_TIME_LINE), "aclrtCreateEventWithFlag");
  }
  ~Stopwatch() {
    aclrtDestroyEvent(end_);
    aclrtDestroyEvent(begin_);
    aclrtDestroyStream(stream_);
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;
  aclrtStream stream() const { return stream_; }

  template <class Work>
  float time_ms(Work work) {
    check(aclrtRecordEvent(begin_, stream_), "aclrtRecordEvent");
    work();
    check(aclrtRecordEvent(end_, stream_), "aclrtRecordEvent");
    check(aclrtSynchronizeStream(stream_), "the work");
    float elapsed_ms = 0;
    check(aclrtEventElapsedTime(&elapsed_ms, begin_, end_), "aclrtEventElapsedTime");
    return elapsed_ms;
  }

 private:
  aclrtStream stream_ = nullptr;
  aclrtEvent begin_ = nullptr;
  aclrtEvent end_ = nullptr;
};

void download(void* to, const void* from, uint64_t bytes) {
  check(aclrtMemcpy(to, bytes, from, bytes, ACL_MEMCPY_DEVICE_TO_HOST), "a copy to the host");
}

struct Case {
  const char* name;
  Dtype dtype;
  Shape shape;
  Pattern pattern;
};

constexpr Case kCases[] = {
    {"bf16 dense", Dtype::kBf16, Shape::kDense, {Kind::kNormal, 0}},
    {"bf16 sparse half", Dtype::kBf16, Shape::kSparse, {Kind::kSparse, 8}},
    {"fp16 dense", Dtype::kFp16, Shape::kDense, {Kind::kNormal, 0}},
    {"fp32 dense", Dtype::kFp32, Shape::kDense, {Kind::kNormal, 0}},
    {"fp32 upcast", Dtype::kFp32, Shape::kUpcast, {Kind::kUpcast, 0}},
    {"e4m3 dense", Dtype::kE4m3, Shape::kDense, {Kind::kNormal, 0}},
    {"bool bits", Dtype::kBool, Shape::kBits, {Kind::kBooleans, 0}},
    {"int64 ints", Dtype::kInt64, Shape::kInts, {Kind::kRange, 15}},
};

// A tensor, its frame, the decoded tensor and a copy.
struct Buffers {
  Buffers(uint64_t bytes, uint64_t frame_bytes)
      : input(bytes), frame(frame_bytes), output(bytes), copy(bytes), status(4) {}
  DeviceBuffer input, frame, output, copy, status;
};

struct Times {
  std::vector<float> copy, encode, decode;
};

double median(std::vector<float> times) {
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

void measure(const Case& of, double megabytes, uint32_t max_processors, int repeats, bool is_first,
             Stopwatch& stopwatch) {
  const memswap_codec& codec = *memswap_codec_ascend();
  const uint32_t width = memswap::frame::width_of(of.dtype);
  const uint64_t bytes = static_cast<uint64_t>(megabytes * 1e6) / 16 * 16;
  const uint64_t elements = bytes / width;
  const Layout layout = memswap::frame::layout_of(of.dtype, of.shape, elements);
  const uint64_t capacity = layout.max_var_units();
  const int warm_up = repeats > 1 ? 3 : 1;
  // The L2 cache has up to 192 MB. Every buffer is used.
  const int rotation =
      std::min(warm_up + repeats, static_cast<int>(std::clamp(512 / megabytes, 2.0, 8.0)));

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
    const Buffers& made = buffers.back();
    check(aclrtMemcpy(made.input.get(), bytes, tensor.data(), bytes, ACL_MEMCPY_HOST_TO_DEVICE),
          "the copy of the tensor");
    check(aclrtMemset(made.status.get(), 4, 0, 4), "aclrtMemset");
  }
  memswap_launch launch{};
  launch.stream = stopwatch.stream();
  launch.max_processors = max_processors;
  const auto encode = [&](const Buffers& in) {
    memswap_encode_job job{};
    job.input = in.input.get();
    job.elements = elements;
    job.dtype = static_cast<uint8_t>(of.dtype);
    job.shape = static_cast<uint8_t>(of.shape);
    job.frame = in.frame.get();
    job.var_capacity = capacity;
    const int error = codec.encode(&job, 1, &launch);
    require(error == 0, codec.message(error));
  };
  const auto decode = [&](const Buffers& in) {
    memswap_decode_job job{};
    job.frame = in.frame.get();
    job.frame_bytes = layout.bytes(capacity);
    job.output = in.output.get();
    job.elements = elements;
    job.dtype = static_cast<uint8_t>(of.dtype);
    job.status = reinterpret_cast<uint32_t*>(in.status.get());
    const int error = codec.decode(&job, 1, &launch);
    require(error == 0, codec.message(error));
  };
  Times times;
  for (int repeat = -warm_up; repeat < repeats; ++repeat) {
    const Buffers& in = buffers[static_cast<size_t>(repeat + warm_up) % buffers.size()];
    const float copy = stopwatch.time_ms([&] {
      check(aclrtMemcpyAsync(in.copy.get(), bytes, in.input.get(), bytes,
                             ACL_MEMCPY_DEVICE_TO_DEVICE, stopwatch.stream()),
            "aclrtMemcpyAsync");
    });
    const float encoded = stopwatch.time_ms([&] { encode(in); });
    const float decoded = stopwatch.time_ms([&] { decode(in); });
    if (repeat >= 0) {
      times.copy.push_back(copy);
      times.encode.push_back(encoded);
      times.decode.push_back(decoded);
    }
  }

  std::vector<uint8_t> decoded(bytes);
  Header header;
  uint64_t frame_bytes = 0;
  for (const Buffers& in : buffers) {
    uint32_t status = 1;
    download(&status, in.status.get(), 4);
    require(status == 0, "a frame did not decode");
    download(decoded.data(), in.output.get(), bytes);
    require(std::memcmp(decoded.data(), tensor.data(), bytes) == 0, "another tensor was decoded");
    download(&header, in.frame.get(), sizeof(header));
    frame_bytes = layout.bytes(header.var_used);
  }
  const double copy_ms = median(times.copy);
  const auto gigabytes_per_s = [&](double ms) { return static_cast<double>(bytes) / ms / 1e6; };
  const double encode_ms = median(times.encode), decode_ms = median(times.decode);
  std::printf(
      "%s\n  {\"case\": \"%s\", \"megabytes\": %.3f, \"max_processors\": %u, \"ratio\": %.4f, "
      "\"copy_gb_s\": %.1f, \"encode_gb_s\": %.1f, \"decode_gb_s\": %.1f, \"encode_of_copy\": "
      "%.3f, \"decode_of_copy\": %.3f, \"encode_us\": %.1f, \"decode_us\": %.1f}",
      is_first ? "" : ",", of.name, megabytes, max_processors,
      static_cast<double>(bytes) / static_cast<double>(frame_bytes), gigabytes_per_s(copy_ms),
      gigabytes_per_s(encode_ms), gigabytes_per_s(decode_ms), copy_ms / encode_ms,
      copy_ms / decode_ms, encode_ms * 1e3, decode_ms * 1e3);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  int repeats = 51;
  bool is_quick = false;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--quick") == 0) {
      is_quick = true;
      repeats = 1;
    } else if (std::strcmp(argv[i], "--repeats") == 0 && i + 1 < argc) {
      repeats = std::max(1, std::atoi(argv[++i]));
    } else {
      std::fprintf(stderr, "usage: %s [--quick] [--repeats N]\n", argv[0]);
      return 2;
    }
  }
  check(aclInit(nullptr), "aclInit");
  check(aclrtSetDevice(0), "aclrtSetDevice");
  {
    int64_t cores = 0;
    check(aclGetDeviceCapability(0, ACL_DEVICE_INFO_VECTOR_CORE_NUM, &cores),
          "aclGetDeviceCapability");
    const char* name = aclrtGetSocName();
    std::printf("{\"device\": \"%s\", \"processors\": %lld, \"repeats\": %d, \"results\": [",
                name != nullptr ? name : "", static_cast<long long>(cores), repeats);
    Stopwatch stopwatch;
    bool is_first = true;
    const std::vector<double> sizes =
        is_quick ? std::vector<double>{0.05} : std::vector<double>{1, 4, 16, 64, 256};
    for (const Case& of : kCases) {
      for (const double megabytes : sizes) {
        measure(of, megabytes, 0, repeats, is_first, stopwatch);
        is_first = false;
      }
    }
    for (const uint32_t bound : {4, 8, 16, 24, 32}) {
      if (!is_quick || bound == 4) {
        measure(kCases[0], is_quick ? 0.05 : 64, bound, repeats, is_first, stopwatch);
      }
    }
    std::printf("\n]}\n");
  }
  check(aclrtResetDevice(0), "aclrtResetDevice");
  check(aclFinalize(), "aclFinalize");
  return 0;
}
