// How many bytes a choice of what stays has on the device at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "making_graph.h"

namespace memswap {

// [Note: What is there at once]
// A forward leaves what is kept. Backward then demands what was saved, last first. What is demanded
// comes back, from what is kept or by a recipe, which first has all come back that it reads. What
// backward needs stays until each save and each recipe that reads it has seen it (Entry::bring);
// what is kept for recipes alone, until the last of these has. Between its sources and its result a
// recipe has what it makes on the way, each for as long as a call is to read it (run_again). What
// is kept takes its bytes until everything that could ask for it again is dead: its own saves, and
// the recipes that read it, which live as long as what they make.

struct BackwardPeak {
  int64_t nbytes = 0;
  // Storages whose bytes, not what is kept of them, are there then; some may be twice. Empty: the
  // forward has more than any moment of backward.
  std::vector<size_t> there;
};

// The most bytes that are there at once, in a forward and its backward. What is made again, and
// what it is made of, has a fate that is used.
BackwardPeak backward_peak(const MakingGraph& graph, const Fates& fates);

}  // namespace memswap
