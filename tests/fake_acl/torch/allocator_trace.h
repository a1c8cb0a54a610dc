// What torch_npu's caching allocator does with its memory, told to the machine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fake_acl {

struct LiveTensor {
  size_t bytes;  // as the allocator rounded them
  uint64_t serial;
  int device;
};

// Once, after torch_npu was imported.
void trace_allocator();

// Throws what a free had to keep to itself.
void rethrow_kept_error();

std::vector<LiveTensor> live_tensors(uint64_t after_serial);
uint64_t last_tensor_serial();
size_t deferred_frees(int device);  // freed, but a recorded stream has not passed yet

}  // namespace fake_acl
