// A network of capacities and its minimum cut.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace memswap {

// [Note: Minimum cut] The least capacity whose edges part a source from a sink equals the greatest
// flow from one to the other (Ford and Fulkerson, 1956). The flow is found by Dinic's algorithm
// (1970): in phases, along shortest ways alone, in O(nodes^2 edges) and far less on what is here.
class FlowNetwork {
 public:
  // Of an edge that must not be cut. A sum of the other capacities stays below it.
  static constexpr int64_t kUncut = int64_t{1} << 60;

  explicit FlowNetwork(size_t nodes) : edges_of_(nodes) {}

  // `capacity`: at least 0.
  void add_edge(size_t from, size_t to, int64_t capacity);

  // Pushes the greatest flow, once. Its value is the capacity of the minimum cut; kUncut or more:
  // the two cannot be parted.
  int64_t push(size_t source, size_t sink);

  // After `push`: which nodes are on the source's side of a minimum cut, the one with fewest nodes
  // there.
  std::vector<bool> source_side(size_t source) const;

 private:
  struct Edge {
    size_t to;
    int64_t room;  // of its capacity, what the flow has left
  };

  bool find_levels(size_t source, size_t sink);
  int64_t push_along(size_t source, size_t sink);

  std::vector<Edge> edges_;  // each before the one that leads back: edge ^ 1
  std::vector<std::vector<size_t>> edges_of_;
  std::vector<int32_t> level_;
  std::vector<size_t> next_;
};

}  // namespace memswap
