// What a launch is given: a table of jobs in the kernel's parameters, so that many small tensors
// share a launch and nothing has to be copied to the device.
#pragma once

#include <stdint.h>

#include "memswap/frame.h"

namespace memswap::cuda {

// Both tables stay below the 4 KiB of parameters that every device takes.
inline constexpr uint32_t kTableJobs = 60;

// Whether rows of a tensor can be moved 16 bytes at a time.
inline constexpr uint64_t kVectorBytes = 16;

struct EncodeJob {
  const uint8_t* input;
  uint8_t* frame;
  uint8_t* overflow;  // may be null
  unsigned long long* overflow_cursor;
  uint64_t elements;
  uint64_t var_capacity;       // units
  uint32_t overflow_capacity;  // units
  uint32_t first_tile;         // among the tiles of the table
  uint8_t dtype;
  uint8_t shape;
  uint8_t fast;
  uint8_t center;
  uint8_t checked;
};

struct DecodeJob {
  const uint8_t* frame;
  const uint8_t* overflow;  // may be null
  uint8_t* output;
  uint32_t* status;
  uint64_t frame_bytes;
  uint64_t elements;
  uint32_t overflow_capacity;  // units
  uint32_t first_tile;
  uint8_t dtype;
  uint8_t verify;
  uint8_t is_alone;     // no other kernel looks at this frame, and
  uint32_t slab_bytes;  // it is expected to have such slabs
};

// [Note: counters] What an encode counts in a frame's header has to be 0 before the first tile adds
// to it, and thread blocks start in no order. So it is counted elsewhere, in the caller's
// workspace, which is 0 before and after each launch: the thread block that finishes a frame's last
// tile makes the header of it and clears it. A slot of the workspace looks like a header whose
// constant part is 0, but for `blocks`, which counts finished tiles.
struct EncodeSlot {
  frame::Header header;
};

template <class Job>
struct Table {
  Job jobs[kTableJobs];
  EncodeSlot* workspace;  // encode: a slot for each job; null: headers are written beforehand
  uint32_t count;
  uint32_t tiles;  // of all jobs

  MEMSWAP_HOST_DEVICE uint32_t end(uint32_t job) const {
    return job + 1 < count ? jobs[job + 1].first_tile : tiles;
  }
};
using EncodeTable = Table<EncodeJob>;
using DecodeTable = Table<DecodeJob>;
static_assert(sizeof(EncodeTable) <= 4096 && sizeof(DecodeTable) <= 4096);

// A kernel that codes tiles, and what it needs of a thread block for each tile.
template <class Job>
struct Kernel {
  void (*function)(Table<Job>);
  uint32_t shared_bytes;
};
using EncodeKernel = Kernel<EncodeJob>;
using DecodeKernel = Kernel<DecodeJob>;

inline constexpr uint64_t kWorkspaceBytes = kTableJobs * sizeof(EncodeSlot);

// Of compute capability 8.0 and up, 8.6 and 8.9 have the least shared memory for a thread block.
inline constexpr uint32_t kLeastSharedBytes = 99 * 1024;

// The kernels are spread over translation units, so that these compile at the same time. `function`
// is null where there is no such kernel.
EncodeKernel dense_encode_kernel(frame::Dtype dtype, frame::Shape shape);
EncodeKernel sparse_encode_kernel(frame::Dtype dtype);
EncodeKernel other_encode_kernel(frame::Dtype dtype, frame::Shape shape);
DecodeKernel float_decode_kernel(frame::Dtype dtype);
DecodeKernel sparse_decode_kernel(frame::Dtype dtype);
DecodeKernel other_decode_kernel(frame::Dtype dtype);

}  // namespace memswap::cuda
