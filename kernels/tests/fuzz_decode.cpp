// libFuzzer target: hostile frames into the decoder and into memswap_frame_portable, arbitrary
// tensors through encoder and decoder, with every instruction set that there is. Buffers are heap
// blocks of exactly their size, so that AddressSanitizer sees each byte outside.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "fuzz_input.h"
#include "memswap/cpu.h"
#include "memswap/frame.h"
#include "memswap/portable.h"

namespace memswap::test {
namespace {

using frame::Dtype;
using frame::Header;
using frame::Layout;
using frame::Shape;

// A caller expects what the frame says; beyond this it would not have come so far.
constexpr uint64_t kMaxFuzzElements = 40000;

struct Free {
  void operator()(uint8_t* memory) const { std::free(memory); }
};
using Buffer = std::unique_ptr<uint8_t, Free>;

Buffer make_buffer(size_t bytes) {
  void* memory = nullptr;
  if (posix_memalign(&memory, frame::kAlignmentBytes, bytes) != 0) {
    std::abort();
  }
  return Buffer(static_cast<uint8_t*>(memory));
}

Buffer copy_of(const uint8_t* data, size_t bytes) {
  Buffer buffer = make_buffer(bytes);
  if (bytes != 0) {
    std::memcpy(buffer.get(), data, bytes);
  }
  return buffer;
}

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "fuzz_decode: %s\n", what);
  std::abort();
}

std::vector<const memswap_codec*> codecs() {
  std::vector<const memswap_codec*> found;
  for (const char* name : {"scalar", "vector", "avx512"}) {
    if (const memswap_codec* codec = memswap_codec_cpu_with(name)) {
      found.push_back(codec);
    }
  }
  return found;
}

struct FrameBytes {
  Buffer frame;
  uint64_t frame_bytes;
  Buffer overflow;
  uint64_t overflow_units;
};

// 0 if all instruction sets say so, and then with the same elements in `output`.
uint32_t decode_with_all(const FrameBytes& bytes, Dtype dtype, uint64_t elements, bool verify,
                         Buffer* output) {
  const uint64_t output_bytes = elements * frame::width_of(dtype);
  uint32_t first_status = 0;
  for (const memswap_codec* codec : codecs()) {
    Buffer decoded = make_buffer(output_bytes);
    std::memset(decoded.get(), 0, output_bytes);
    uint32_t status = 0;
    memswap_decode_job job{};
    job.frame = bytes.frame.get();
    job.frame_bytes = bytes.frame_bytes;
    job.overflow = bytes.overflow.get();
    job.overflow_capacity = bytes.overflow_units;
    job.output = decoded.get();
    job.elements = elements;
    job.dtype = static_cast<uint8_t>(dtype);
    job.verify = verify;
    job.status = &status;
    if (codec->decode(&job, 1, nullptr) != MEMSWAP_CODEC_OK) {
      fail("decode refused its arguments");
    }
    if (*output == nullptr) {
      first_status = status;
      *output = std::move(decoded);
    } else if (status != first_status) {
      fail("instruction sets report different errors");
    } else if (status == frame::kOk &&
               std::memcmp(decoded.get(), output->get(), output_bytes) != 0) {
      fail("instruction sets decode different elements");
    }
  }
  return first_status;
}

void repair(Header* header, uint64_t frame_bytes, uint64_t overflow_units) {
  header->magic = frame::kMagic;
  header->version = frame::kVersion;
  header->dtype = static_cast<uint8_t>(1 + header->dtype % frame::kLastDtype);
  header->shape %= frame::kLastShape + 1;
  const auto dtype = static_cast<Dtype>(header->dtype);
  if (!frame::shape_fits(dtype, static_cast<Shape>(header->shape))) {
    header->shape = static_cast<uint8_t>(Shape::kInts);
  }
  header->flags &= frame::kOrdered | frame::kChecked;
  std::memset(header->reserved, 0, sizeof(header->reserved));
  header->status = frame::kOk;
  header->elements %= kMaxFuzzElements;
  Layout layout = frame::layout_of(dtype, static_cast<Shape>(header->shape), header->elements);
  while (layout.var > frame_bytes) {
    header->elements /= 2;
    layout = frame::layout_of(dtype, static_cast<Shape>(header->shape), header->elements);
  }
  header->blocks = layout.blocks;
  header->slab_bytes = layout.slab_bytes;
  header->var_capacity = (frame_bytes - layout.var) / frame::kUnitBytes;
  header->var_used = header->var_capacity;
  header->overflow_used = overflow_units;
}

void fuzz_frame(const uint8_t* data, size_t size, bool repaired) {
  if (size < kFuzzFrameHeaderBytes) {
    return;
  }
  const size_t rest = size - kFuzzFrameHeaderBytes;
  const uint64_t overflow_units = rest * (data[1] % 8) / 8 / frame::kUnitBytes;
  const uint64_t frame_bytes = rest - overflow_units * frame::kUnitBytes;
  const uint8_t* source = data + kFuzzFrameHeaderBytes;
  FrameBytes bytes{copy_of(source, frame_bytes), frame_bytes,
                   copy_of(source + frame_bytes, overflow_units * frame::kUnitBytes),
                   overflow_units};
  Header header{};
  std::memcpy(&header, source, frame_bytes < sizeof(header) ? frame_bytes : sizeof(header));
  if (repaired && frame_bytes >= sizeof(header)) {
    repair(&header, frame_bytes, overflow_units);
    std::memcpy(bytes.frame.get(), &header, sizeof(header));
  }

  const auto dtype = static_cast<Dtype>(frame::is_dtype(header.dtype) ? header.dtype : 1);
  const uint64_t elements = header.elements < kMaxFuzzElements ? header.elements : 1;
  Buffer output;
  const uint32_t status = decode_with_all(bytes, dtype, elements, true, &output);

  uint64_t needed = 0;
  memswap_frame_portable(bytes.frame.get(), frame_bytes, bytes.overflow.get(), overflow_units,
                         nullptr, 0, &needed);
  if (needed > (uint64_t{1} << 24)) {
    return;  // tiles may name the same payloads again and again
  }
  FrameBytes portable{make_buffer(needed), needed, Buffer(), 0};
  uint64_t written = 0;
  const uint32_t portable_status =
      memswap_frame_portable(bytes.frame.get(), frame_bytes, bytes.overflow.get(), overflow_units,
                             portable.frame.get(), needed, &written);
  if (status != frame::kOk) {
    return;
  }
  if (portable_status != frame::kOk || written != needed) {
    fail("a frame that decodes has no portable form");
  }
  Buffer again;
  if (decode_with_all(portable, dtype, elements, true, &again) != frame::kOk ||
      std::memcmp(output.get(), again.get(), elements * frame::width_of(dtype)) != 0) {
    fail("the portable frame is another tensor");
  }
}

void fuzz_tensor(const uint8_t* data, size_t size) {
  if (size < kFuzzTensorHeaderBytes) {
    return;
  }
  const auto dtype = static_cast<Dtype>(1 + (data[1] + frame::kLastDtype - 1) % frame::kLastDtype);
  auto shape = static_cast<Shape>(data[2] % (frame::kLastShape + 1));
  if (!frame::shape_fits(dtype, shape)) {
    shape = Shape::kInts;
  }
  const uint64_t elements = (size - kFuzzTensorHeaderBytes) / frame::width_of(dtype);
  const uint64_t input_bytes = elements * frame::width_of(dtype);
  const Buffer input = copy_of(data + kFuzzTensorHeaderBytes, input_bytes);
  const Layout layout = frame::layout_of(dtype, shape, elements);
  // From none to all of the worst case in var, the rest in an arena.
  const uint64_t var_units = layout.max_var_units() * data[5] / 255;
  const uint64_t arena_units =
      layout.max_var_units() - var_units + frame::kTileBlocks * layout.max_payload_units;

  Buffer first;
  for (const memswap_codec* codec : codecs()) {
    FrameBytes bytes{make_buffer(layout.bytes(var_units)), layout.bytes(var_units),
                     make_buffer(arena_units * frame::kUnitBytes), arena_units};
    std::memset(bytes.frame.get(), 0, bytes.frame_bytes);
    uint64_t cursor = 0;
    memswap_encode_job job{};
    job.input = input.get();
    job.elements = elements;
    job.dtype = static_cast<uint8_t>(dtype);
    job.shape = static_cast<uint8_t>(shape);
    job.profile = data[3] & 1;
    job.center = data[4];
    job.checksum = data[3] >> 1 & 1;
    job.frame = bytes.frame.get();
    job.var_capacity = var_units;
    job.overflow = bytes.overflow.get();
    job.overflow_capacity = arena_units;
    job.overflow_cursor = &cursor;
    if (codec->encode(&job, 1, nullptr) != MEMSWAP_CODEC_OK) {
      fail("encode refused its arguments");
    }
    Buffer output;
    if (decode_with_all(bytes, dtype, elements, true, &output) != frame::kOk ||
        std::memcmp(output.get(), input.get(), input_bytes) != 0) {
      fail("a tensor did not come back");
    }
    if (first == nullptr) {
      first = std::move(bytes.frame);
    } else if (std::memcmp(first.get(), bytes.frame.get(), bytes.frame_bytes) != 0) {
      fail("instruction sets write different frames");
    }
  }
}

}  // namespace
}  // namespace memswap::test

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace memswap::test;
  if (size == 0) {
    return 0;
  }
  switch (data[0] % kFuzzKinds) {
    case kFuzzFrame:
      fuzz_frame(data, size, false);
      break;
    case kFuzzRepaired:
      fuzz_frame(data, size, true);
      break;
    default:
      fuzz_tensor(data, size);
  }
  return 0;
}
