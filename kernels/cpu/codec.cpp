// The backend's table, and what a caller may ask of it.
#include "codec.h"

#include <string.h>

#include "memswap/cpu.h"

namespace memswap::cpu {

namespace {

bool is_aligned(const void* pointer, size_t alignment) {
  return reinterpret_cast<uintptr_t>(pointer) % alignment == 0;
}

bool is_area(const void* pointer, size_t alignment) {
  return pointer != nullptr && is_aligned(pointer, alignment);
}

// A NULL tensor is one without elements.
bool are_elements(const void* pointer, uint64_t elements, uint8_t dtype) {
  return is_aligned(pointer, frame::width_of(static_cast<frame::Dtype>(dtype))) &&
         (pointer != nullptr || elements == 0) && elements <= frame::kMaxElements;
}

bool is_valid(const memswap_encode_job& job) {
  if (!frame::is_dtype(job.dtype) || job.shape > frame::kLastShape ||
      !frame::shape_fits(static_cast<frame::Dtype>(job.dtype),
                         static_cast<frame::Shape>(job.shape)) ||
      !are_elements(job.input, job.elements, job.dtype)) {
    return false;
  }
  const bool has_overflow = job.overflow != nullptr;
  return job.profile <= MEMSWAP_FAST && is_area(job.frame, frame::kAlignmentBytes) &&
         job.var_capacity <= UINT64_MAX / frame::kUnitBytes / 2 &&
         has_overflow == (job.overflow_cursor != nullptr) &&
         (!has_overflow || (is_aligned(job.overflow, frame::kUnitBytes) &&
                            is_aligned(job.overflow_cursor, alignof(uint64_t)) &&
                            job.overflow_capacity <= frame::kMaxBaseUnits));
}

bool is_valid(const memswap_decode_job& job) {
  return frame::is_dtype(job.dtype) && are_elements(job.output, job.elements, job.dtype) &&
         is_area(job.frame, frame::kAlignmentBytes) && is_area(job.status, alignof(uint32_t)) &&
         is_aligned(job.overflow, frame::kUnitBytes) &&
         job.overflow_capacity <= frame::kMaxBaseUnits;
}

// Calls run(launch) if all arguments are possible.
template <typename Job, typename Run>
int checked(const Job* jobs, size_t count, const memswap_launch* launch, Run run) {
  if (count != 0 && jobs == nullptr) {
    return MEMSWAP_CODEC_BAD_ARGUMENT;
  }
  for (size_t i = 0; i < count; ++i) {
    if (!is_valid(jobs[i])) {
      return MEMSWAP_CODEC_BAD_ARGUMENT;
    }
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
  switch (code) {
    case MEMSWAP_CODEC_OK:
      return "success";
    case MEMSWAP_CODEC_BAD_ARGUMENT:
      return "bad argument: a pointer is NULL or not aligned (frames to 128 bytes, overflow arenas "
             "to 8, tensors to their elements), the shape does not fit the dtype, a dtype, shape "
             "or "
             "profile is unknown, a size is beyond what a frame can hold, or only one of overflow "
             "and overflow_cursor is given";
    case MEMSWAP_CODEC_NOT_SUPPORTED:
      return "not supported by the CPU codec";
    case kOutOfMemory:
      return "out of host memory for the codec's staging buffers";
    default:
      return "unknown code";
  }
}

template <Isa isa>
const memswap_codec* codec() {
  static constexpr memswap_codec kCodec = {
      MEMSWAP_CODEC_VERSION, "cpu", &encode<isa>, &decode<isa>, &message, 1, 0};
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
