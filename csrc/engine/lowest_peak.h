// Which storages stay, so that as few bytes as can be are there at once.
#pragma once

#include "making_graph.h"

namespace memswap {

// [Note: The lowest peak]
// The cheapest way to have everything ([Note: What stays is a cut]) need not be the one with the
// lowest peak: what a recipe makes on the way, and what comes back with it for later, is there
// beside all that is kept ([Note: What is there at once]). So there are several choices to begin
// with: the cheapest; the cheapest with shorter rows; each storage judged by itself; nothing made
// again. In each of them, what is there at the peak is kept instead, one storage after another, for
// as long as that is for the better. A choice is better than another one if its peak and the calls
// that it makes, weighed as in the cut, come to less. But none is taken whose peak is higher than
// where each storage is judged by itself, or where nothing is made again.

// What may be saved for a recipe alone, as a share of the bytes that the recipe frees ([Note: What
// a recipe keeps] in recipes.h).
inline constexpr double kMostExtra = 0.75;

struct ChoiceLimits {
  int deepest = 8;  // calls in a row that a recipe may have
  double most_extra = kMostExtra;
};

// The fate of each storage. No call reads what it makes, also by way of others.
Fates lowest_peak(const MakingGraph& graph, const ChoiceLimits& limits);

// What is chosen where each storage is judged by itself, when it is saved first.
Fates judged_alone(const MakingGraph& graph, const ChoiceLimits& limits);

}  // namespace memswap
