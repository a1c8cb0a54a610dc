#include "lowest_peak.h"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "backward_peak.h"
#include "cheapest_set.h"

namespace memswap {
namespace {

// Storages of all the choices whose peaks are compared, at most: some tenths of a second.
constexpr size_t kMostWork = 400'000;

// The same choice without what nobody asks for.
Fates only_used(const MakingGraph& graph, const Fates& fates) {
  Fates used(fates.size(), Fate::kUnused);
  std::vector<size_t> open;
  for (size_t which = 0; which < fates.size(); ++which) {
    if (graph.storages[which].needed) {
      open.push_back(which);
    }
  }
  while (!open.empty()) {
    const size_t which = open.back();
    open.pop_back();
    if (used[which] == Fate::kUnused) {
      used[which] = fates[which];
      if (fates[which] == Fate::kMadeAgain) {
        const auto& inputs = graph.calls[*graph.storages[which].maker].inputs;
        open.insert(open.end(), inputs.begin(), inputs.end());
      }
    }
  }
  return used;
}

// A choice, and what it comes to. See [Note: The lowest peak].
struct Choice {
  Choice(const MakingGraph& graph, Fates chosen)
      : fates(std::move(chosen)),
        peak(backward_peak(graph, fates)),
        cost(peak.nbytes + cost_of_calls(graph, fates)) {}

  // `most_nbytes`: that the peak should not exceed.
  bool better_than(const Choice& other, int64_t most_nbytes) const {
    return std::pair(over(most_nbytes), cost) < std::pair(other.over(most_nbytes), other.cost);
  }

  int64_t over(int64_t most_nbytes) const {
    return std::max<int64_t>(peak.nbytes - most_nbytes, 0);
  }

  Fates fates;
  BackwardPeak peak;
  int64_t cost;
};

// What is tried to find better ones.
struct Attempts {
  int64_t most_nbytes;
  int left;
};

// What is made again is kept.
std::optional<Fates> kept_instead(const MakingGraph& graph, Fates fates, size_t which) {
  if (fates[which] != Fate::kMadeAgain || !graph.storages[which].keep_cost) {
    return std::nullopt;
  }
  fates[which] = Fate::kKept;
  return only_used(graph, fates);
}

// What is kept is made again, of what is had already or can be kept.
std::optional<Fates> made_instead(const MakingGraph& graph, Fates fates, size_t which,
                                  int deepest) {
  const MakingGraph::Storage& storage = graph.storages[which];
  if (fates[which] != Fate::kKept || storage.there || !storage.maker) {
    return std::nullopt;
  }
  fates[which] = Fate::kMadeAgain;
  for (const size_t input : graph.calls[*storage.maker].inputs) {
    if (fates[input] == Fate::kUnused) {
      if (!graph.storages[input].there && !graph.storages[input].keep_cost) {
        return std::nullopt;
      }
      fates[input] = Fate::kKept;
    }
  }
  fates = only_used(graph, fates);
  return longest_row(graph, fates) <= deepest ? std::optional(std::move(fates)) : std::nullopt;
}

// The same with one change after another, for as long as they are for the better: of all that
// `change` offers for one of `candidates` the best.
template <class Candidates, class Change>
Choice lowered(const MakingGraph& graph, Choice choice, Attempts& attempts,
               const Candidates& candidates, const Change& change) {
  bool lower = true;
  while (std::exchange(lower, false)) {
    Choice best = choice;
    for (const size_t which : candidates(choice)) {
      std::optional<Fates> fates = change(choice.fates, which);
      if (!fates) {
        continue;
      }
      if (attempts.left-- <= 0) {
        break;
      }
      Choice tried(graph, std::move(*fates));
      if (tried.better_than(best, attempts.most_nbytes)) {
        best = std::move(tried);
        lower = true;
      }
    }
    choice = std::move(best);
  }
  return choice;
}

// What is there at the peak is kept instead.
Choice lowered(const MakingGraph& graph, Choice choice, Attempts& attempts) {
  return lowered(
      graph, std::move(choice), attempts,
      [](const Choice& of) { return std::set<size_t>(of.peak.there.begin(), of.peak.there.end()); },
      [&](const Fates& fates, size_t which) { return kept_instead(graph, fates, which); });
}

// Or anything is made again instead.
Choice lowered_further(const MakingGraph& graph, Choice choice, Attempts& attempts, int deepest) {
  std::vector<size_t> all(graph.storages.size());
  std::iota(all.begin(), all.end(), size_t{0});
  return lowered(
      graph, std::move(choice), attempts, [&](const Choice&) { return all; },
      [&](const Fates& fates, size_t which) {
        return fates[which] == Fate::kKept ? made_instead(graph, fates, which, deepest)
                                           : kept_instead(graph, fates, which);
      });
}

Fates all_kept(const MakingGraph& graph) {
  Fates fates(graph.storages.size(), Fate::kUnused);
  for (size_t which = 0; which < fates.size(); ++which) {
    fates[which] = graph.storages[which].needed ? Fate::kKept : Fate::kUnused;
  }
  return fates;
}

// One storage, judged by itself.
class Alone {
 public:
  Alone(const MakingGraph& graph, const ChoiceLimits& limits)
      : graph_(graph),
        limits_(limits),
        fates_(graph.storages.size(), Fate::kUnused),
        depths_(graph.storages.size(), 0) {}

  void judge(size_t which) {
    if (fates_[which] == Fate::kKept || graph_.storages[which].there) {
      fates_[which] = Fate::kKept;
      return;  // it is kept for what was judged before
    }
    Row row;
    const auto most_extra =
        limits_.most_extra * static_cast<double>(graph_.storages[which].keep_cost.value_or(0));
    const bool made = add_call(which, limits_.deepest, row) && row.depth <= limits_.deepest &&
                      static_cast<double>(row.extra_nbytes) <= most_extra &&
                      !(row.extra_nbytes > 0 && row.reads_recipes);
    if (!made) {
      fates_[which] = Fate::kKept;
      saved_.insert(which);
      return;
    }
    for (const auto& [one, fate] : row.fates) {
      if (fates_[one] != Fate::kKept) {
        fates_[one] = fate;
      }
    }
    depths_[which] = row.depth;
    saved_.insert(which);
  }

  Fates fates() && { return std::move(fates_); }

 private:
  struct Row {
    std::vector<std::pair<size_t, Fate>> fates;
    int depth = 0;
    int64_t extra_nbytes = 0;
    bool reads_recipes = false;
  };

  // The call that made a storage, and what it takes to have its inputs. False: it cannot be made.
  bool add_call(size_t which, int deepest, Row& row) {
    if (!graph_.storages[which].maker) {
      return false;
    }
    int depth = 1;
    row.fates.emplace_back(which, Fate::kMadeAgain);
    for (const size_t input : graph_.calls[*graph_.storages[which].maker].inputs) {
      const MakingGraph::Storage& storage = graph_.storages[input];
      if (storage.there || fates_[input] == Fate::kKept || saved_.contains(input)) {
        depth = std::max(depth, 1 + depths_[input]);
        row.reads_recipes = row.reads_recipes || depths_[input] > 0;
        row.fates.emplace_back(input, storage.there ? Fate::kKept : fates_[input]);
        continue;
      }
      Row further = row;
      if (deepest > 1 && add_call(input, deepest - 1, further)) {
        depth = std::max(depth, 1 + further.depth);
        row = std::move(further);
      } else if (storage.keep_cost) {
        row.fates.emplace_back(input, Fate::kKept);
        row.extra_nbytes += storage.nbytes;
      } else {
        return false;
      }
    }
    row.depth = depth;
    return true;
  }

  const MakingGraph& graph_;
  const ChoiceLimits& limits_;
  Fates fates_;
  std::vector<int> depths_;  // of what is made again, among what was judged
  std::set<size_t> saved_;
};

}  // namespace

Fates judged_alone(const MakingGraph& graph, const ChoiceLimits& limits) {
  Alone alone(graph, limits);
  std::vector<bool> judged(graph.storages.size(), false);
  for (const size_t which : graph.saved) {
    if (!judged[which]) {
      alone.judge(which);
      judged[which] = true;
    }
  }
  return only_used(graph, std::move(alone).fates());
}

Fates lowest_peak(const MakingGraph& graph, const ChoiceLimits& limits) {
  if (graph.storages.empty()) {
    return {};
  }
  const Fates cheapest = cheapest_set(graph, limits.deepest);
  std::vector<Fates> begin = {cheapest, judged_alone(graph, limits), all_kept(graph)};
  const int64_t widest = widest_row(graph, cheapest);
  for (const int64_t parts : {2, 3, 4, 8}) {
    begin.push_back(cheapest_set(graph, limits.deepest, std::max<int64_t>(widest / parts, 1)));
  }
  std::vector<Choice> choices;
  for (Fates& fates : begin) {
    choices.emplace_back(graph, std::move(fates));
  }
  // Of what is judged alone, and of nothing made again.
  const int64_t most_nbytes = std::min(choices[1].peak.nbytes, choices[2].peak.nbytes);
  std::stable_sort(choices.begin(), choices.end(), [&](const Choice& one, const Choice& other) {
    return one.better_than(other, most_nbytes);
  });
  const auto most = static_cast<int>(kMostWork / graph.storages.size());
  Attempts attempts{.most_nbytes = most_nbytes, .left = most / 2};
  std::optional<Choice> best;
  for (Choice& from : choices) {
    Choice choice = lowered(graph, std::move(from), attempts);
    if (!best || choice.better_than(*best, most_nbytes)) {
      best = std::move(choice);
    }
  }
  attempts.left += most - most / 2;
  return lowered_further(graph, std::move(*best), attempts, limits.deepest).fates;
}

}  // namespace memswap
