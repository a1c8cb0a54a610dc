// The launch functions of the kernels that encode (kernels/ascend/entries.h), on the emulator.
#include "emulated_machine.h"
#include "encoders.cpp"

namespace ascend_emulator {
namespace {

namespace frame = memswap::frame;

void encode_spans(Spans* known, Spans* memory, const std::string& kernel,
                  MEMSWAP_ASCEND_ENCODE_PARAMETERS(void*)) {
  (void)slab_bytes;
  (void)checksum;
  (void)fast;
  (void)center;
  const frame::Sections sections = frame::sections_of(static_cast<frame::Dtype>(dtype),
                                                      static_cast<frame::Layout>(layout), elements);
  const uint64_t frame_bytes = sections.bytes(var_capacity);
  const bool reads_input = kernel.find("encode_") != std::string::npos;
  add(*memory, input, elements * frame::width_of(static_cast<frame::Dtype>(dtype)), 0);
  add(*memory, frame, frame_bytes, 1);
  add(*memory, overflow, overflow_capacity * frame::kUnitBytes, 1);
  add(*memory, overflow_cursor, overflow_cursor != nullptr ? sizeof(uint64_t) : 0, 1);
  if (reads_input) {
    add(*known, input, elements * frame::width_of(static_cast<frame::Dtype>(dtype)), 0);
  }
  add(*known, frame, frame_bytes, 1);
  // Where in the arena payloads go is not known now. Its cursor, which encoders of one stream move,
  // counts as read: who sets it back is not to overlap with that.
  if (!reads_input || pass != 0) {
    add(*known, overflow_cursor, overflow_cursor != nullptr ? sizeof(uint64_t) : 0, 0);
  }
}

}  // namespace

uint32_t encoder_unified_bytes(const std::string& kernel) {
#define MEMSWAP_DEFINE(name, coder)                             \
  if (kernel == "encode_" #name) {                              \
    return memswap::ascend::FrameEncoder<coder>::kUnifiedBytes; \
  }
  MEMSWAP_ASCEND_ENCODERS(MEMSWAP_DEFINE)
#undef MEMSWAP_DEFINE
  return 0;
}

}  // namespace ascend_emulator

// The kernels' pointers are bytes.
#define U8(pointer) static_cast<uint8_t*>(pointer)

#define MEMSWAP_DEFINE_ENCODE(name)                                                               \
  extern "C" MEMSWAP_ASCEND_ENCODE_STUB(name) {                                                   \
    ascend_emulator::Spans known, spans;                                                          \
    ascend_emulator::encode_spans(&known, &spans, #name, MEMSWAP_ASCEND_ENCODE_ARGUMENTS);        \
    return ascend_emulator::start(#name, blocks, stream, known, spans, [=] {                      \
      memswap_ascend_##name(U8(input), U8(frame), U8(overflow), U8(overflow_cursor), elements,    \
                            var_capacity, overflow_capacity, dtype, layout, slab_bytes, checksum, \
                            fast, center, pass);                                                  \
    });                                                                                           \
  }
MEMSWAP_DEFINE_ENCODE(begin_frame)
MEMSWAP_DEFINE_ENCODE(place_tiles)
#define MEMSWAP_DEFINE(name, coder) MEMSWAP_DEFINE_ENCODE(encode_##name)
MEMSWAP_ASCEND_ENCODERS(MEMSWAP_DEFINE)
#undef MEMSWAP_DEFINE
