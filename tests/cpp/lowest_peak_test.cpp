// What stays, so that as little as can be is there at once: beside all other choices.
#include "engine/lowest_peak.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <random>
#include <vector>

#include "engine/backward_peak.h"
#include "engine/cheapest_set.h"
#include "making_graphs.h"

namespace memswap {
namespace {

int64_t peak_of(const MakingGraph& graph, const Fates& fates) {
  return backward_peak(graph, fates).nbytes;
}

// Calls in a row that the longest recipe makes; -1: something is made again of what is not had.
int longest_made(const MakingGraph& graph, const Fates& fates) {
  int longest = 0;
  const std::function<int(size_t)> depth_of = [&](size_t which) {
    if (fates[which] != Fate::kMadeAgain) {
      return fates[which] == Fate::kKept ? 0 : -1;
    }
    int before = 0;
    for (const size_t input : graph.calls[*graph.storages[which].maker].inputs) {
      const int depth = graph.storages[input].there ? 0 : depth_of(input);
      before = before < 0 || depth < 0 ? -1 : std::max(before, depth);
    }
    return before < 0 ? -1 : before + 1;
  };
  for (size_t which = 0; which < fates.size(); ++which) {
    if (graph.storages[which].needed && !graph.storages[which].there) {
      const int depth = depth_of(which);
      longest = depth < 0 || longest < 0 ? -1 : std::max(longest, depth);
    }
  }
  return longest;
}

Fates nothing_moved(const MakingGraph& graph) {
  Fates fates(graph.storages.size(), Fate::kUnused);
  for (size_t which = 0; which < fates.size(); ++which) {
    fates[which] = graph.storages[which].needed ? Fate::kKept : Fate::kUnused;
  }
  return fates;
}

int64_t weighed(const MakingGraph& graph, const Fates& fates) {
  return peak_of(graph, fates) + cost_of_calls(graph, fates);
}

// Of all choices there are that have no higher peak.
int64_t least_weighed(const MakingGraph& graph, int deepest, int64_t most_nbytes) {
  int64_t least = std::numeric_limits<int64_t>::max();
  std::vector<size_t> open;
  Fates fates(graph.storages.size(), Fate::kUnused);
  const std::function<void(size_t)> choose = [&](size_t left) {
    // The last ones first: nothing reads what comes after it.
    if (left == 0) {
      const int longest = longest_made(graph, fates);
      if (longest >= 0 && longest <= deepest && peak_of(graph, fates) <= most_nbytes) {
        least = std::min(least, weighed(graph, fates));
      }
      return;
    }
    const size_t which = left - 1;
    const MakingGraph::Storage& storage = graph.storages[which];
    bool wanted = storage.needed;
    for (size_t later = left; later < fates.size(); ++later) {
      if (fates[later] == Fate::kMadeAgain) {
        const auto& inputs = graph.calls[*graph.storages[later].maker].inputs;
        wanted = wanted || std::find(inputs.begin(), inputs.end(), which) != inputs.end();
      }
    }
    fates[which] = Fate::kUnused;
    if (!wanted) {
      choose(which);
      return;
    }
    if (storage.keep_cost || storage.there) {
      fates[which] = Fate::kKept;
      choose(which);
    }
    if (storage.maker && !storage.there) {
      fates[which] = Fate::kMadeAgain;
      choose(which);
    }
    fates[which] = Fate::kUnused;
  };
  choose(fates.size());
  return least;
}

TEST(LowestPeak, HardlyAnyOtherChoiceIsBetter) {
  std::mt19937 random(13);
  int best = 0, tried = 0;
  int64_t found_nbytes = 0, least_nbytes = 0;
  for (int round = 0; round < 500; ++round) {
    MakingGraph graph = random_forward(random, 3 + random() % 9);
    for (MakingGraph::Storage& storage : graph.storages) {
      storage.nbytes *= 1 + static_cast<int64_t>(random() % 4);  // frames are shorter
    }
    const int deepest = 1 + static_cast<int>(random() % 4);
    const Fates fates = lowest_peak(graph, {.deepest = deepest});
    const int longest = longest_made(graph, fates);
    ASSERT_GE(longest, 0) << "round " << round << ": something cannot be had";
    ASSERT_LE(longest, deepest) << "round " << round;
    const int64_t most = std::min(peak_of(graph, nothing_moved(graph)),
                                  peak_of(graph, judged_alone(graph, {.deepest = deepest})));
    const int64_t least = least_weighed(graph, deepest, most), found = weighed(graph, fates);
    ASSERT_GE(found, least) << "round " << round;
    ++tried;
    best += found == least ? 1 : 0;
    found_nbytes += found;
    least_nbytes += least;
  }
  EXPECT_GE(best, 9 * tried / 10) << best << " of " << tried;
  EXPECT_LE(found_nbytes, least_nbytes + least_nbytes / 200);
}

TEST(LowestPeak, IsNoHigherThanWithoutACutOrWithoutRecipes) {
  std::mt19937 random(17);
  int lower = 0;
  for (int round = 0; round < 500; ++round) {
    const MakingGraph graph = random_forward(random, 3 + random() % 40);
    const ChoiceLimits limits{.deepest = 1 + static_cast<int>(random() % 8)};
    const int64_t found = peak_of(graph, lowest_peak(graph, limits));
    const Fates alone = judged_alone(graph, limits);
    const int longest = longest_made(graph, alone);
    ASSERT_GE(longest, 0) << "round " << round << ": something cannot be had";
    ASSERT_LE(longest, limits.deepest) << "round " << round;
    ASSERT_LE(found, peak_of(graph, alone)) << "round " << round;
    ASSERT_LE(found, peak_of(graph, nothing_moved(graph))) << "round " << round;
    lower += found < peak_of(graph, alone) ? 1 : 0;
  }
  EXPECT_GT(lower, 100) << "the cut is hardly ever of use";
}

// Of a residual stream the sums, and what was added: short rows hold less back at once.
TEST(LowestPeak, RowsAreAsLongAsThePeakIsLowest) {
  const auto stream_of = [](size_t layers) {
    MakingGraph graph;
    graph.storages = {{.nbytes = 40, .keep_cost = 34, .needed = true}};
    graph.saved = {0};
    for (size_t layer = 0; layer < layers; ++layer) {
      const size_t sum = graph.storages.size() - 1;
      graph.storages.push_back({.nbytes = 20, .keep_cost = 14});
      graph.calls.push_back({.cost = 1, .inputs = {sum, sum + 1}});
      graph.saved.push_back(graph.storages.size());
      graph.storages.push_back({.nbytes = 40, .keep_cost = 34, .maker = layer, .needed = true});
    }
    return graph;
  };
  const auto kept_sums = [](const MakingGraph& graph, const Fates& fates) {
    size_t kept = 0;
    for (size_t which = 0; which < fates.size(); ++which) {
      kept += graph.storages[which].needed && fates[which] == Fate::kKept ? 1 : 0;
    }
    return kept;
  };
  const MakingGraph few = stream_of(6), many = stream_of(120);
  const Fates short_rows = lowest_peak(few, {}), long_rows = lowest_peak(many, {});
  EXPECT_GE(7 * kept_sums(many, long_rows), kept_sums(few, short_rows));
  EXPECT_LE(kept_sums(many, long_rows), 121u / 4) << "long models have long rows";
  EXPECT_GE(kept_sums(few, short_rows), 2u) << "short ones have short rows";
  EXPECT_LT(backward_peak(many, long_rows).nbytes, 121 * 34);
}

}  // namespace
}  // namespace memswap
