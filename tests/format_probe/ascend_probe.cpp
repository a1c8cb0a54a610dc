// The Ascend kernels' lines, on the emulator: <folder of golden frames>.
#include "emulated_machine.h"  // tests/ascend_emulator
#include "probe.h"

namespace {

using memswap::frame::sections_of;

ascend_emulator::GlobalMemory& device() { return ascend_emulator::memory(); }

// What a job points to is copied to the device, and back.
int encode(const memswap_encode_job& job) {
  memswap_encode_job there = job;
  const auto dtype = static_cast<memswap::frame::Dtype>(job.dtype);
  const auto layout = static_cast<memswap::frame::Layout>(job.layout);
  const uint64_t bytes = sections_of(dtype, layout, job.elements).bytes(job.var_capacity);
  const uint64_t arena_bytes = job.overflow_capacity * memswap::frame::kUnitBytes;
  there.input = device().upload(static_cast<const uint8_t*>(job.input),
                                job.elements * memswap::frame::width_of(dtype));
  uint8_t* const frame = device().allocate(bytes);
  device().clear(frame, bytes);
  there.frame = frame;
  uint8_t* arena = nullptr;
  if (job.overflow != nullptr) {
    arena = device().allocate(arena_bytes);
    device().clear(arena, arena_bytes);
    there.overflow = arena;
    there.overflow_cursor = reinterpret_cast<uint64_t*>(
        device().upload(reinterpret_cast<const uint8_t*>(job.overflow_cursor), sizeof(uint64_t)));
  }
  const memswap_launch launch{};
  const int code = memswap_codec_ascend()->encode(&there, &launch);
  memcpy(job.frame, frame, bytes);
  if (arena != nullptr) {
    memcpy(job.overflow, arena, arena_bytes);
  }
  device().reset();
  return code;
}

int decode(const memswap_decode_job& job) {
  memswap_decode_job there = job;
  const uint64_t bytes =
      job.elements * memswap::frame::width_of(static_cast<memswap::frame::Dtype>(job.dtype));
  there.frame = device().upload(static_cast<const uint8_t*>(job.frame), job.frame_bytes);
  uint8_t* const output = device().allocate(bytes);
  uint8_t* const status = device().allocate(sizeof(uint32_t));
  device().clear(output, bytes);
  device().clear(status, sizeof(uint32_t));
  there.output = output;
  there.status = reinterpret_cast<uint32_t*>(status);
  const memswap_launch launch{};
  const int code = memswap_codec_ascend()->decode(&there, &launch);
  memcpy(job.output, output, bytes);
  memcpy(job.status, status, sizeof(uint32_t));
  device().reset();
  return code;
}

}  // namespace

int main(int, char** argv) {
  ascend_emulator::machine().cores = 3;
  memswap::probe::Probe({&encode, &decode}, argv[1]).run();
  return 0;
}
