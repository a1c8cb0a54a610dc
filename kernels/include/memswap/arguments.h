// Which arguments of the C table are possible: what every backend checks before it starts anything,
// and what it says of those that are not.
#pragma once

#include <cstddef>
#include <cstdint>

#include "memswap/codec.h"
#include "memswap/frame.h"

namespace memswap::arguments {

// What a backend's `message` says of the codes that all share; NULL of any other.
inline const char* message_of(int code) {
  switch (code) {
    case MEMSWAP_CODEC_OK:
      return "success";
    case MEMSWAP_CODEC_BAD_ARGUMENT:
      return "bad argument: there is no job, a pointer is NULL or not aligned (frames to 128 "
             "bytes, overflow arenas "
             "to 8, tensors to their elements), the layout does not fit the dtype, a dtype, layout "
             "or profile is unknown, a size is beyond what a frame can hold, or only one of "
             "overflow and overflow_cursor is given";
    case MEMSWAP_CODEC_NOT_SUPPORTED:
      return "a tensor of more elements than this backend counts (Ascend: 2**32 and more)";
    default:
      return nullptr;
  }
}

inline bool is_aligned(const void* pointer, uint64_t alignment) {
  return reinterpret_cast<uintptr_t>(pointer) % alignment == 0;
}

inline bool is_area(const void* pointer, uint64_t alignment) {
  return pointer != nullptr && is_aligned(pointer, alignment);
}

// A tensor without elements may be null.
inline bool is_tensor(const void* pointer, uint64_t elements, uint8_t dtype) {
  return elements <= frame::kMaxElements && (pointer != nullptr || elements == 0) &&
         is_aligned(pointer, frame::width_of(static_cast<frame::Dtype>(dtype)));
}

inline bool is_valid(const memswap_encode_job& job) {
  const bool has_overflow = job.overflow != nullptr;
  return frame::is_dtype(job.dtype) && job.layout <= frame::kLastLayout &&
         frame::layout_fits(static_cast<frame::Dtype>(job.dtype),
                            static_cast<frame::Layout>(job.layout)) &&
         is_tensor(job.input, job.elements, job.dtype) && job.profile <= MEMSWAP_FAST &&
         is_area(job.frame, frame::kAlignmentBytes) &&
         job.var_capacity <= UINT64_MAX / frame::kUnitBytes / 2 &&
         has_overflow == (job.overflow_cursor != nullptr) &&
         is_aligned(job.report, sizeof(uint32_t)) &&
         (!has_overflow || (is_aligned(job.overflow, frame::kUnitBytes) &&
                            is_aligned(job.overflow_cursor, alignof(uint64_t)) &&
                            job.overflow_capacity <= frame::kMaxBaseUnits));
}

inline bool is_valid(const memswap_decode_job& job) {
  return frame::is_dtype(job.dtype) && is_tensor(job.output, job.elements, job.dtype) &&
         is_area(job.frame, frame::kAlignmentBytes) && is_area(job.status, alignof(uint32_t)) &&
         is_aligned(job.overflow, frame::kUnitBytes) &&
         job.overflow_capacity <= frame::kMaxBaseUnits && job.layout_hint <= frame::kLastLayout + 1;
}

// Whether a call may start: there is a job, and it is possible.
template <class Job>
bool is_valid(const Job* job) {
  return job != nullptr && is_valid(*job);
}

}  // namespace memswap::arguments
