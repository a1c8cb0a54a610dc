#include "cheapest_set.h"

#include <algorithm>
#include <set>
#include <utility>

#include "min_cut.h"

namespace memswap {
namespace {

// One cut, where `barred` storages are not made again. See [Note: What stays is a cut].
Fates cut(const MakingGraph& graph, const std::vector<bool>& barred) {
  const size_t storages = graph.storages.size();
  const auto had = [](size_t storage) { return 2 * storage; };
  const auto made_again = [](size_t storage) { return 2 * storage + 1; };
  const auto made = [&](size_t call) { return 2 * storages + call; };
  const size_t source = 2 * storages + graph.calls.size(), sink = source + 1;
  FlowNetwork network(sink + 1);
  for (size_t which = 0; which < storages; ++which) {
    const MakingGraph::Storage& storage = graph.storages[which];
    if (storage.needed) {
      network.add_edge(had(which), sink, FlowNetwork::kUncut);
    }
    const int64_t keep_cost = storage.there       ? 0
                              : storage.keep_cost ? *storage.keep_cost
                                                  : FlowNetwork::kUncut;
    network.add_edge(made_again(which), had(which), keep_cost);
    network.add_edge(had(which), made_again(which), FlowNetwork::kUncut);
    if (storage.maker && !barred[which]) {
      network.add_edge(made(*storage.maker), made_again(which), FlowNetwork::kUncut);
    } else {
      network.add_edge(source, made_again(which), FlowNetwork::kUncut);
    }
  }
  for (size_t call = 0; call < graph.calls.size(); ++call) {
    network.add_edge(source, made(call), graph.calls[call].cost);
    for (const size_t input : graph.calls[call].inputs) {
      network.add_edge(had(input), made(call), FlowNetwork::kUncut);
    }
  }
  network.push(source, sink);
  const std::vector<bool> no = network.source_side(source);
  Fates fates(storages, Fate::kUnused);
  for (size_t which = 0; which < storages; ++which) {
    if (!no[made_again(which)]) {
      fates[which] = Fate::kMadeAgain;
    } else if (!no[had(which)]) {
      fates[which] = Fate::kKept;
    }
  }
  return fates;
}

// How many calls in a row each storage takes; 0: none. Rows may be as long as a model: no
// recursion.
std::vector<int> depths(const MakingGraph& graph, const Fates& fates) {
  std::vector<int> depth(graph.storages.size(), 0);
  std::vector<bool> known(graph.storages.size(), false);
  std::vector<size_t> open;
  for (size_t first = 0; first < graph.storages.size(); ++first) {
    open.push_back(first);
    while (!open.empty()) {
      const size_t which = open.back();
      if (known[which] || fates[which] != Fate::kMadeAgain) {
        known[which] = true;
        open.pop_back();
        continue;
      }
      int before = 0;
      bool complete = true;
      for (const size_t input : graph.calls[*graph.storages[which].maker].inputs) {
        if (!known[input]) {
          open.push_back(input);
          complete = false;
        }
        before = std::max(before, depth[input]);
      }
      if (complete) {
        depth[which] = before + 1;
        known[which] = true;
        open.pop_back();
      }
    }
  }
  return depth;
}

// What backward needs of the row that ends with a storage: it is there from that demand on. What is
// kept for recipes alone is let go of at once.
std::vector<size_t> row_of(const MakingGraph& graph, const Fates& fates, size_t last) {
  std::vector<size_t> row;
  std::set<size_t> seen = {last};
  std::vector<size_t> open = {last};
  while (!open.empty()) {
    const size_t which = open.back();
    open.pop_back();
    const MakingGraph::Storage& storage = graph.storages[which];
    if (storage.needed && !storage.there) {
      row.push_back(which);
    }
    if (fates[which] == Fate::kMadeAgain) {
      for (const size_t input : graph.calls[*storage.maker].inputs) {
        if (seen.insert(input).second) {
          open.push_back(input);
        }
      }
    }
  }
  return row;
}

int64_t row_nbytes(const MakingGraph& graph, const Fates& fates, size_t last) {
  int64_t nbytes = 0;
  for (const size_t which : row_of(graph, fates, last)) {
    nbytes += graph.storages[which].nbytes;
  }
  return nbytes;
}

// Which storages end a row that is longer than it may be. Empty: none.
std::vector<size_t> too_long(const MakingGraph& graph, const Fates& fates, int most_calls,
                             int64_t most_nbytes) {
  std::vector<size_t> found;
  const std::vector<int> depth = depths(graph, fates);
  for (size_t which = 0; which < depth.size(); ++which) {
    if (depth[which] > 0 && depth[which] % (most_calls + 1) == 0) {
      found.push_back(which);
    }
  }
  if (!found.empty()) {
    return found;
  }
  std::vector<int64_t> rows(fates.size(), 0);
  for (size_t which = 0; which < fates.size(); ++which) {
    if (fates[which] == Fate::kMadeAgain) {
      rows[which] = row_nbytes(graph, fates, which) / most_nbytes;
    }
  }
  // The first of a row that goes beyond, and no other: its row begins anew there.
  for (size_t which = 0; which < fates.size(); ++which) {
    if (rows[which] > 0 && graph.storages[which].needed) {
      const auto& inputs = graph.calls[*graph.storages[which].maker].inputs;
      const bool again = std::any_of(inputs.begin(), inputs.end(), [&](size_t input) {
        return fates[input] == Fate::kMadeAgain;
      });
      const bool first = std::all_of(inputs.begin(), inputs.end(),
                                     [&](size_t input) { return rows[input] < rows[which]; });
      if (again && first) {
        found.push_back(which);
      }
    }
  }
  return found;
}

}  // namespace

Fates cheapest_set(const MakingGraph& graph, int deepest, int64_t most_row_nbytes) {
  std::vector<bool> barred(graph.storages.size(), false);
  while (true) {
    Fates fates = cut(graph, barred);
    const std::vector<size_t> ends = too_long(graph, fates, deepest, most_row_nbytes);
    if (ends.empty()) {
      return fates;
    }
    for (const size_t which : ends) {
      barred[which] = true;
    }
  }
}

int longest_row(const MakingGraph& graph, const Fates& fates) {
  const std::vector<int> depth = depths(graph, fates);
  return *std::max_element(depth.begin(), depth.end());
}

int64_t widest_row(const MakingGraph& graph, const Fates& fates) {
  int64_t widest = 0;
  for (size_t which = 0; which < fates.size(); ++which) {
    if (graph.storages[which].needed) {
      widest = std::max(widest, row_nbytes(graph, fates, which));
    }
  }
  return widest;
}

int64_t cost_of_calls(const MakingGraph& graph, const Fates& fates) {
  int64_t cost = 0;
  std::vector<bool> counted(graph.calls.size(), false);
  for (size_t which = 0; which < fates.size(); ++which) {
    if (fates[which] == Fate::kMadeAgain && !counted[*graph.storages[which].maker]) {
      counted[*graph.storages[which].maker] = true;
      cost += graph.calls[*graph.storages[which].maker].cost;
    }
  }
  return cost;
}

}  // namespace memswap
