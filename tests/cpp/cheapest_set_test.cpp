// What stays, so that all that backward needs can be had: by a minimum cut, beside all other ways.
#include "engine/cheapest_set.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <optional>
#include <random>
#include <vector>

#include "engine/min_cut.h"
#include "making_graphs.h"

namespace memswap {
namespace {

constexpr auto kNever = std::numeric_limits<int64_t>::max();

// What a choice costs: calls that are made, and bytes that are kept, but for what is there anyway.
int64_t cost_of(const MakingGraph& graph, const Fates& fates) {
  int64_t cost = cost_of_calls(graph, fates);
  for (size_t which = 0; which < fates.size(); ++which) {
    const MakingGraph::Storage& storage = graph.storages[which];
    if (fates[which] == Fate::kKept && !storage.there) {
      cost += storage.keep_cost.value_or(FlowNetwork::kUncut);
    }
  }
  return cost;
}

TEST(FlowNetwork, TheGreatestFlowIsTheLeastCapacityThatPartsTwoNodes) {
  FlowNetwork network(6);  // two ways that meet
  network.add_edge(0, 1, 10);
  network.add_edge(0, 2, 10);
  network.add_edge(1, 3, 4);
  network.add_edge(1, 4, 8);
  network.add_edge(2, 4, 9);
  network.add_edge(4, 3, 6);
  network.add_edge(3, 5, 10);
  network.add_edge(4, 5, 10);
  EXPECT_EQ(network.push(0, 5), 19);
  const std::vector<bool> near = network.source_side(0);
  EXPECT_TRUE(near[0]);
  EXPECT_FALSE(near[5]);
}

TEST(FlowNetwork, WhatCannotBePartedSaysSo) {
  FlowNetwork network(3);
  network.add_edge(0, 1, FlowNetwork::kUncut);
  network.add_edge(1, 2, FlowNetwork::kUncut);
  network.add_edge(0, 2, 5);
  EXPECT_GE(network.push(0, 2), FlowNetwork::kUncut);
}

// The least capacity over all sets of nodes with the source.
TEST(FlowNetwork, FindsTheCutThatTryingAllOfThemFinds) {
  std::mt19937 random(7);
  for (int round = 0; round < 300; ++round) {
    const size_t nodes = 2 + random() % 6, sink = nodes - 1;
    std::vector<std::vector<int64_t>> capacity(nodes, std::vector<int64_t>(nodes, 0));
    FlowNetwork network(nodes);
    for (size_t edge = 0; edge < 2 * nodes; ++edge) {
      const size_t from = random() % nodes, to = random() % nodes;
      const auto room = static_cast<int64_t>(random() % 20);
      network.add_edge(from, to, room);
      capacity[from][to] += from == to ? 0 : room;
    }
    const auto cut_by = [&](const std::function<bool(size_t)>& near) {
      int64_t total = 0;
      for (size_t from = 0; from < nodes; ++from) {
        for (size_t to = 0; to < nodes; ++to) {
          total += near(from) && !near(to) ? capacity[from][to] : 0;
        }
      }
      return total;
    };
    int64_t least = kNever;
    for (size_t set = 0; set < size_t{1} << nodes; ++set) {
      if ((set & 1) != 0 && (set >> sink & 1) == 0) {
        least = std::min(least, cut_by([&](size_t node) { return (set >> node & 1) != 0; }));
      }
    }
    ASSERT_EQ(network.push(0, sink), least) << "round " << round;
    const std::vector<bool> near = network.source_side(0);
    ASSERT_EQ(cut_by([&](size_t node) { return near[node]; }), least) << "round " << round;
  }
}

// --- what stays --------------------------------------------------------------------------------

// Calls in a row that it takes to have a storage; nothing: it cannot be had.
std::optional<int> calls_for(const MakingGraph& graph, const std::vector<bool>& kept,
                             size_t which) {
  const MakingGraph::Storage& storage = graph.storages[which];
  if (kept[which] || storage.there) {
    return 0;
  }
  if (!storage.maker) {
    return std::nullopt;
  }
  int depth = 0;
  for (const size_t input : graph.calls[*storage.maker].inputs) {
    const std::optional<int> before = calls_for(graph, kept, input);
    if (!before) {
      return std::nullopt;
    }
    depth = std::max(depth, *before);
  }
  return depth + 1;
}

void collect_calls(const MakingGraph& graph, const std::vector<bool>& kept, size_t which,
                   std::vector<bool>& made) {
  const MakingGraph::Storage& storage = graph.storages[which];
  if (!kept[which] && !storage.there && !made[*storage.maker]) {
    made[*storage.maker] = true;
    for (const size_t input : graph.calls[*storage.maker].inputs) {
      collect_calls(graph, kept, input, made);
    }
  }
}

// What it costs to keep just these; nothing: what is needed could not be had.
std::optional<int64_t> cost_with(const MakingGraph& graph, const std::vector<bool>& kept,
                                 int deepest) {
  int64_t cost = 0;
  std::vector<bool> made(graph.calls.size(), false);
  for (size_t which = 0; which < graph.storages.size(); ++which) {
    const MakingGraph::Storage& storage = graph.storages[which];
    if (kept[which] && !storage.keep_cost) {
      return std::nullopt;
    }
    cost += kept[which] && !storage.there ? *storage.keep_cost : 0;
    if (storage.needed) {
      const std::optional<int> depth = calls_for(graph, kept, which);
      if (!depth || *depth > deepest) {
        return std::nullopt;
      }
      collect_calls(graph, kept, which, made);
    }
  }
  for (size_t call = 0; call < graph.calls.size(); ++call) {
    cost += made[call] ? graph.calls[call].cost : 0;
  }
  return cost;
}

int64_t least_cost(const MakingGraph& graph, int deepest) {
  int64_t least = kNever;
  const size_t storages = graph.storages.size();
  for (size_t set = 0; set < size_t{1} << storages; ++set) {
    std::vector<bool> kept(storages);
    for (size_t which = 0; which < storages; ++which) {
      kept[which] = (set >> which & 1) != 0;
    }
    least = std::min(least, cost_with(graph, kept, deepest).value_or(kNever));
  }
  return least;
}

std::vector<bool> kept_of(const Fates& fates) {
  std::vector<bool> kept(fates.size());
  std::transform(fates.begin(), fates.end(), kept.begin(),
                 [](Fate fate) { return fate == Fate::kKept; });
  return kept;
}

// Of what cannot be kept but is there anyway, `kept` says nothing.
std::vector<bool> without_free(const MakingGraph& graph, std::vector<bool> kept) {
  for (size_t which = 0; which < kept.size(); ++which) {
    kept[which] = kept[which] && !graph.storages[which].there;
  }
  return kept;
}

TEST(CheapestSet, NoOtherChoiceIsCheaper) {
  std::mt19937 random(3);
  for (int round = 0; round < 400; ++round) {
    // With a single one that is needed no row ends for the peak.
    MakingGraph graph = random_forward(random, 3 + random() % 7);
    const size_t needed = random() % graph.storages.size();
    for (size_t which = 0; which < graph.storages.size(); ++which) {
      graph.storages[which].needed = which == needed;
    }
    graph.saved = {needed};
    graph.storages[needed].keep_cost = graph.storages[needed].nbytes;
    const Fates fates = cheapest_set(graph, 100);
    const auto cost = cost_with(graph, without_free(graph, kept_of(fates)), 100);
    ASSERT_TRUE(cost) << "round " << round << ": something cannot be had";
    ASSERT_EQ(*cost, least_cost(graph, 100)) << "round " << round;
    ASSERT_EQ(cost_of(graph, fates), *cost) << "round " << round;
  }
}

TEST(CheapestSet, WhateverIsNeededCanBeHadWithinTheDepth) {
  std::mt19937 random(5);
  for (int round = 0; round < 600; ++round) {
    const MakingGraph graph = random_forward(random, 3 + random() % 9);
    const int deepest = 1 + static_cast<int>(random() % 4);
    const Fates fates = cheapest_set(graph, deepest);
    const auto cost = cost_with(graph, without_free(graph, kept_of(fates)), deepest);
    ASSERT_TRUE(cost) << "round " << round << ": something cannot be had, or by a longer row";
    ASSERT_GE(*cost, least_cost(graph, deepest)) << "round " << round;
    std::vector<bool> all(graph.storages.size());
    for (size_t which = 0; which < all.size(); ++which) {
      all[which] = graph.storages[which].needed;
    }
    Fates nothing(graph.storages.size(), Fate::kUnused);
    for (size_t which = 0; which < all.size(); ++which) {
      nothing[which] = all[which] ? Fate::kKept : Fate::kUnused;
    }
    ASSERT_LE(cost_of(graph, fates), cost_of(graph, nothing)) << "round " << round;
  }
}

// The bfloat16 tensor in front of a float32 norm: two bytes instead of four, and one source for
// what was made of it twice.
TEST(CheapestSet, ASmallerSourceStaysInPlaceOfWhatWasMadeOfIt) {
  MakingGraph graph;
  for (size_t layer = 0; layer < 8; ++layer) {  // the sum, which nothing can make again, and those
    graph.storages.push_back({.nbytes = 20, .keep_cost = 20});
    graph.storages.push_back({.nbytes = 40, .keep_cost = 40, .maker = 2 * layer, .needed = true});
    graph.storages.push_back(
        {.nbytes = 20, .keep_cost = 20, .maker = 2 * layer + 1, .needed = true});
    graph.saved.insert(graph.saved.end(), {3 * layer + 1, 3 * layer + 2});
    graph.calls.push_back({.cost = 1, .inputs = {3 * layer}});
    graph.calls.push_back({.cost = 1, .inputs = {3 * layer + 1}});
  }
  using enum Fate;
  Fates fates = cheapest_set(graph, 8);
  for (size_t layer = 0; layer < 8; ++layer) {
    EXPECT_EQ(fates[3 * layer], kKept);
    EXPECT_EQ(fates[3 * layer + 1], kMadeAgain);
    EXPECT_EQ(fates[3 * layer + 2], kMadeAgain);
    graph.storages[3 * layer].keep_cost.reset();
  }
  fates = cheapest_set(graph, 8);
  EXPECT_EQ(fates[0], kUnused);
  EXPECT_EQ(fates[1], kKept);
  EXPECT_EQ(fates[2], kMadeAgain);
}

// What does not pay for one storage may for two.
TEST(CheapestSet, OneSourceServesSeveral) {
  MakingGraph graph;
  graph.storages = {{.nbytes = 30, .keep_cost = 30},
                    {.nbytes = 20, .keep_cost = 20, .maker = 0, .needed = true},
                    {.nbytes = 20, .keep_cost = 20, .maker = 1, .needed = true}};
  graph.calls = {{.cost = 1, .inputs = {0}}, {.cost = 1, .inputs = {0}}};
  graph.saved = {1, 2};
  EXPECT_EQ(cheapest_set(graph, 8)[0], Fate::kKept);
  graph.storages[2].needed = false;
  graph.saved = {1};
  EXPECT_EQ(cheapest_set(graph, 8)[1], Fate::kKept);
}

}  // namespace
}  // namespace memswap
