// Encoding and decoding for tests: buffers with guards, one call per frame.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "memswap/codec.h"
#include "memswap/cpu.h"
#include "memswap/frame.h"
#include "patterns.h"

// Where the compiler brings it; it does nothing where AddressSanitizer is off.
#if __has_include(<sanitizer/asan_interface.h>)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, bytes) ((void)(address), (void)(bytes))
#endif

namespace memswap::test {

using frame::Dtype;
using frame::Header;
using frame::Layout;
using frame::Record;
using frame::Sections;

// Bytes between two guards. The first one is aligned to 128 bytes plus `offset`. Under
// AddressSanitizer, reading a guard is an error as well.
class GuardedBuffer {
 public:
  explicit GuardedBuffer(uint64_t bytes = 0, uint32_t offset = 0)
      : bytes_(bytes), offset_(offset), memory_(allocate(bytes + offset)) {
    memset(memory_.get(), kFill, kGuard + offset + bytes + kGuard);
    ASAN_POISON_MEMORY_REGION(memory_.get(), kGuard + offset);
    ASAN_POISON_MEMORY_REGION(data() + bytes, kGuard);
  }

  uint8_t* data() { return memory_.get() + kGuard + offset_; }
  const uint8_t* data() const { return memory_.get() + kGuard + offset_; }
  uint64_t size() const { return bytes_; }

  __attribute__((no_sanitize("address"))) bool guards_are_whole() const {
    const uint8_t* const before = memory_.get();
    const uint8_t* const behind = data() + bytes_;
    bool whole = true;
    for (uint64_t i = 0; i < kGuard + offset_; ++i) {
      whole &= before[i] == kFill;
    }
    for (uint64_t i = 0; i < kGuard; ++i) {
      whole &= behind[i] == kFill;
    }
    return whole;
  }

  bool operator==(const GuardedBuffer& other) const {
    return bytes_ == other.bytes_ && memcmp(data(), other.data(), bytes_) == 0;
  }

 private:
  static constexpr uint64_t kGuard = 256;
  static constexpr uint8_t kFill = 0xa5;

  struct Free {
    void operator()(uint8_t* memory) const { std::free(memory); }
  };

  static uint8_t* allocate(uint64_t bytes) {
    const uint64_t size = (bytes + 2 * kGuard + 127) / 128 * 128;
    return static_cast<uint8_t*>(std::aligned_alloc(128, size));
  }

  uint64_t bytes_;
  uint32_t offset_;
  std::unique_ptr<uint8_t, Free> memory_;
};

// Elements at an address that is aligned to their width, and no further if not wanted.
struct Tensor {
  Tensor(Dtype dtype, uint64_t elements, bool aligned = false)
      : dtype(dtype),
        elements(elements),
        buffer(elements * frame::width_of(dtype), aligned ? 0 : frame::width_of(dtype)) {}
  Tensor(Pattern pattern, Dtype dtype, uint64_t seed, uint64_t elements) : Tensor(dtype, elements) {
    fill(pattern, dtype, seed, 0, elements, buffer.data());
  }

  Dtype dtype;
  uint64_t elements;
  GuardedBuffer buffer;
};

struct EncodeOptions {
  Layout layout = Layout::kDense;
  bool fast = false;
  uint8_t center = 0;
  bool checksum = true;
  std::optional<uint64_t> var_capacity = {};  // units; the worst case if not given
  uint64_t overflow_capacity = 0;             // units
  memswap_launch launch = {};
};

struct Frame {
  GuardedBuffer bytes;
  GuardedBuffer overflow;
  uint64_t overflow_cursor = 0;

  Header header() const {
    Header header;
    memcpy(&header, bytes.data(), sizeof(header));
    return header;
  }
  Sections sections() const {
    const Header from = header();
    return frame::sections_of(static_cast<Dtype>(from.dtype), static_cast<Layout>(from.layout),
                              from.elements);
  }
  Record record(uint32_t tile) const {
    Record record;
    memcpy(&record, bytes.data() + sections().records + uint64_t{tile} * sizeof(record),
           sizeof(record));
    return record;
  }
};

inline memswap_encode_job encode_job(const Tensor& tensor, const EncodeOptions& options,
                                     Frame* frame) {
  const Sections sections = frame::sections_of(tensor.dtype, options.layout, tensor.elements);
  const uint64_t capacity = options.var_capacity.value_or(sections.max_var_units());
  frame->bytes = GuardedBuffer(sections.bytes(capacity));
  frame->overflow = GuardedBuffer(options.overflow_capacity * frame::kUnitBytes);
  memswap_encode_job job{};
  job.input = tensor.buffer.data();
  job.elements = tensor.elements;
  job.dtype = static_cast<uint8_t>(tensor.dtype);
  job.layout = static_cast<uint8_t>(options.layout);
  job.profile = options.fast ? MEMSWAP_FAST : MEMSWAP_CANONICAL;
  job.center = options.center;
  job.checksum = options.checksum;
  job.frame = frame->bytes.data();
  job.var_capacity = capacity;
  if (options.overflow_capacity != 0) {
    job.overflow = frame->overflow.data();
    job.overflow_capacity = options.overflow_capacity;
    job.overflow_cursor = &frame->overflow_cursor;
  }
  return job;
}

inline Frame encode(const memswap_codec& codec, const Tensor& tensor,
                    const EncodeOptions& options) {
  Frame frame;
  const memswap_encode_job job = encode_job(tensor, options, &frame);
  EXPECT_EQ(codec.encode(&job, &options.launch), MEMSWAP_CODEC_OK);
  EXPECT_TRUE(frame.bytes.guards_are_whole()) << "the encoder wrote outside the frame";
  EXPECT_TRUE(frame.overflow.guards_are_whole()) << "the encoder wrote outside the arena";
  return frame;
}

inline memswap_decode_job decode_job(const Frame& frame, Tensor* output, uint32_t* status) {
  memswap_decode_job job{};
  job.frame = frame.bytes.data();
  job.frame_bytes = frame.bytes.size();
  if (frame.overflow.size() != 0) {
    job.overflow = frame.overflow.data();
    job.overflow_capacity = frame.overflow.size() / frame::kUnitBytes;
  }
  job.output = output->buffer.data();
  job.elements = output->elements;
  job.dtype = static_cast<uint8_t>(output->dtype);
  job.verify = 1;
  job.status = status;
  return job;
}

// Status bits; the output's guards are checked.
inline uint32_t decode(const memswap_codec& codec, const Frame& frame, Tensor* output,
                       memswap_launch launch = {}) {
  uint32_t status = 0;
  const memswap_decode_job job = decode_job(frame, output, &status);
  EXPECT_EQ(codec.decode(&job, &launch), MEMSWAP_CODEC_OK);
  EXPECT_TRUE(output->buffer.guards_are_whole()) << "the decoder wrote outside the tensor";
  return status;
}

inline void expect_round_trip(const memswap_codec& codec, const Frame& frame, const Tensor& tensor,
                              bool aligned = false) {
  Tensor output(tensor.dtype, tensor.elements, aligned);
  ASSERT_EQ(decode(codec, frame, &output), frame::kOk);
  ASSERT_TRUE(output.buffer == tensor.buffer) << "the decoded tensor is another one";
}

inline std::vector<Dtype> all_dtypes() {
  std::vector<Dtype> dtypes;
  for (uint8_t dtype = 1; dtype <= frame::kLastDtype; ++dtype) {
    dtypes.push_back(static_cast<Dtype>(dtype));
  }
  return dtypes;
}

inline std::vector<Layout> layouts_of(Dtype dtype) {
  std::vector<Layout> layouts;
  for (uint8_t layout = 0; layout <= frame::kLastLayout; ++layout) {
    if (frame::layout_fits(dtype, static_cast<Layout>(layout))) {
      layouts.push_back(static_cast<Layout>(layout));
    }
  }
  return layouts;
}

inline bool has_profiles(Layout layout) {
  return layout == Layout::kDense || layout == Layout::kUpcast;
}

inline std::string describe(Dtype dtype, Layout layout) {
  return "dtype " + std::to_string(static_cast<int>(dtype)) + " layout " +
         std::to_string(static_cast<int>(layout));
}

inline std::string describe(Pattern pattern) {
  return "pattern " + std::to_string(static_cast<int>(pattern.kind)) + "/" +
         std::to_string(pattern.parameter);
}

// A test per instruction set that this build and this processor have.
class CpuCodecTest : public testing::TestWithParam<const char*> {
 protected:
  const memswap_codec& codec() const { return *memswap_codec_cpu_with(GetParam()); }
  const memswap_codec& scalar() const { return *memswap_codec_cpu_with("scalar"); }
};

inline std::vector<const char*> available_instruction_sets() {
  std::vector<const char*> names;
  for (const char* name : {"scalar", "vector", "avx512"}) {
    if (memswap_codec_cpu_with(name) != nullptr) {
      names.push_back(name);
    }
  }
  return names;
}

#define MEMSWAP_FOR_EACH_INSTRUCTION_SET(suite)                                         \
  INSTANTIATE_TEST_SUITE_P(Cpu, suite, testing::ValuesIn(available_instruction_sets()), \
                           [](const auto& info) { return std::string(info.param); })

}  // namespace memswap::test
