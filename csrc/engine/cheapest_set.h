// Which storages stay, so that all that backward needs can be had at the least cost.
#pragma once

#include <cstdint>
#include <limits>

#include "making_graph.h"

namespace memswap {

// [Note: What stays is a cut]
// Each storage is two nodes, "it is had" and "it is made again", each call one: "it is made". A
// node on the sink's side means yes. Three edges make wrong answers impossible: what is needed is
// had; what is made again, or read by a call that is made, is had; what is made again has its call
// made. The others cost: what is had and is not made again is kept, for its bytes; a call that is
// made takes its time. So each cut is one way to have everything, and the minimum one the cheapest.
// (Where two cost the same, more is made again, and less kept.)
//
// A row of calls is made at one demand. It has `deepest` calls at most, and what backward needs of
// their results comes back with it: not more than `most_row_nbytes`, as far as that can be. Where a
// row would be longer, what stands there is not made again, and the cut is looked for once more.

// The fate of each storage. No call reads what it makes, also by way of others.
Fates cheapest_set(const MakingGraph& graph, int deepest,
                   int64_t most_row_nbytes = std::numeric_limits<int64_t>::max());

// Calls of the longest row, and the most that comes back with one.
int longest_row(const MakingGraph& graph, const Fates& fates);
int64_t widest_row(const MakingGraph& graph, const Fates& fates);

// What the calls that a choice makes cost, once each.
int64_t cost_of_calls(const MakingGraph& graph, const Fates& fates);

}  // namespace memswap
