// How much is there at once in backward: by counting, beside objects that hold their bytes.
#include "engine/backward_peak.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "making_graphs.h"

namespace memswap {
namespace {

// Bytes that are there for as long as somebody holds them.
struct Device {
  int64_t nbytes = 0;
  int64_t most = 0;
};

class Bytes {
 public:
  Bytes(Device& device, int64_t nbytes) : device_(device), nbytes_(nbytes) {
    device_.nbytes += nbytes;
    device_.most = std::max(device_.most, device_.nbytes);
  }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;
  ~Bytes() { device_.nbytes -= nbytes_; }

 private:
  Device& device_;
  const int64_t nbytes_;
};
using BytesPtr = std::shared_ptr<Bytes>;

// As the engine does it (entry.h, recipe.h), one object for each of its own.
class WalkedBackward {
 public:
  WalkedBackward(const MakingGraph& graph, const Fates& fates) : graph_(graph), fates_(fates) {
    std::vector<Handle> held;
    for (const size_t which : graph.saved) {
      if (!graph.storages[which].there) {
        saves_.emplace_back(entry_of(which));
        ++saves_.back()->handles;
      }
    }
  }

  int64_t most() {
    const auto largest = std::max_element(
        graph_.storages.begin(), graph_.storages.end(), [](const auto& one, const auto& other) {
          return (one.needed ? one.nbytes : 0) < (other.needed ? other.nbytes : 0);
        });
    device_.most = device_.nbytes + (largest->needed ? 3 * largest->nbytes : 0);
    while (!saves_.empty()) {
      const BytesPtr used = unpack(*saves_.back());
      saves_.pop_back();
    }
    EXPECT_EQ(device_.nbytes, 0) << "something is never let go of";
    return device_.most;
  }

 private:
  struct Entry;
  using Handle = std::shared_ptr<Entry>;
  struct Entry {
    size_t which;
    std::unique_ptr<Bytes> kept;
    std::vector<Handle> sources;
    BytesPtr storage;
    int handles = 0, unseen = 0;
  };
  using Results = std::map<size_t, BytesPtr>;

  const std::vector<size_t>& inputs_of(size_t which) const {
    return graph_.calls[*graph_.storages[which].maker].inputs;
  }

  // Of what is saved now, or for a recipe.
  Handle entry_of(size_t which) {
    if (Handle known = entries_[which].lock()) {
      return known;
    }
    auto entry = std::make_shared<Entry>();
    entry->which = which;
    if (fates_[which] == Fate::kKept) {
      entry->kept = std::make_unique<Bytes>(device_, *graph_.storages[which].keep_cost);
    } else {
      take_sources(*entry, which);
    }
    entries_[which] = entry;
    return entry;
  }

  bool is_known(size_t which) { return !entries_[which].expired(); }

  void take_sources(Entry& entry, size_t made) {
    for (const size_t input : inputs_of(made)) {
      const bool seen = std::any_of(entry.sources.begin(), entry.sources.end(),
                                    [&](const Handle& one) { return one->which == input; });
      if (graph_.storages[input].there || seen) {
        continue;
      }
      if (fates_[input] == Fate::kKept || (graph_.storages[input].needed && is_known(input))) {
        entry.sources.push_back(entry_of(input));
        ++entry.sources.back()->handles;
      } else {
        take_sources(entry, input);
      }
    }
  }

  BytesPtr unpack(Entry& entry) {
    if (!entry.storage) {
      entry.storage = entry.kept ? make(entry.which) : run(entry);
      entry.unseen = entry.handles;
    }
    BytesPtr found = entry.storage;
    if (--entry.unseen == 0) {
      entry.storage.reset();
    }
    return found;
  }

  BytesPtr make(size_t which) {
    return std::make_shared<Bytes>(device_, graph_.storages[which].nbytes);
  }

  BytesPtr run(Entry& entry) {
    std::vector<BytesPtr> given;
    for (const Handle& source : entry.sources) {
      given.push_back(unpack(*source));
    }
    std::map<size_t, int> readers;
    count_readers(entry, entry.which, readers);
    std::map<size_t, Results> made;
    call(entry, entry.which, readers, made);
    Results results = std::move(made[*graph_.storages[entry.which].maker]);
    for (auto& [other, bytes] : results) {
      const Handle sibling = other == entry.which ? nullptr : entries_[other].lock();
      if (sibling && graph_.storages[other].needed && !sibling->storage) {
        sibling->storage = bytes;
        sibling->unseen = sibling->handles;
      }
    }
    return results.at(entry.which);
  }

  bool is_given(const Entry& entry, size_t which) const {
    return graph_.storages[which].there ||
           std::any_of(entry.sources.begin(), entry.sources.end(),
                       [&](const Handle& one) { return one->which == which; });
  }

  void count_readers(const Entry& entry, size_t which, std::map<size_t, int>& readers) const {
    for (const size_t input : inputs_of(which)) {
      if (!is_given(entry, input) && ++readers[*graph_.storages[input].maker] == 1) {
        count_readers(entry, input, readers);
      }
    }
  }

  void call(const Entry& entry, size_t which, std::map<size_t, int>& readers,
            std::map<size_t, Results>& made) {
    const size_t number = *graph_.storages[which].maker;
    if (made.contains(number)) {
      return;
    }
    for (const size_t input : inputs_of(which)) {
      if (!is_given(entry, input)) {
        call(entry, input, readers, made);
      }
    }
    for (size_t one = 0; one < fates_.size(); ++one) {
      if (graph_.storages[one].maker == number && fates_[one] == Fate::kMadeAgain &&
          !graph_.storages[one].there) {
        made[number][one] = make(one);
      }
    }
    for (const size_t input : inputs_of(which)) {
      if (!is_given(entry, input)) {
        const size_t maker = *graph_.storages[input].maker;
        if (--readers[maker] == 0) {
          made[maker].clear();
        }
      }
    }
  }

  const MakingGraph& graph_;
  const Fates& fates_;
  Device device_;
  std::map<size_t, std::weak_ptr<Entry>> entries_;
  std::vector<Handle> saves_;
};

// Each storage that can be made again is, or is kept, whatever comes.
Fates random_fates(std::mt19937& random, const MakingGraph& graph) {
  Fates fates(graph.storages.size(), Fate::kUnused);
  std::vector<size_t> open;
  for (size_t which = 0; which < fates.size(); ++which) {
    if (graph.storages[which].needed) {
      open.push_back(which);
    }
  }
  while (!open.empty()) {
    const size_t which = open.back();
    open.pop_back();
    const MakingGraph::Storage& storage = graph.storages[which];
    if (fates[which] != Fate::kUnused) {
      continue;
    }
    if (!storage.there && !storage.keep_cost && !storage.maker) {
      return {};  // it cannot be had
    }
    const bool again = !storage.there && storage.maker && (!storage.keep_cost || random() % 3 != 0);
    fates[which] = again ? Fate::kMadeAgain : Fate::kKept;
    if (again) {
      const auto& inputs = graph.calls[*storage.maker].inputs;
      open.insert(open.end(), inputs.begin(), inputs.end());
    }
  }
  return fates;
}

TEST(BackwardPeak, IsWhatObjectsComeToThatHoldTheirBytes) {
  std::mt19937 random(11);
  int tried = 0, in_backward = 0;
  for (int round = 0; round < 4000; ++round) {
    MakingGraph graph = random_forward(random, 3 + random() % 14);
    for (size_t more = random() % 3; more > 0 && !graph.saved.empty(); --more) {
      graph.saved.push_back(graph.saved[random() % graph.saved.size()]);
    }
    const Fates fates = random_fates(random, graph);
    if (fates.empty()) {
      continue;
    }
    const BackwardPeak peak = backward_peak(graph, fates);
    ASSERT_EQ(peak.nbytes, WalkedBackward(graph, fates).most()) << "round " << round;
    ++tried;
    in_backward += peak.there.empty() ? 0 : 1;
  }
  EXPECT_GT(tried, 2000);
  EXPECT_GT(in_backward, 200) << "hardly any of them has its peak in backward";
}

// A stays; B, C and D are made of it one after another, and only D is saved: a large B and C.
TEST(BackwardPeak, WhatARecipeMakesOnTheWayIsThereAsWell) {
  MakingGraph graph;
  graph.storages = {{.nbytes = 10, .keep_cost = 10, .needed = true},
                    {.nbytes = 500, .maker = 0},
                    {.nbytes = 700, .maker = 1},
                    {.nbytes = 10, .keep_cost = 10, .maker = 2, .needed = true}};
  graph.calls = {
      {.cost = 1, .inputs = {0}}, {.cost = 1, .inputs = {1}}, {.cost = 1, .inputs = {2}}};
  graph.saved = {0, 3};
  using enum Fate;
  const BackwardPeak peak = backward_peak(graph, {kKept, kMadeAgain, kMadeAgain, kMadeAgain});
  EXPECT_EQ(peak.nbytes, 10 + 10 + 500 + 700);
  EXPECT_EQ(peak.there, (std::vector<size_t>{0, 1, 2}));
}

// Each sum of a stream is demanded for itself, and all of a row come back with the last one.
TEST(BackwardPeak, WhatBackwardNeedsLaterStaysFromItsFirstUseOn) {
  MakingGraph graph;
  graph.storages = {{.nbytes = 100, .keep_cost = 60, .needed = true}};
  graph.saved = {0};
  for (size_t sum = 1; sum <= 4; ++sum) {
    graph.calls.push_back({.cost = 1, .inputs = {sum - 1}});
    graph.storages.push_back({.nbytes = 100, .keep_cost = 60, .maker = sum - 1, .needed = true});
    graph.saved.push_back(sum);
  }
  using enum Fate;
  EXPECT_EQ(backward_peak(graph, {kKept, kMadeAgain, kMadeAgain, kMadeAgain, kMadeAgain}).nbytes,
            60 + 5 * 100);
  EXPECT_EQ(backward_peak(graph, {kKept, kMadeAgain, kKept, kMadeAgain, kMadeAgain}).nbytes,
            2 * 60 + 3 * 100);
}

}  // namespace
}  // namespace memswap
