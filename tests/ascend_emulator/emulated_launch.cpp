// What CANN generates or provides, on the emulator: the launch functions of kernels/ascend/entries.h
// and the calls of acl/acl.h.
#include "emulated_launch.h"

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>

#include "acl/acl.h"
#include "emulated_machine.h"
#include "kernels.cpp"

namespace ascend_emulator {

Machine& machine() {
  static Machine only;
  return only;
}

namespace {

namespace frame = memswap::frame;
using Spans = std::vector<memswap_emulated_span>;

// A launch on its way: what runs, and the memory that the kernel may touch.
struct Launch {
  std::string kernel;
  uint32_t blocks;
  Spans memory;
  std::function<void()> run;
};

void execute(const Launch& launch) {
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  struct Lent {
    ~Lent() { memory().take_back(); }
  } lent;
  for (const memswap_emulated_span& span : launch.memory) {
    memory().lend(const_cast<void*>(span.begin), span.bytes);
  }
  ascend_emulator::launch(launch.blocks, machine().options, launch.run);
}

// On a stream nobody catches what a broken rule throws.
void execute_or_die(void* context) {
  const Launch& launch = *static_cast<Launch*>(context);
  try {
    execute(launch);
  } catch (const std::exception& broken) {
    std::fprintf(stderr, "%s breaks a rule of the device: %s\n", launch.kernel.c_str(),
                 broken.what());
    std::abort();
  }
}

uint32_t start(const char* kernel, uint32_t blocks, void* stream, const Spans& known, Spans memory,
               std::function<void()> run) {
  if (const int error = machine().fail(kernel); error != 0) {
    return static_cast<uint32_t>(error);
  }
  machine().launches.push_back({kernel, blocks});
  auto launch = std::make_unique<Launch>(Launch{kernel, blocks, std::move(memory), std::move(run)});
  if (machine().stream == nullptr) {
    execute(*launch);
    return 0;
  }
  return static_cast<uint32_t>(machine().stream(
      stream, kernel, known.data(), known.size(), &execute_or_die,
      [](void* context) { delete static_cast<Launch*>(context); }, launch.release()));
}

Spans& add(Spans& spans, const void* begin, uint64_t bytes, int write) {
  if (begin != nullptr && bytes != 0) {
    spans.push_back({begin, bytes, write});
  }
  return spans;
}

void encode_spans(Spans* known, Spans* memory, const std::string& kernel,
                  MEMSWAP_ASCEND_ENCODE_PARAMETERS(void*)) {
  (void)slab_bytes;
  (void)checksum;
  const frame::Layout layout = frame::layout_of(static_cast<frame::Dtype>(dtype),
                                                static_cast<frame::Shape>(shape), elements);
  const uint64_t frame_bytes = layout.bytes(var_capacity);
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
}  // namespace ascend_emulator

extern "C" void memswap_ascend_emulate(memswap_emulated_stream on, uint32_t cores) {
  ascend_emulator::machine().stream = on;
  ascend_emulator::machine().cores = cores;
}

extern "C" aclError aclrtGetDevice(int32_t* device) {
  *device = 0;
  return ascend_emulator::machine().fail("aclrtGetDevice");
}

extern "C" aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo info, int64_t* value) {
  *value = info == ACL_DEVICE_INFO_VECTOR_CORE_NUM ? ascend_emulator::machine().cores : 0;
  return ascend_emulator::machine().fail("aclGetDeviceCapability");
}

// The kernels' pointers are bytes.
#define U8(pointer) static_cast<uint8_t*>(pointer)

#define MEMSWAP_DEFINE_ENCODE(name)                                                              \
  extern "C" MEMSWAP_ASCEND_ENCODE_STUB(name) {                                                  \
    ascend_emulator::Spans known, spans;                                                         \
    ascend_emulator::encode_spans(&known, &spans, #name, MEMSWAP_ASCEND_ENCODE_ARGUMENTS);       \
    return ascend_emulator::start(#name, blocks, stream, known, spans, [=] {                     \
      memswap::ascend::memswap_ascend_##name(U8(input), U8(frame), U8(overflow),                 \
                                             U8(overflow_cursor), elements, var_capacity,        \
                                             overflow_capacity, dtype, shape, slab_bytes,        \
                                             checksum, pass);                                    \
    });                                                                                          \
  }
MEMSWAP_DEFINE_ENCODE(begin_frame)
MEMSWAP_DEFINE_ENCODE(place_deferred)
#define MEMSWAP_DEFINE(name, coder) MEMSWAP_DEFINE_ENCODE(encode_##name)
MEMSWAP_ASCEND_ENCODERS(MEMSWAP_DEFINE)
#undef MEMSWAP_DEFINE

#define MEMSWAP_DEFINE(name, width, split)                                                     \
  extern "C" MEMSWAP_ASCEND_DECODE_STUB(name) {                                                \
    ascend_emulator::Spans known, spans;                                                       \
    ascend_emulator::decode_spans(&known, &spans, MEMSWAP_ASCEND_DECODE_ARGUMENTS);            \
    return ascend_emulator::start("decode_" #name, blocks, stream, known, spans, [=] {         \
      memswap::ascend::memswap_ascend_decode_##name(U8(frame), U8(output), U8(status),         \
                                                    U8(overflow), overflow_capacity,           \
                                                    frame_bytes, elements, dtype, verify);     \
    });                                                                                        \
  }
MEMSWAP_ASCEND_DECODERS(MEMSWAP_DEFINE)
