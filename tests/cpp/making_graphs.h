// Graphs of forwards for tests of what stays.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <random>

#include "engine/making_graph.h"

namespace memswap {

// A forward of random operators, some of which nobody can make again.
inline MakingGraph random_forward(std::mt19937& random, size_t storages) {
  MakingGraph graph;
  while (graph.storages.size() < storages) {
    const size_t before = graph.storages.size();
    std::optional<size_t> call;
    if (before > 0 && random() % 4 != 0) {
      call = graph.calls.size();
      graph.calls.push_back({.cost = 1 + static_cast<int64_t>(random() % 6), .inputs = {}});
      for (size_t inputs = 1 + random() % 2; inputs > 0; --inputs) {
        graph.calls.back().inputs.push_back(random() % before);
      }
    }
    const size_t results = call && random() % 4 == 0 ? 2 : 1;
    for (size_t result = 0; result < results; ++result) {
      const auto nbytes = 1 + static_cast<int64_t>(random() % 30);
      const bool needed = random() % 2 == 0, keepable = needed || random() % 4 != 0;
      graph.storages.push_back({.nbytes = nbytes,
                                .keep_cost = keepable ? std::optional(nbytes) : std::nullopt,
                                .maker = call,
                                .needed = needed,
                                .there = random() % 8 == 0});
      if (needed) {
        graph.saved.push_back(graph.storages.size() - 1);
      }
    }
  }
  return graph;
}

}  // namespace memswap
