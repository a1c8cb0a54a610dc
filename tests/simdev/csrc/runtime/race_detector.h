// Finds accesses to the same bytes that no event, wait or host synchronisation orders.
//
// [Note: detector]
// Each block of memory remembers, per byte range, its last write and the reads since. A task is
// checked when it is launched, against vector clocks that follow the program's own ordering calls,
// so a missing wait is found at the offending line under the friendliest schedule. One clock stands
// for all host threads: a synchronisation by one thread is taken to be known to the others, which
// may hide a race between host threads but never invents one.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "runtime.h"

namespace simdev {

struct Access {
  int slot = kHost;
  uint64_t time = 0;  // on the clock of its slot
  const char* name = nullptr;
  uint64_t task = 0;
};

struct Conflict {
  Access earlier;
  bool earlier_wrote = false;
};

// The accesses to one block since it was allocated, by byte range.
class AccessMap {
 public:
  // The first remembered access that `access` is not ordered after, given what it knows.
  std::optional<Conflict> find_conflict(const Span& span, int slot, const VectorClock& known) const;
  void remember(const Span& span, const Access& access);
  void clear() { ranges_.clear(); }

 private:
  struct Range {
    uintptr_t end = 0;
    std::optional<Access> write;
    std::vector<Access> reads;  // since the write; at most one per stream
  };
  using Ranges = std::map<uintptr_t, Range>;
  Ranges::iterator split_at(uintptr_t address);  // the first range that begins at or after it

  Ranges ranges_;
};

class RaceDetector {
 public:
  bool on() const { return mode_ != Check::kOff; }
  void set_mode(Check mode);
  std::vector<std::string> take_reports();

  // Checks and remembers an access. `known` is what the accessing stream is ordered after.
  // Throws in throw mode, unless `deferrable`, when the next throw_deferred() does.
  void access(AccessMap& block, size_t block_bytes, const Span& span, const Access& access,
              const VectorClock& known, bool deferrable);
  // The same for accesses that end a block's life or come from the host: checked, not remembered.
  void check(const AccessMap& block, size_t block_bytes, const Span& span, const Access& access,
             const VectorClock& known, bool deferrable);
  void report(std::string message, bool deferrable);
  void throw_deferred();

 private:
  Check mode_ = Check::kOff;
  std::vector<std::string> reports_;
  std::string deferred_;
};

}  // namespace simdev
