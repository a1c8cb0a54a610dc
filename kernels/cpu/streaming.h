// From how many uncompressed bytes on a job's output is not worth keeping in the caches.
#pragma once

#include <stdint.h>

namespace memswap::cpu {

// [Note: around the caches]
// Stores around the caches pay where a job's input, frame and output do not fit the last cache
// together with what else it holds, and cost where they do. Measured, with AVX-512 and a cache of
// 32 MiB: a bfloat16 tensor of 4 MiB is decoded 1.2 times as fast through the caches, one of 8 MiB
// 1.2 times as fast around them, and encoded 1.3 times; of 16 MiB, twice as fast. So the limit is a
// share of the last cache, which the system tells.
inline constexpr uint64_t kCacheShare = 6;

// Where the system does not tell its caches, and bounds for what it tells: what a virtual machine
// says of its host's cache need not be the part that it gets.
inline constexpr uint64_t kUsualStreamingBytes = 4 * 1024 * 1024;
inline constexpr uint64_t kLeastStreamingBytes = 1024 * 1024;
inline constexpr uint64_t kMostStreamingBytes = 32 * 1024 * 1024;

// Bytes of the last of a processor's caches for data, by a folder as Linux has it
// (/sys/devices/system/cpu/cpu0/cache); 0 where it says none.
uint64_t last_cache_bytes(const char* folder);

// The limit for a last cache of so many bytes.
uint64_t streaming_bytes_for(uint64_t cache_bytes);

// The limit here. Asks the system once.
uint64_t streaming_bytes();

}  // namespace memswap::cpu
