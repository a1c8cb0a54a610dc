#include "min_cut.h"

#include <algorithm>
#include <queue>

namespace memswap {

void FlowNetwork::add_edge(size_t from, size_t to, int64_t capacity) {
  edges_of_[from].push_back(edges_.size());
  edges_.push_back({to, capacity});
  edges_of_[to].push_back(edges_.size());
  edges_.push_back({from, 0});
}

// How many edges with room each node is from the source. Whether the sink can be reached.
bool FlowNetwork::find_levels(size_t source, size_t sink) {
  level_.assign(edges_of_.size(), -1);
  level_[source] = 0;
  std::queue<size_t> reached({source});
  while (!reached.empty()) {
    const size_t node = reached.front();
    reached.pop();
    for (const size_t which : edges_of_[node]) {
      const Edge& edge = edges_[which];
      if (edge.room > 0 && level_[edge.to] < 0) {
        level_[edge.to] = level_[node] + 1;
        reached.push(edge.to);
      }
    }
  }
  return level_[sink] >= 0;
}

// Pushes as much as one way from level to level takes. 0: there is none any more. A step back marks
// the edge that led to a dead end as used up, so each is looked at once in a phase. (Ways may have
// thousands of nodes: a loop, not a recursion.)
int64_t FlowNetwork::push_along(size_t source, size_t sink) {
  std::vector<size_t> way;
  size_t node = source;
  while (node != sink) {
    size_t& next = next_[node];
    const auto& edges = edges_of_[node];
    while (next < edges.size() &&
           (edges_[edges[next]].room == 0 || level_[edges_[edges[next]].to] != level_[node] + 1)) {
      ++next;
    }
    if (next < edges.size()) {
      way.push_back(edges[next]);
      node = edges_[way.back()].to;
    } else if (way.empty()) {
      return 0;
    } else {
      node = edges_[way.back() ^ 1].to;
      way.pop_back();
      ++next_[node];
    }
  }
  int64_t pushed = kUncut;
  for (const size_t which : way) {
    pushed = std::min(pushed, edges_[which].room);
  }
  for (const size_t which : way) {
    edges_[which].room -= pushed;
    edges_[which ^ 1].room += pushed;
  }
  return pushed;
}

int64_t FlowNetwork::push(size_t source, size_t sink) {
  int64_t flow = 0;
  while (flow < kUncut && find_levels(source, sink)) {
    next_.assign(edges_of_.size(), 0);
    while (const int64_t pushed = push_along(source, sink)) {
      flow += pushed;
      if (flow >= kUncut) {
        break;  // two ways of this kind would be more than a number holds
      }
    }
  }
  return flow;
}

std::vector<bool> FlowNetwork::source_side(size_t source) const {
  std::vector<bool> reached(edges_of_.size(), false);
  reached[source] = true;
  std::vector<size_t> open = {source};
  while (!open.empty()) {
    const size_t node = open.back();
    open.pop_back();
    for (const size_t which : edges_of_[node]) {
      const Edge& edge = edges_[which];
      if (edge.room > 0 && !reached[edge.to]) {
        reached[edge.to] = true;
        open.push_back(edge.to);
      }
    }
  }
  return reached;
}

}  // namespace memswap
