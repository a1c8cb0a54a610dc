// Encoding and decoding on the NPU against a device-to-device copy of the same tensor.
//
//   memswap_ascend_bench [--small] [--repeats N]      prints JSON, a line per measurement
//
// What is measured, and how, is in device_bench.h.
#include <acl/acl.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "device_bench.h"

namespace memswap::bench {
namespace {

void check(aclError error, const char* what) {
  if (error != ACL_SUCCESS) {
    const char* more = aclGetRecentErrMsg();
    std::fprintf(stderr, "%s: error %d of the ACL runtime. %s\n", what, static_cast<int>(error),
                 more != nullptr ? more : "");
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

// A tensor, its frame, the decoded tensor and a copy.
struct Buffers {
  Buffers(uint64_t bytes, uint64_t frame_bytes)
      : input(bytes), frame(frame_bytes), output(bytes), copy(bytes), status(4) {}
  DeviceBuffer input, frame, output, copy, status;
};

void measure(const Case& of, uint64_t bytes, uint32_t max_processors, int repeats, bool is_first,
             Stopwatch& stopwatch) {
  const memswap_codec& codec = *memswap_codec_ascend();
  const uint64_t elements = bytes / of.width();
  const Sections sections = frame::sections_of(of.dtype, of.layout, elements);
  const uint64_t capacity = sections.max_var_units();
  const int warm_up = repeats > 2 ? 3 : 1;
  // The L2 cache has up to 192 MB. Every buffer is used.
  const int rotation =
      std::min(warm_up + repeats, static_cast<int>(std::clamp(512e6 / bytes, 2.0, 8.0)));
  const std::vector<uint8_t> tensor = make_tensor(of, bytes);
  std::vector<Buffers> buffers;
  for (int i = 0; i < rotation; ++i) {
    buffers.emplace_back(bytes, sections.bytes(capacity));
    const Buffers& made = buffers.back();
    check(aclrtMemcpy(made.input.get(), bytes, tensor.data(), bytes, ACL_MEMCPY_HOST_TO_DEVICE),
          "the copy of the tensor");
    check(aclrtMemset(made.status.get(), 4, 0, 4), "aclrtMemset");
  }
  memswap_launch launch{};
  launch.stream = stopwatch.stream();
  launch.max_processors = max_processors;
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
    download(&header, in.frame.get(), sizeof(header));
    return header;
  };
  if (of.is_fast) {
    stopwatch.time_ms([&] { encode(buffers[0]); });
    center = center_of(header_of(buffers[0]));
    profile = MEMSWAP_FAST;
  }

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
  const auto in_a_row = [&](const auto& work) {
    return stopwatch.time_ms([&] {
      for (const Buffers& in : buffers) {
        work(in);
      }
    }) / static_cast<float>(buffers.size());
  };
  for (int repeat = 0; repeat < std::max(repeats / 5, 1); ++repeat) {
    times.encode_row.push_back(in_a_row(encode));
    times.decode_row.push_back(in_a_row(decode));
  }

  std::vector<uint8_t> decoded(bytes);
  for (const Buffers& in : buffers) {
    uint32_t status = 1;
    download(&status, in.status.get(), 4);
    require(status == 0, "a frame did not decode");
    download(decoded.data(), in.output.get(), bytes);
    require(decoded == tensor, "another tensor was decoded");
  }
  print(of, bytes, max_processors, sections.bytes(header_of(buffers[0]).var_used), times, is_first);
}

}  // namespace

int run(const Arguments& arguments) {
  check(aclInit(nullptr), "aclInit");
  check(aclrtSetDevice(0), "aclrtSetDevice");
  {
    int64_t cores = 0;
    check(aclGetDeviceCapability(0, ACL_DEVICE_INFO_VECTOR_CORE_NUM, &cores),
          "aclGetDeviceCapability");
    const char* name = aclrtGetSocName();
    print_head(name != nullptr ? name : "", cores, arguments);
    Stopwatch stopwatch;
    bool is_first = true;
    for_each(arguments, 50000, {4, 8, 16, 24, 32},
             [&](const Case& of, uint64_t bytes, uint32_t bound) {
               measure(of, bytes, bound, arguments.repeats, is_first, stopwatch);
               is_first = false;
             });
    print_end();
  }
  check(aclrtResetDevice(0), "aclrtResetDevice");
  check(aclFinalize(), "aclFinalize");
  return 0;
}

}  // namespace memswap::bench

int main(int argc, char** argv) { return memswap::bench::run(memswap::bench::parse(argc, argv)); }
