// What one iteration was like, in columns: for whoever plans, after the iteration.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "step_record.h"

namespace memswap {

// Marks are numbered as in a StepRecord, which a planner makes of it ([Note: Marks] in recorder.h).
// kNever stands for a mark that there is not. Seconds are those of the device, or of the host's
// clock on a CPU.
struct IterationRecord {
  // What a checkpoint region that was off was called with.
  struct Region {
    std::string unit;
    std::vector<size_t> inputs;  // those of the iteration's storages
    int64_t other_nbytes = 0;    // and bytes of what nobody saved
  };

  // A copy on a lane's stream, from the end of the one before it.
  struct Copy {
    double seconds;
    int64_t nbytes;
  };

  std::vector<std::string> unit_names;

  // One number per storage, in the order of the saves.
  std::vector<size_t> units;  // among `unit_names`: who saved it first
  std::vector<int64_t> ordinals;
  std::vector<int64_t> nbytes;
  std::vector<c10::ScalarType> dtypes;
  std::vector<PlannedAction> actions;  // what was to be done with it, and
  std::vector<uint8_t> moved;          // whether that was done
  std::vector<uint8_t> for_recipe;     // whether a recipe has saved it, and not autograd
  // The first mark at which the forward held it no longer. kNever: it still did when backward asked
  // for it, so that leaving frees nothing.
  std::vector<int32_t> held_until;
  // The last mark in whose course somebody used it. kNever: it was never demanded. What a graph
  // that is retained lets go of, and asks for again, counts no more: it comes alone then.
  std::vector<int32_t> last_demand;
  std::vector<int32_t> kept_until;          // the last mark at which its graph still had it
  std::vector<std::vector<size_t>> others;  // units that saved it again

  // One number per demand: which storage was demanded first then.
  std::vector<size_t> order;

  // One number per mark.
  std::vector<double> gaps_s;         // work before it
  std::vector<double> costs_s;        // what it took itself
  std::vector<double> windows_s;      // of the windows in its gap; empty: there were none
  std::vector<int64_t> extra_nbytes;  // the most that recomputed units had saved again until the
                                      // next mark; empty: nothing

  double tail_s = 0;       // from the last mark to the begin of the next iteration
  int64_t peak_bytes = 0;  // resident ones, the most at a mark
  std::vector<Region> regions;
  std::vector<Copy> sends, fetches;
};

}  // namespace memswap
