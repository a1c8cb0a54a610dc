// The Ascend kernels, on the emulator, against the CPU's scalar codec: frames of either decode on
// the other, for every grid and schedule, and damaged frames hurt nobody.
#include "memswap/codec.h"

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>

#include "kernels.cpp"
#include "memswap/portable.h"

namespace {

using ascend_emulator::memory;
using ascend_emulator::Options;
using ascend_emulator::Violation;
using memswap::frame::Dtype;
using memswap::frame::Header;
using memswap::frame::Layout;
using memswap::frame::Shape;
using Data = std::vector<uint8_t>;
namespace frame = memswap::frame;

int failures = 0;
int checks = 0;

void check(bool holds, const std::string& promise) {
  ++checks;
  if (!holds && ++failures <= 20) {
    std::printf("FAILED: %s\n", promise.c_str());
  }
}

using Encode = void (*)(GM_ADDR, GM_ADDR, uint64_t, uint64_t, uint32_t, uint32_t, uint32_t,
                        uint32_t);
using Decode = void (*)(GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, uint64_t, uint64_t, uint64_t, uint32_t,
                        uint32_t);

struct Format {
  const char* name;
  Dtype dtype;
  Shape shape;
  Encode encode;
  Decode decode;

  uint32_t width() const { return frame::width_of(dtype); }
  Layout layout(uint64_t elements) const { return frame::layout_of(dtype, shape, elements); }
};

// 128-byte aligned, as the CPU's codec asks for.
struct Frame {
  explicit Frame(uint64_t size) : bytes(size), storage(size + 128) {
    begin = storage.data() + (128 - reinterpret_cast<uintptr_t>(storage.data()) % 128) % 128;
  }
  Frame(const Frame& other) : Frame(other.bytes) { memcpy(begin, other.begin, bytes); }
  uint64_t bytes;
  Data storage;
  uint8_t* begin;
  Header header() const {
    Header result;
    memcpy(&result, begin, sizeof(result));
    return result;
  }
};

Frame ascend_encode(const Format& format, const Data& data, uint64_t capacity, uint32_t blocks,
                    const Options& options) {
  const uint64_t elements = data.size() / format.width();
  const Layout layout = format.layout(elements);
  Frame frame(layout.bytes(capacity));
  uint8_t* input = memory().upload(data.data(), data.size());
  uint8_t* output = memory().allocate(frame.bytes);
  // Gaps of var stay as they were; the host copies the frame as a whole.
  if (frame.bytes > layout.var) {
    memory().clear(output + layout.var, frame.bytes - layout.var);
  }
  const uint32_t dtype = static_cast<uint32_t>(format.dtype);
  const uint32_t shape = static_cast<uint32_t>(format.shape);
  EMU_LAUNCH(memswap_ascend_begin_frame, 1, options, input, output, elements, capacity, dtype,
             shape, layout.slab_bytes, 1);
  EMU_LAUNCH(format.encode, blocks, options, input, output, elements, capacity, dtype, shape,
             layout.slab_bytes, 1);
  EMU_LAUNCH(memswap_ascend_end_frame, 1, options, input, output, elements, capacity, dtype, shape,
             layout.slab_bytes, 1);
  const uint32_t status = reinterpret_cast<const Header*>(output)->status;
  if (status == frame::kOk) {
    const Data bytes = memory().download(output, frame.bytes);
    memcpy(frame.begin, bytes.data(), frame.bytes);
  } else {
    memcpy(frame.begin, output, frame.bytes);
  }
  memory().reset();
  return frame;
}

uint32_t ascend_decode(const Format& format, const Frame& frame, Data* data, uint32_t blocks,
                       const Options& options, bool verify = true) {
  uint8_t* input = memory().upload(frame.begin, frame.bytes);
  uint8_t* output = memory().allocate(data->size());
  uint8_t* status = memory().allocate(4);
  memory().clear(output, data->size());
  memory().clear(status, 4);
  EMU_LAUNCH(format.decode, blocks, options, input, output, status, nullptr, 0, frame.bytes,
             data->size() / format.width(), static_cast<uint32_t>(format.dtype), uint32_t{verify});
  *data = memory().download(output, data->size());
  const Data word = memory().download(status, 4);
  memory().reset();
  uint32_t result;
  memcpy(&result, word.data(), 4);
  return result;
}

Frame cpu_encode(const Format& format, const Data& data, bool fast) {
  const uint64_t elements = data.size() / format.width();
  const Layout layout = format.layout(elements);
  Frame frame(layout.bytes(layout.max_var_units()));
  memswap_encode_job job{};
  job.input = data.data();
  job.elements = elements;
  job.dtype = static_cast<uint8_t>(format.dtype);
  job.shape = static_cast<uint8_t>(format.shape);
  job.profile = fast ? MEMSWAP_FAST : MEMSWAP_CANONICAL;
  job.center = fast ? 128 : 0;
  job.checksum = 1;
  job.frame = frame.begin;
  job.var_capacity = layout.max_var_units();
  const memswap_launch launch{};
  check(memswap_codec_cpu()->encode(&job, 1, &launch) == 0, "the CPU encodes");
  return frame;
}

uint32_t cpu_decode(const Format& format, const Frame& frame, Data* data, bool verify = true) {
  uint32_t status = 0;
  memswap_decode_job job{};
  job.frame = frame.begin;
  job.frame_bytes = frame.bytes;
  job.output = data->data();
  job.elements = data->size() / format.width();
  job.dtype = static_cast<uint8_t>(format.dtype);
  job.verify = verify;
  job.status = &status;
  const memswap_launch launch{};
  check(memswap_codec_cpu()->decode(&job, 1, &launch) == 0, "the CPU decodes");
  return status;
}

Data portable(const Frame& frame) {
  uint64_t bytes = 0;
  memswap_frame_portable(frame.begin, frame.bytes, nullptr, 0, nullptr, 0, &bytes);
  Frame out(bytes);
  const uint32_t status =
      memswap_frame_portable(frame.begin, frame.bytes, nullptr, 0, out.begin, out.bytes, &bytes);
  check(status == frame::kOk, "a frame of the kernels becomes portable");
  return Data(out.begin, out.begin + out.bytes);
}

enum class Pattern { kNormal, kBits, kOutliers, kZeroRuns, kZeros, kSmall, kOffsets, kRare };

Data make(const Format& format, Pattern pattern, uint64_t elements) {
  std::mt19937_64 random(static_cast<uint64_t>(pattern) + 1);
  std::normal_distribution<float> normal;
  const uint32_t width = format.width();
  Data data(elements * width);
  for (uint64_t i = 0; i < elements; ++i) {
    float value = normal(random);
    uint64_t bits = 0;
    if (pattern == Pattern::kZeroRuns) {
      value = i / 3000 % 2 != 0 ? 0.0f : value * 1e-3f;
    }
    switch (format.dtype) {
      case Dtype::kBf16:
        bits = bfloat16_t(value).bits;
        break;
      case Dtype::kFp16:
        bits = half(value).bits;
        break;
      default:
        memcpy(&bits, &value, sizeof(value));
    }
    const uint32_t one_of = pattern == Pattern::kBits       ? 1
                            : pattern == Pattern::kOutliers ? 4
                            : pattern == Pattern::kRare     ? 50
                                                            : 0;
    const bool odd_one = one_of != 0 && random() % one_of == 0;
    bits = odd_one                        ? random()
           : pattern == Pattern::kZeros   ? 0
           : pattern == Pattern::kSmall   ? random() % 2
           : pattern == Pattern::kOffsets ? i / 1024 * 977 - 3000 + random() % (1 + i / 1024 * 37)
                                          : bits;
    memcpy(&data[i * width], &bits, width);
  }
  return data;
}

constexpr Pattern kPatterns[] = {Pattern::kNormal,   Pattern::kBits,  Pattern::kOutliers,
                                 Pattern::kZeroRuns, Pattern::kZeros, Pattern::kSmall,
                                 Pattern::kOffsets,  Pattern::kRare};

std::string describe(const Format& format, Pattern pattern, uint64_t elements) {
  return std::string(format.name) + " pattern " + std::to_string(static_cast<int>(pattern)) +
         " of " + std::to_string(elements);
}

void test_round_trips(const Format& format) {
  for (const uint64_t elements : {uint64_t{1}, uint64_t{1024}, uint64_t{20001}}) {
    for (const Pattern pattern : kPatterns) {
      const std::string what = describe(format, pattern, elements);
      const Data data = make(format, pattern, elements);
      const uint64_t capacity = format.layout(elements).max_var_units();
      const Frame frame = ascend_encode(format, data, capacity, 3, Options());
      check(frame.header().status == frame::kOk, what + ": the worst case is enough");
      Data output(data.size());
      const uint32_t status = cpu_decode(format, frame, &output);
      check(status == frame::kOk && output == data, what + ": the CPU decodes the kernels' frame");
      check(ascend_decode(format, frame, &output, 3, Options()) == frame::kOk && output == data,
            what + ": the kernels decode their own frame");
      const Frame canonical = cpu_encode(format, data, false);
      check(format.shape == Shape::kDense || portable(canonical) == portable(frame),
            what + ": frames of shapes that have no profile are the CPU's, byte by byte");
      const Header from_cpu = canonical.header();
      check(from_cpu.zeros == frame.header().zeros &&
                from_cpu.center_sum == frame.header().center_sum,
            what + ": zeros and center_sum are the CPU's");
      for (const bool fast : {false, true}) {
        const Frame other = cpu_encode(format, data, fast);
        check(ascend_decode(format, other, &output, 3, Options()) == frame::kOk && output == data,
              what + ": the kernels decode the CPU's frame");
      }
    }
  }
}

void test_schedules(const Format& format, uint64_t seeds) {
  const Data data = make(format, Pattern::kNormal, 20001);
  const uint64_t capacity = format.layout(20001).max_var_units();
  Data reference;
  for (const uint32_t blocks : {1u, 3u, 40u, 48u}) {
    for (uint64_t seed = 0; seed < seeds; ++seed) {
      Options options;
      options.seed = seed;
      const Frame frame = ascend_encode(format, data, capacity, blocks, options);
      const Data bytes = portable(frame);
      if (reference.empty()) {
        reference = bytes;
      }
      const std::string what = std::string(format.name) + " on " + std::to_string(blocks) +
                               " blocks, seed " + std::to_string(seed);
      check(bytes == reference, what + ": the portable frame is the same");
      Data output(data.size());
      check(ascend_decode(format, frame, &output, blocks, options) == frame::kOk && output == data,
            what + ": decodes");
    }
  }
}

void test_no_room(const Format& format) {
  const Data data = make(format, Pattern::kBits, 20001);
  for (const uint64_t capacity : {uint64_t{0}, uint64_t{100}}) {
    const Frame frame = ascend_encode(format, data, capacity, 3, Options());
    check(frame.header().status == frame::kNoRoom,
          std::string(format.name) + ": a var that is too small is reported");
  }
}

// Whatever bytes are damaged, the decoder stays within its buffers (the emulator checks) and says
// so, unless nothing changed for the CPU either.
void test_hostile(const Format& format, Pattern pattern, uint32_t rounds, bool verify) {
  const Data data = make(format, pattern, 9000);
  const Frame good = cpu_encode(format, data, false);
  const Layout layout = format.layout(9000);
  const uint64_t used = good.header().var_used * frame::kUnitBytes;
  std::mt19937_64 random(7);
  for (uint32_t round = 0; round < rounds; ++round) {
    Frame frame(good);
    const uint64_t target = round % 3 == 0 ? random() % frame::kHeaderBytes
                            : round % 3 == 1 || frame.bytes == layout.var
                                ? layout.records + random() % (layout.tiles * 32)
                                : layout.var + random() % used;
    frame.begin[target] ^= static_cast<uint8_t>(1 + random() % 255);
    Data output(data.size());
    Data expected(data.size());
    const std::string what =
        std::string(format.name) + ": damage at byte " + std::to_string(target);
    try {
      const uint32_t status = ascend_decode(format, frame, &output, 2, Options(), verify);
      const uint32_t cpu = cpu_decode(format, frame, &expected, verify);
      check((status == 0) == (cpu == 0), what + " is reported as by the CPU, " +
                                             std::to_string(status) + " and " +
                                             std::to_string(cpu));
      check(status != 0 || output == expected, what + " never gives other data than the CPU");
    } catch (const Violation& violation) {
      memory().reset();
      check(false, what + " stays in bounds: " + violation.what());
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const Format formats[] = {
      {"bf16", Dtype::kBf16, Shape::kDense, memswap_ascend_encode_bf16, memswap_ascend_decode_bf16},
      {"fp16", Dtype::kFp16, Shape::kDense, memswap_ascend_encode_fp16, memswap_ascend_decode_fp16},
      {"fp32", Dtype::kFp32, Shape::kDense, memswap_ascend_encode_fp32, memswap_ascend_decode_fp32},
      {"raw8", Dtype::kInt8, Shape::kRaw, memswap_ascend_encode_raw8, memswap_ascend_decode_other8},
      {"raw16", Dtype::kBf16, Shape::kRaw, memswap_ascend_encode_raw16, memswap_ascend_decode_bf16},
      {"raw32", Dtype::kInt32, Shape::kRaw, memswap_ascend_encode_raw32,
       memswap_ascend_decode_other32},
      {"raw64", Dtype::kFp64, Shape::kRaw, memswap_ascend_encode_raw64,
       memswap_ascend_decode_other64},
      {"bits", Dtype::kBool, Shape::kBits, memswap_ascend_encode_bits,
       memswap_ascend_decode_other8},
      {"int8", Dtype::kInt8, Shape::kInts, memswap_ascend_encode_int8,
       memswap_ascend_decode_other8},
      {"uint8", Dtype::kUint8, Shape::kInts, memswap_ascend_encode_uint8,
       memswap_ascend_decode_other8},
      {"int16", Dtype::kInt16, Shape::kInts, memswap_ascend_encode_int16,
       memswap_ascend_decode_other16},
      {"uint16", Dtype::kUint16, Shape::kInts, memswap_ascend_encode_uint16,
       memswap_ascend_decode_other16},
      {"int32", Dtype::kInt32, Shape::kInts, memswap_ascend_encode_int32,
       memswap_ascend_decode_other32},
      {"uint32", Dtype::kUint32, Shape::kInts, memswap_ascend_encode_uint32,
       memswap_ascend_decode_other32},
  };
  const std::string only = argc > 1 ? argv[1] : "";
  for (const Format& format : formats) {
    if (!only.empty() && only != format.name) {
      continue;
    }
    try {
      test_round_trips(format);
      test_schedules(format, format.shape == Shape::kDense ? 20 : 3);
      if (format.shape != Shape::kRaw) {
        test_no_room(format);
      }
      test_hostile(format, Pattern::kOutliers, 20, true);
      test_hostile(format, Pattern::kRare, 20, true);
      // Without checksums, what the streams say is all there is.
      test_hostile(format, Pattern::kRare, 100, false);
    } catch (const Violation& violation) {
      memory().reset();
      check(false, std::string(format.name) + " keeps the rules: " + violation.what());
    }
  }
  std::printf("%d checks, %d failures\n", checks, failures);
  return failures == 0 ? 0 : 1;
}
