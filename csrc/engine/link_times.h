// How fast a link carries an iteration's copies, from events on the lane's streams.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_set>
#include <utility>
#include <vector>

#include "clock.h"
#include "entry.h"
#include "iteration_record.h"

namespace memswap {

// A copy is timed from the end of the one before it on its stream. It may have waited for compute
// in between, so a rate found here is one that the link reaches at least, and is the link's own
// where copies queue up. Only raw copies of stream lanes are seen.
class LinkTimes {
 public:
  // A storage was saved; it may be on its way.
  void sent(const Entry& entry);
  // Backward has a storage; those at these places may be on their way back since.
  void returning(const Iteration& of, const std::vector<size_t>& places);

  // Those that the device has passed by now.
  std::vector<IterationRecord::Copy> sends() const { return copies_of(sends_); }
  std::vector<IterationRecord::Copy> fetches() const { return copies_of(fetches_); }

 private:
  using Ends = std::vector<std::pair<MomentPtr, int64_t>>;

  static std::vector<IterationRecord::Copy> copies_of(const Ends& ends);

  Ends sends_, fetches_;
  std::unordered_set<size_t> returning_;
};

}  // namespace memswap
