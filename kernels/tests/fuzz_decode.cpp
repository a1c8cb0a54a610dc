// libFuzzer target: hostile frames into the decoder and into memswap_frame_portable, arbitrary
// tensors through encoder and decoder, in a layout that the input names or that is chosen by
// sample, with every instruction set that there is.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "fuzz_area.h"
#include "fuzz_input.h"
#include "memswap/cpu.h"
#include "memswap/frame.h"
#include "memswap/portable.h"
#include "memswap/sample.h"
#include "patterns.h"
#include "streaming.h"

// Of AddressSanitizer. What is freed soon after it was allocated need not wait long to be used
// again; memory that comes back from the caches is what makes small inputs fast.
extern "C" const char* __asan_default_options() { return "quarantine_size_mb=4"; }

namespace memswap::test {
namespace {

using frame::Dtype;
using frame::Header;
using frame::Layout;
using frame::Sections;

// A caller expects what the frame says; beyond this it would not have come so far. Two tiles, and
// for elements of 8 bytes two chunks.
constexpr uint32_t kMaxElements = frame::kTileElements + 1100;
// Of some inputs, a whole block and another's beginning; of most one block: blocks are alike, and
// each takes as long as a whole one.
constexpr uint32_t kMoreElements = frame::kBlockElements + 80;
constexpr uint32_t kUsualElements = frame::kBlockElements;

// How many elements an input may have. It depends on all of an input's ends, so that what is made
// from a long one is rarely long again: the fuzzer likes whatever runs loops more often.
uint32_t max_elements_of(const uint8_t* data, size_t size) {
  const uint64_t ends = data[size - 1] | uint64_t{data[size / 2]} << 8 | uint64_t{data[1]} << 16;
  const uint64_t dice = splitmix64(size, ends) % 64;
  return dice == 0 ? kMaxElements : dice < 9 ? kMoreElements : kUsualElements;
}

constexpr size_t kMaxTensorBytes = sizeof(uint64_t) * (kMaxElements + frame::kBlockElements);
constexpr size_t kMaxFrameBytes = kMaxTensorBytes + kMaxTensorBytes / 4;
constexpr uint32_t kMaxOffset = 32 * sizeof(uint64_t);
static_assert(kMaxFuzzBytes <= kMaxTensorBytes);
// Nothing is stored around the caches, and add_fuzzer() compiles nothing for it.
static_assert(kMaxTensorBytes < cpu::kLeastStreamingBytes);
static_assert(kFuzzChosenLayout == frame::kLastLayout + 1);

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "fuzz_decode: %s\n", what);
  std::abort();
}

struct FrameBytes {
  uint8_t* frame;
  uint64_t frame_bytes;
  uint8_t* overflow;
  uint64_t overflow_units;
};

struct Elements {
  Dtype dtype;
  uint64_t count;
  uint32_t offset;  // bytes behind a multiple of 128

  uint64_t bytes() const { return count * frame::width_of(dtype); }
};

// What a tensor is to be encoded as.
struct Wish {
  Elements elements;
  Layout layout;
  uint8_t options;
  uint8_t center;
  uint8_t var;
  bool chosen;  // the layout comes from a sample of the elements
};

class Target {
 public:
  Target() {
    for (const char* name : {"scalar", "vector", "avx512"}) {
      if (const memswap_codec* codec = memswap_codec_cpu_with(name)) {
        codecs_.push_back(codec);
      }
    }
  }

  void run(const uint8_t* data, size_t size) {
    switch (data[0] % kFuzzKinds) {
      case kFuzzFrame:
        run_frame(data, size, false);
        break;
      case kFuzzRepaired:
        run_frame(data, size, true);
        break;
      case kFuzzTensor:
        run_tensor(data, size);
        break;
      default:
        run_drawn(data, size);
    }
  }

 private:
  // What a buffer is filled with before it is written: if somebody leaves out a byte that counts,
  // the instruction sets disagree.
  static uint8_t fill_of(size_t codec) { return static_cast<uint8_t>(codec * 0x5b); }

  // 0 if all instruction sets say so; then `*output` is what all of them wrote.
  uint32_t decode_with_all(const FrameBytes& from, const Elements& elements, Area& area,
                           const uint8_t** output) {
    uint32_t first_status = 0;
    for (size_t i = 0; i < codecs_.size(); ++i) {
      Area& here = i == 0 ? area : other_output_;
      uint8_t* decoded = here.use(elements.bytes(), fill_of(i), elements.offset);
      uint32_t status = 0;
      memswap_decode_job job{};
      job.frame = from.frame;
      job.frame_bytes = from.frame_bytes;
      job.overflow = from.overflow;
      job.overflow_capacity = from.overflow_units;
      job.output = decoded;
      job.elements = elements.count;
      job.dtype = static_cast<uint8_t>(elements.dtype);
      job.verify = 1;
      job.status = &status;
      if (codecs_[i]->decode(&job, nullptr) != MEMSWAP_CODEC_OK) {
        fail("decode refused its arguments");
      }
      if (i == 0) {
        first_status = status;
        *output = decoded;
      } else if (status != first_status) {
        fail("instruction sets report different errors");
      } else if (status == frame::kOk && memcmp(decoded, *output, elements.bytes()) != 0) {
        fail("instruction sets decode different elements");
      }
    }
    return first_status;
  }

  static void repair(Header* header, uint64_t frame_bytes, uint64_t overflow_units,
                     uint32_t max_elements) {
    header->magic = frame::kMagic;
    header->version = frame::kVersion;
    header->dtype = static_cast<uint8_t>(1 + header->dtype % frame::kLastDtype);
    const auto dtype = static_cast<Dtype>(header->dtype);
    header->layout = static_cast<uint8_t>(possible_layout(dtype, header->layout));
    header->flags &= frame::kOrdered | frame::kChecked;
    memset(header->reserved, 0, sizeof(header->reserved));
    header->status = frame::kOk;
    header->elements %= max_elements + 1;
    Sections sections =
        frame::sections_of(dtype, static_cast<Layout>(header->layout), header->elements);
    while (sections.var > frame_bytes) {
      header->elements /= 2;
      sections = frame::sections_of(dtype, static_cast<Layout>(header->layout), header->elements);
    }
    header->blocks = sections.blocks;
    header->slab_bytes = sections.slab_bytes;
    header->var_capacity = (frame_bytes - sections.var) / frame::kUnitBytes;
    header->var_used = header->var_capacity;
    header->overflow_used = overflow_units;
  }

  static Layout possible_layout(Dtype dtype, uint8_t wanted) {
    const auto layout = static_cast<Layout>(wanted % (frame::kLastLayout + 1));
    return frame::layout_fits(dtype, layout) ? layout : Layout::kInts;
  }

  void run_frame(const uint8_t* data, size_t size, bool repaired) {
    if (size < kFuzzFrameHeaderBytes) {
      return;
    }
    const size_t rest = size - kFuzzFrameHeaderBytes;
    const uint64_t overflow_units = rest * (data[1] % 8) / 8 / frame::kUnitBytes;
    const uint64_t overflow_bytes = overflow_units * frame::kUnitBytes;
    const uint64_t frame_bytes = rest - overflow_bytes;
    const uint8_t* source = data + kFuzzFrameHeaderBytes;
    const FrameBytes from{frame_.copy(source, frame_bytes), frame_bytes,
                          overflow_.copy(source + frame_bytes, overflow_bytes), overflow_units};
    Header header{};
    memcpy(&header, source, std::min<uint64_t>(frame_bytes, sizeof(header)));
    if (repaired && frame_bytes >= sizeof(header)) {
      repair(&header, frame_bytes, overflow_units, max_elements_of(data, size));
      memcpy(from.frame, &header, sizeof(header));
    }
    const Elements elements{static_cast<Dtype>(frame::is_dtype(header.dtype) ? header.dtype : 1),
                            header.elements < kMaxElements ? header.elements : 1, 0};
    const uint8_t* output = nullptr;
    const uint32_t status = decode_with_all(from, elements, first_output_, &output);
    make_portable(from, elements, status, output);
  }

  void make_portable(const FrameBytes& from, const Elements& elements, uint32_t status,
                     const uint8_t* output) {
    uint64_t needed = 0;
    memswap_frame_portable(from.frame, from.frame_bytes, from.overflow, from.overflow_units,
                           nullptr, 0, &needed);
    if (needed > portable_.capacity()) {
      return;  // tiles may name the same payloads again and again
    }
    const FrameBytes portable{portable_.use(needed, 0), needed, nullptr, 0};
    uint64_t written = 0;
    const uint32_t portable_status =
        memswap_frame_portable(from.frame, from.frame_bytes, from.overflow, from.overflow_units,
                               portable.frame, needed, &written);
    if (status != frame::kOk) {
      return;
    }
    if (portable_status != frame::kOk || written != needed) {
      fail("a frame that decodes has no portable form");
    }
    const uint8_t* again = nullptr;
    if (decode_with_all(portable, elements, again_, &again) != frame::kOk ||
        memcmp(output, again, elements.bytes()) != 0) {
      fail("the portable frame is another tensor");
    }
  }

  // The elements' bytes are not known yet: count is 0.
  static Wish wish_of(const uint8_t* data) {
    const auto dtype =
        static_cast<Dtype>(1 + (data[1] + frame::kLastDtype - 1) % frame::kLastDtype);
    const uint32_t offset = data[3] / kFuzzOffset * frame::width_of(dtype);
    const bool chosen = data[2] % (kFuzzChosenLayout + 1) == kFuzzChosenLayout;
    return {{dtype, 0, offset}, possible_layout(dtype, data[2]), data[3], data[4], data[5], chosen};
  }

  void run_tensor(const uint8_t* data, size_t size) {
    if (size < kFuzzTensorHeaderBytes) {
      return;
    }
    Wish wish = wish_of(data);
    wish.elements.count =
        std::min<uint64_t>((size - kFuzzTensorHeaderBytes) / frame::width_of(wish.elements.dtype),
                           max_elements_of(data, size));
    run_round_trip(wish, input_.copy(data + kFuzzTensorHeaderBytes, wish.elements.bytes(),
                                     wish.elements.offset));
  }

  void run_drawn(const uint8_t* data, size_t size) {
    if (size < kFuzzDrawnHeaderBytes) {
      return;
    }
    Wish wish = wish_of(data);
    const uint32_t width = frame::width_of(wish.elements.dtype);
    const uint8_t* choice = data + kFuzzDrawnHeaderBytes;
    const size_t choices = (size - kFuzzDrawnHeaderBytes) / width;
    if (choices == 0) {
      return;
    }
    const uint32_t count = data[6] | uint32_t{data[7]} << 8;
    wish.elements.count = count % (max_elements_of(data, size) + 1);
    uint8_t* input = input_.use(wish.elements.bytes(), 0, wish.elements.offset);
    // Below a float's sign and exponent.
    const uint64_t noise = (wish.options & kFuzzNoise) == 0 ? 0
                           : width == 1                     ? 3
                                                            : (uint64_t{1} << (8 * width - 9)) - 1;
    for (uint64_t i = 0; i < wish.elements.count; ++i) {
      const uint64_t random = splitmix64(1, i);
      uint64_t element = 0;
      memcpy(&element, choice + ((random >> 32) * choices >> 32) * width, width);
      element ^= random & noise;
      memcpy(input + i * width, &element, width);
    }
    run_round_trip(wish, input);
  }

  void run_round_trip(Wish wish, const uint8_t* input) {
    if (wish.chosen) {
      choose_layout(wish, input);
    }
    const Sections sections =
        frame::sections_of(wish.elements.dtype, wish.layout, wish.elements.count);
    FrameBytes first{};
    for (size_t i = 0; i < codecs_.size(); ++i) {
      const FrameBytes made = encode(i, wish, sections, input, i == 0 ? frame_ : other_frame_,
                                     i == 0 ? overflow_ : other_overflow_);
      if (i == 0) {
        first = made;
      } else {
        expect_same(first, made, sections);
      }
    }
    const uint8_t* output = nullptr;
    if (decode_with_all(first, wish.elements, first_output_, &output) != frame::kOk ||
        memcmp(output, input, wish.elements.bytes()) != 0) {
      fail("a tensor did not come back");
    }
  }

  // Of tensors as short as these every block is sampled, so no other layout may be shorter.
  void choose_layout(Wish& wish, const uint8_t* input) {
    const uint8_t chosen = memswap_choose_layout(
        input, wish.elements.count, static_cast<uint8_t>(wish.elements.dtype), nullptr);
    if (chosen > frame::kLastLayout ||
        !frame::layout_fits(wish.elements.dtype, static_cast<Layout>(chosen))) {
      fail("the chosen layout does not fit the dtype");
    }
    wish.layout = static_cast<Layout>(chosen);
    const uint64_t bytes = canonical_bytes(wish, wish.layout, input);
    for (uint8_t other = 0; other <= frame::kLastLayout; ++other) {
      const auto layout = static_cast<Layout>(other);
      if (other != chosen && frame::layout_fits(wish.elements.dtype, layout) &&
          canonical_bytes(wish, layout, input) < bytes) {
        fail("another layout is shorter than the chosen one");
      }
    }
  }

  // Of the tensor's whole frame in a layout, in the canonical profile that the choice is made for.
  uint64_t canonical_bytes(Wish wish, Layout layout, const uint8_t* input) {
    wish.layout = layout;
    wish.options = 0;
    wish.var = 255;
    const Sections sections = frame::sections_of(wish.elements.dtype, layout, wish.elements.count);
    const FrameBytes made = encode(codecs_.size() - 1, wish, sections, input, frame_, overflow_);
    Header header;
    memcpy(&header, made.frame, sizeof(header));
    if (header.status != frame::kOk || header.overflow_used != 0) {
      fail("the worst case of a layout is longer than its bound");
    }
    return sections.bytes(header.var_used);
  }

  FrameBytes encode(size_t codec, const Wish& wish, const Sections& sections, const uint8_t* input,
                    Area& frame_area, Area& overflow_area) {
    // From none to all of the worst case in var, the rest in an arena.
    const uint64_t var_units = sections.max_var_units() * wish.var / 255;
    const uint64_t arena_units =
        sections.max_var_units() - var_units +
        std::min(sections.blocks, frame::kTileBlocks) * sections.max_payload_units;
    const FrameBytes made{
        frame_area.use(sections.bytes(var_units), fill_of(codec)), sections.bytes(var_units),
        overflow_area.use(arena_units * frame::kUnitBytes, fill_of(codec)), arena_units};
    uint64_t cursor = 0;
    memswap_encode_job job{};
    job.input = input;
    job.elements = wish.elements.count;
    job.dtype = static_cast<uint8_t>(wish.elements.dtype);
    job.layout = static_cast<uint8_t>(wish.layout);
    job.profile = (wish.options & kFuzzFast) != 0 ? MEMSWAP_FAST : MEMSWAP_CANONICAL;
    job.center = wish.center;
    job.checksum = (wish.options & kFuzzChecksum) != 0;
    job.frame = made.frame;
    job.var_capacity = var_units;
    job.overflow = made.overflow;
    job.overflow_capacity = arena_units;
    job.overflow_cursor = &cursor;
    if (codecs_[codec]->encode(&job, nullptr) != MEMSWAP_CODEC_OK) {
      fail("encode refused its arguments");
    }
    return made;
  }

  static void expect_same(const FrameBytes& a, const FrameBytes& b, const Sections& sections) {
    Header header;
    memcpy(&header, a.frame, sizeof(header));
    const uint64_t bytes = sections.bytes(std::min(header.var_used, header.var_capacity));
    if (memcmp(a.frame, b.frame, bytes) != 0) {
      fail("instruction sets write different frames");
    }
    const uint64_t units = std::min(header.overflow_used, a.overflow_units);
    if (memcmp(a.overflow, b.overflow, units * frame::kUnitBytes) != 0) {
      fail("instruction sets write different payloads into the arena");
    }
  }

  std::vector<const memswap_codec*> codecs_;
  Area input_{kMaxTensorBytes + kMaxOffset};
  Area frame_{kMaxFrameBytes};
  Area other_frame_{kMaxFrameBytes};
  Area overflow_{2 * kMaxFrameBytes};
  Area other_overflow_{2 * kMaxFrameBytes};
  Area portable_{4 * kMaxFrameBytes};
  Area first_output_{kMaxTensorBytes + kMaxOffset};
  Area other_output_{kMaxTensorBytes + kMaxOffset};
  Area again_{kMaxTensorBytes};
};

}  // namespace
}  // namespace memswap::test

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace memswap::test;
  static Target target;
  if (size != 0 && size <= kMaxFuzzBytes) {
    target.run(data, size);
  }
  return 0;
}
