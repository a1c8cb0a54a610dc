// The backend's table, and what a caller may ask of it.
#include "codec.h"

#include <string.h>

#include <initializer_list>

#include "memswap/arguments.h"
#include "memswap/cpu.h"

namespace memswap::cpu {

namespace {

memswap_launch launch_of(const memswap_launch* launch) {
  return launch != nullptr ? *launch : memswap_launch{};
}

template <Isa isa>
int encode(const memswap_encode_job* job, const memswap_launch* launch) {
  return arguments::is_valid(job) ? encode_frame(*blocks_of(isa), *job, launch_of(launch))
                                  : MEMSWAP_CODEC_BAD_ARGUMENT;
}

template <Isa isa>
int decode(const memswap_decode_job* job, const memswap_launch* launch) {
  return arguments::is_valid(job) ? decode_frame(*blocks_of(isa), *job, launch_of(launch))
                                  : MEMSWAP_CODEC_BAD_ARGUMENT;
}

const char* message(int code) {
  if (const char* shared = arguments::message_of(code)) {
    return shared;
  }
  return code == kOutOfMemory ? "out of host memory for the codec's staging buffers"
                              : "unknown code";
}

template <Isa isa>
const memswap_codec* codec() {
  static constexpr memswap_codec kCodec = {
      MEMSWAP_CODEC_VERSION, "cpu", &encode<isa>, &decode<isa>, &message, 1, 0, 0, 0, 1};
  return &kCodec;
}

const memswap_codec* codec_of(Isa isa) {
  switch (isa) {
    case Isa::kScalar:
      return codec<Isa::kScalar>();
    case Isa::kVector:
      return codec<Isa::kVector>();
    case Isa::kAvx512:
      return codec<Isa::kAvx512>();
  }
  return nullptr;
}

}  // namespace

}  // namespace memswap::cpu

const memswap_codec* memswap_codec_cpu_with(const char* instruction_set) {
  using namespace memswap::cpu;
  for (const Isa isa : {Isa::kScalar, Isa::kVector, Isa::kAvx512}) {
    const BlockCodec* const blocks = blocks_of(isa);
    if (blocks != nullptr && strcmp(blocks->name, instruction_set) == 0) {
      return codec_of(isa);
    }
  }
  return nullptr;
}

const memswap_codec* memswap_codec_cpu(void) {
  using namespace memswap::cpu;
  static const memswap_codec* const best = codec_of(best_isa());
  return best;
}
