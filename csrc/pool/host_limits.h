// What the system leaves of host memory to this process.
#pragma once

#include <cstddef>
#include <filesystem>
#include <limits>
#include <optional>

namespace memswap {

// Bytes, as the system says them at one moment.
struct HostLimits {
  static constexpr size_t kNone = std::numeric_limits<size_t>::max();

  size_t available = kNone;     // what the machine would give without swapping
  size_t total = kNone;         // what it has
  std::optional<size_t> group;  // what the control groups above this process leave; none: no limit
  size_t group_total = kNone;   // of the one that leaves least, its limit
  // Most bytes that this process may lock; none: no limit, or the process may pass it.
  std::optional<size_t> lockable;
  size_t locked = 0;  // what it has locked and pinned, as far as the kernel counts it

  size_t free() const;   // what the machine, or the narrowest group, has left
  size_t whole() const;  // what the machine, or that group, has in all
};

// Reads the limits now: MemAvailable and MemTotal of /proc/meminfo; of each control group above
// this process its limit less what it uses (version 2: memory.max, memory.current; version 1:
// memory.limit_in_bytes, memory.usage_in_bytes), but for files in the page cache, which go when
// memory is needed (memory.stat); the locked memory of /proc/self/limits, unless CAP_IPC_LOCK
// (/proc/self/status) takes the process past it. What cannot be read sets no limit.
// `root`: where proc and sys are.
HostLimits host_limits(const std::filesystem::path& root = "/");

}  // namespace memswap
