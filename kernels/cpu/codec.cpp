// The backend's table, and what a caller may ask of it.
#include "codec.h"

#include <string.h>

#include "memswap/arguments.h"
#include "memswap/cpu.h"

namespace memswap::cpu {

namespace {

// Calls run(launch) if all arguments are possible.
template <typename Job, typename Run>
int checked(const Job* jobs, size_t count, const memswap_launch* launch, Run run) {
  if (!arguments::are_valid(jobs, count)) {
    return MEMSWAP_CODEC_BAD_ARGUMENT;
  }
  return run(launch != nullptr ? *launch : memswap_launch{});
}

template <Isa isa>
int encode(const memswap_encode_job* jobs, size_t count, const memswap_launch* launch) {
  return checked(jobs, count, launch, [&](const memswap_launch& where) {
    return encode_frames(*blocks_of(isa), jobs, count, where);
  });
}

template <Isa isa>
int decode(const memswap_decode_job* jobs, size_t count, const memswap_launch* launch) {
  return checked(jobs, count, launch, [&](const memswap_launch& where) {
    return decode_frames(*blocks_of(isa), jobs, count, where);
  });
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
  if (blocks_of(isa) == nullptr) {
    return nullptr;
  }
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
  struct Name {
    const char* name;
    Isa isa;
  };
  static constexpr Name kNames[] = {
      {"scalar", Isa::kScalar}, {"vector", Isa::kVector}, {"avx512", Isa::kAvx512}};
  for (const Name& known : kNames) {
    if (strcmp(instruction_set, known.name) == 0) {
      return codec_of(known.isa);
    }
  }
  return nullptr;
}

const memswap_codec* memswap_codec_cpu(void) {
  using namespace memswap::cpu;
  static const memswap_codec* const best = codec_of(best_isa());
  return best;
}
