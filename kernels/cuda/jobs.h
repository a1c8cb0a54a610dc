// What a launch is given: one tensor, in the kernel's parameters, so that nothing has to be copied
// to the device.
#pragma once

#include <stdint.h>

#include <array>
#include <atomic>

#include "memswap/frame.h"

namespace memswap::cuda {

// [Note: counters] What an encode counts in a frame's header has to be 0 before the first tile adds
// to it, and thread blocks start in no order. So it is counted elsewhere, in the caller's
// workspace, which is 0 before and after each launch: the thread block that finishes a frame's last
// tile makes the header of it and clears it. The workspace looks like a header whose constant part
// is 0, but for `blocks`, which counts finished tiles.
inline constexpr uint64_t kWorkspaceBytes = frame::kHeaderBytes;

struct EncodeJob {
  const uint8_t* input;
  uint8_t* frame;
  uint8_t* records;
  uint8_t* var;
  uint8_t* overflow;  // may be null
  unsigned long long* overflow_cursor;
  uint32_t* report;         // host memory for the finished header, or null
  frame::Header* counters;  // the workspace, or where is_counted_apart is false, the header itself
  uint64_t elements;
  uint64_t var_capacity;       // units
  uint64_t var_limit;          // units: payloads end here or before
  uint32_t overflow_capacity;  // units
  uint32_t blocks;
  uint32_t tiles;
  uint32_t slab_bytes;
  uint8_t dtype;
  uint8_t layout;
  uint8_t fast;
  uint8_t center;
  uint8_t checked;
  uint8_t is_counted_apart;
};

struct DecodeJob {
  const uint8_t* frame;
  const uint8_t* overflow;  // may be null
  uint8_t* output;
  uint32_t* status;
  uint64_t frame_bytes;
  uint64_t elements;
  uint32_t overflow_capacity;  // units
  uint32_t tiles;
  uint8_t dtype;
  uint8_t verify;
  uint8_t is_alone;     // no other kernel looks at this frame, and
  uint32_t slab_bytes;  // it is expected to have such slabs
};

// A kernel that codes tiles, what it needs of a thread block, and how many thread blocks a device
// holds at once: asked once for each device, 0 before.
template <class Job>
struct Kernel {
  static constexpr int kDevices = 64;

  void (*function)(Job);
  uint32_t shared_bytes;
  std::array<std::atomic<uint32_t>, kDevices> resident{};

  constexpr Kernel(void (*function)(Job), uint32_t shared_bytes)
      : function(function), shared_bytes(shared_bytes) {}
};
using EncodeKernel = Kernel<EncodeJob>;
using DecodeKernel = Kernel<DecodeJob>;

// More than any device holds at once.
inline constexpr uint32_t kMostThreadBlocks = 1 << 16;

// Shared memory of a processor, and what each thread block takes of it beside its own, where there
// is least of what we support: compute capability 8.0. (8.6 and 8.9 have 99 KiB and 16 warps less.)
inline constexpr uint32_t kSharedBytes = 164 * 1024;
inline constexpr uint32_t kReservedBytes = 1024;

// The kernels are spread over translation units, so that these compile at the same time. Null where
// there is no such kernel.
EncodeKernel* dense_encode_kernel(frame::Dtype dtype, frame::Layout layout);
EncodeKernel* sparse_encode_kernel(frame::Dtype dtype);
EncodeKernel* other_encode_kernel(frame::Dtype dtype, frame::Layout layout);
DecodeKernel* float_decode_kernel(frame::Dtype dtype);
DecodeKernel* sparse_decode_kernel(frame::Dtype dtype);
DecodeKernel* other_decode_kernel(frame::Dtype dtype);

}  // namespace memswap::cuda
