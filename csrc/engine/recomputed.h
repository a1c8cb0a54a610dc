// Storages that checkpoint regions saved again in backward, and that backward has not used up.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <utility>

#include "counters.h"
#include "storage/storage.h"

namespace memswap {

// They count as resident, so that a budget and a peak mean the same bytes whether a unit is
// recomputed or not. Torch holds them; here are weak references, looked through at each mark. The
// engine's lock serialises the calls.
class Recomputed {
 public:
  explicit Recomputed(Counters& counters) : counters_(counters) {}

  // One more is there. False: it was known.
  bool add(const StorageRef& storage);
  // Takes off the books what is gone.
  void sweep();
  // No backward runs: what is there still is somebody else's.
  void clear();

  int64_t nbytes() const { return counters_.recomputed_bytes; }

 private:
  Counters& counters_;
  std::unordered_map<const void*, std::pair<WeakStorage, int64_t>> storages_;  // with their bytes
};

}  // namespace memswap
