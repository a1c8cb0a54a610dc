// The launch functions of the kernels that decode (kernels/ascend/entries.h), on the emulator.
#include "decoders.cpp"
#include "emulated_machine.h"

namespace ascend_emulator {
namespace {

namespace frame = memswap::frame;

void decode_spans(Spans* known, Spans* memory, MEMSWAP_ASCEND_DECODE_PARAMETERS(void*)) {
  (void)verify;
  const uint64_t bytes = elements * frame::width_of(static_cast<frame::Dtype>(dtype));
  for (Spans* spans : {known, memory}) {
    add(*spans, frame, frame_bytes, 0);
    add(*spans, output, bytes, 1);
  }
  add(*memory, status, sizeof(uint32_t), 1);
  add(*memory, overflow, overflow_capacity * frame::kUnitBytes, 0);
  // The cursor stands before the arena.
  add(*known, static_cast<uint64_t*>(overflow) - (overflow != nullptr ? 1 : 0),
      overflow != nullptr ? sizeof(uint64_t) : 0, 0);
}

}  // namespace

uint32_t decoder_unified_bytes(const std::string& kernel, uint32_t layout) {
  uint32_t bytes = 0;
  const auto visit = [&](auto* reader) {
    bytes = FrameDecoder<std::remove_pointer_t<decltype(reader)>>::kUnifiedBytes - kReportBytes;
  };
#define MEMSWAP_DEFINE(name, width, split)    \
  if (kernel == "decode_" #name) {            \
    with_reader<width, split>(layout, visit); \
  }
  MEMSWAP_ASCEND_DECODERS(MEMSWAP_DEFINE)
#undef MEMSWAP_DEFINE
  return bytes;
}

}  // namespace ascend_emulator

// The kernels' pointers are bytes.
#define U8(pointer) static_cast<uint8_t*>(pointer)

#define MEMSWAP_DEFINE(name, width, split)                                                   \
  extern "C" MEMSWAP_ASCEND_DECODE_STUB(name) {                                              \
    ascend_emulator::Spans known, spans;                                                     \
    ascend_emulator::decode_spans(&known, &spans, MEMSWAP_ASCEND_DECODE_ARGUMENTS);          \
    return ascend_emulator::start("decode_" #name, blocks, stream, known, spans, [=] {       \
      memswap_ascend_decode_##name(U8(frame), U8(output), U8(status), U8(overflow),          \
                                   overflow_capacity, frame_bytes, elements, dtype, verify); \
    });                                                                                      \
  }
MEMSWAP_ASCEND_DECODERS(MEMSWAP_DEFINE)
