#include "backward_peak.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

namespace memswap {
namespace {

// What is there around an operator of the forward, in storages as large as the largest: its input,
// its result, and the room of a frame that is being made.
constexpr int64_t kAroundOperator = 3;

// A backward that only counts. See [Note: What is there at once].
class Backward {
 public:
  Backward(const MakingGraph& graph, const Fates& fates)
      : graph_(graph), fates_(fates), storages_(graph.storages.size()) {
    results_.resize(graph.calls.size());
    for (size_t time = graph.saved.size(); time > 0; --time) {
      storages_[graph.saved[time - 1]].saved_at = time - 1;
    }
    int64_t largest = 0;
    for (size_t which = 0; which < storages_.size(); ++which) {
      const MakingGraph::Storage& storage = graph.storages[which];
      largest = std::max(largest, storage.needed ? storage.nbytes : 0);
      if (storage.there) {
        continue;
      }
      if (fates[which] == Fate::kKept) {
        nbytes_ += storage.keep_cost.value_or(0);
      } else if (fates[which] == Fate::kMadeAgain) {
        results_[*storage.maker].push_back(which);
        if (storage.needed) {
          std::vector<size_t> seen;
          take_sources(which, which, seen);
        }
      }
    }
    for (const size_t which : graph.saved) {
      share(which);
    }
    peak_.nbytes = nbytes_ + kAroundOperator * largest;
  }

  BackwardPeak run() && {
    for (auto demand = graph_.saved.rbegin(); demand != graph_.saved.rend(); ++demand) {
      if (!graph_.storages[*demand].there) {
        see(*demand);
        let_go(*demand);
        end_share(*demand);
      }
    }
    return std::move(peak_);
  }

 private:
  struct Storage {
    size_t saved_at = 0;          // first
    std::vector<size_t> sources;  // of its recipe, each once
    int64_t shares = 0;           // saves that are not over, and recipes that are alive
    int64_t unseen = 0;           // of them, those that have not had the bytes
    bool there = false;           // for the unseen ones
    int64_t users = 0;            // who have had the bytes and hold them still
  };

  // A recipe reads what is kept, and what had been saved when its result was; the rest it makes on
  // the way.
  bool is_source(size_t which, size_t result) const {
    return fates_[which] == Fate::kKept || (graph_.storages[which].needed &&
                                            storages_[which].saved_at < storages_[result].saved_at);
  }

  const std::vector<size_t>& inputs_of(size_t which) const {
    return graph_.calls[*graph_.storages[which].maker].inputs;
  }

  void share(size_t which) {
    ++storages_[which].shares;
    ++storages_[which].unseen;
  }

  // What a recipe reads, in the order in which it has it come back.
  void take_sources(size_t result, size_t made, std::vector<size_t>& seen) {
    for (const size_t input : inputs_of(made)) {
      if (graph_.storages[input].there ||
          std::find(seen.begin(), seen.end(), input) != seen.end()) {
        continue;
      }
      seen.push_back(input);
      if (is_source(input, result)) {
        storages_[result].sources.push_back(input);
        share(input);
      } else {
        take_sources(result, input, seen);
      }
    }
  }

  void add(size_t which) {
    there_.push_back(which);
    nbytes_ += graph_.storages[which].nbytes;
    if (nbytes_ > peak_.nbytes) {
      peak_ = {nbytes_, there_};
    }
  }

  void remove(size_t which) {
    there_.erase(std::find(there_.begin(), there_.end(), which));
    nbytes_ -= graph_.storages[which].nbytes;
  }

  // Somebody who has a share asks for the bytes, and holds them.
  void see(size_t which) {
    Storage& storage = storages_[which];
    if (!storage.there) {
      bring(which);
    }
    ++storage.users;
    storage.there = --storage.unseen > 0;
  }

  void let_go(size_t which) {
    if (--storages_[which].users == 0 && !storages_[which].there) {
      remove(which);
    }
  }

  void bring(size_t which) {
    if (fates_[which] == Fate::kMadeAgain) {
      const std::vector<size_t>& sources = storages_[which].sources;
      for (const size_t source : sources) {
        see(source);
      }
      run_recipe(which);
      for (const size_t source : sources) {
        let_go(source);
      }
    } else {
      add(which);
    }
    storages_[which].there = true;
  }

  void run_recipe(size_t result) {
    std::unordered_map<size_t, int64_t> readers;  // of a call, that are still to come
    std::vector<size_t> open = {result};
    while (!open.empty()) {
      const size_t made = open.back();
      open.pop_back();
      for (const size_t input : inputs_of(made)) {
        if (makes_on_the_way(input, result) && ++readers[*graph_.storages[input].maker] == 1) {
          open.push_back(input);
        }
      }
    }
    std::unordered_map<size_t, std::vector<size_t>> made;
    make(result, result, readers, made);
    for (const size_t one : made[*graph_.storages[result].maker]) {
      // One run serves all that wait for it.
      const bool waits = graph_.storages[one].needed && storages_[one].shares > 0;
      if (one != result && (!waits || std::exchange(storages_[one].there, true))) {
        remove(one);
      }
    }
  }

  bool makes_on_the_way(size_t which, size_t result) const {
    return !graph_.storages[which].there && !is_source(which, result);
  }

  // Of one call all results; what it has read last is let go of.
  void make(size_t which, size_t result, std::unordered_map<size_t, int64_t>& readers,
            std::unordered_map<size_t, std::vector<size_t>>& made) {
    const size_t call = *graph_.storages[which].maker;
    if (made.contains(call)) {
      return;
    }
    for (const size_t input : inputs_of(which)) {
      if (makes_on_the_way(input, result)) {
        make(input, result, readers, made);
      }
    }
    std::vector<size_t>& results = made[call];
    for (const size_t one : results_[call]) {
      add(one);
      results.push_back(one);
    }
    for (const size_t input : inputs_of(which)) {
      if (makes_on_the_way(input, result)) {
        const size_t maker = *graph_.storages[input].maker;
        if (--readers[maker] == 0) {
          for (const size_t one : std::exchange(made[maker], {})) {
            remove(one);
          }
        }
      }
    }
  }

  // A save is over, or a recipe that nobody will run. With the last share ends what is kept.
  void end_share(size_t first) {
    std::vector<size_t> open = {first};
    while (!open.empty()) {
      const size_t which = open.back();
      open.pop_back();
      Storage& storage = storages_[which];
      if (--storage.shares > 0) {
        continue;
      }
      if (std::exchange(storage.there, false) && storage.users == 0) {
        remove(which);
      }
      if (fates_[which] == Fate::kKept) {
        nbytes_ -= graph_.storages[which].keep_cost.value_or(0);
      }
      open.insert(open.end(), storage.sources.begin(), storage.sources.end());
    }
  }

  const MakingGraph& graph_;
  const Fates& fates_;
  std::vector<Storage> storages_;
  std::vector<std::vector<size_t>> results_;  // by call, what is made again of them
  int64_t nbytes_ = 0;
  std::vector<size_t> there_;
  BackwardPeak peak_;
};

}  // namespace

BackwardPeak backward_peak(const MakingGraph& graph, const Fates& fates) {
  return Backward(graph, fates).run();
}

}  // namespace memswap
