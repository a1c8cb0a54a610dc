// Iteration and Timeline: what one iteration predicts about the next, of storages that nobody
// reads.
#include "engine/iteration.h"

#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/engine.h"

namespace memswap {
namespace {

using Sizes = std::vector<int64_t>;
using Places = std::vector<size_t>;
using Asked = std::vector<Places>;  // for, ahead of each demand

constexpr const char* kAtOnce = reasons::kNeededAtOnce;

Places reversed(size_t count) {
  Places order;
  while (count-- > 0) {
    order.push_back(count);
  }
  return order;
}

class Iterations : public ::testing::Test {
 protected:
  // An iteration in which storages of these sizes were saved, and what was said of each.
  struct Forward {
    IterationPtr iteration;
    std::vector<EntryPtr> entries;
    std::vector<const char*> verdicts;

    Asked backward(const Places& order) const {
      Asked asked;
      for (const size_t index : order) {
        asked.push_back(demand(index));
      }
      return asked;
    }
    Places demand(size_t index) const {
      Places asked;
      for (const EntryPtr& entry : iteration->demand(index)) {
        asked.push_back(entry->index());
      }
      return asked;
    }
  };

  EntryPtr new_entry() {
    const at::Tensor tensor = at::empty({1});
    return Entry::make(engine, *SavedView::capture(tensor), StorageRef(tensor.storage()));
  }

  void save(Forward& forward, int64_t nbytes, bool decoded = false,
            int64_t group = Iteration::kNoGroup) {
    forward.verdicts.push_back(forward.iteration->admit(nbytes, decoded, group));
    forward.entries.push_back(new_entry());
    forward.iteration->place(forward.entries.back());
  }

  Forward forward(Timeline& timeline, const Sizes& sizes, bool decoded = false) {
    Forward made{.iteration = timeline.begin(), .entries = {}, .verdicts = {}};
    for (const int64_t nbytes : sizes) {
      save(made, nbytes, decoded);
    }
    return made;
  }

  // An iteration of two decoded storages to a window each way, as its backward has left it.
  template <class Rooms>
  Forward layered(Timeline timeline, Rooms rooms, size_t count = 40) {
    Forward made{.iteration = timeline.begin(), .entries = {}, .verdicts = {}};
    for (size_t index = 0; index < count; ++index) {
      if (index % 2 == 0) {
        made.iteration->open_window(0);
      }
      save(made, 50, /*decoded=*/true);
    }
    for (const size_t index : reversed(count)) {
      if (index % 2 == 1) {
        made.iteration->open_window(rooms(index));
      }
      made.iteration->demand(index);
    }
    return made;
  }

  EnginePtr engine = std::make_shared<Engine>(/*prefetch_bytes=*/0);
};

// A plan that knows so many storages, and what their demands bring back.
std::shared_ptr<Plan> plan_of(const std::vector<std::pair<size_t, Places>>& fetches, size_t count) {
  auto plan = std::make_shared<Plan>(Plan{.device = c10::Device(c10::kCPU)});
  plan->places.resize(count);
  for (const auto& [index, places] : fetches) {
    plan->places[index].fetches = places;
  }
  return plan;
}

TEST_F(Iterations, TheFirstBackwardExpectsTheReverseOrderAndNothingElseIsKnown) {
  Timeline timeline(100);
  const Forward first = forward(timeline, Sizes(5, 50));
  EXPECT_EQ(first.verdicts, std::vector<const char*>(5, nullptr));
  EXPECT_EQ(first.backward({4, 3, 2, 1, 0}), (Asked{{3, 2}, {1}, {0}, {}, {}}));
}

TEST_F(Iterations, AWindowOfZeroAsksForNothingAhead) {
  Timeline timeline(0);
  for (int times = 0; times < 2; ++times) {
    const Forward made = forward(timeline, Sizes(4, 50));
    EXPECT_EQ(made.verdicts, std::vector<const char*>(4, nullptr));
    EXPECT_EQ(made.backward({3, 2, 1, 0}), Asked(4));
  }
}

TEST_F(Iterations, WhatBackwardWantsFirstStaysUpToTheWindow) {
  Timeline timeline(120);
  forward(timeline, Sizes(5, 50)).backward(reversed(5));
  EXPECT_EQ(forward(timeline, Sizes(5, 50)).verdicts,
            (std::vector<const char*>{nullptr, nullptr, nullptr, kAtOnce, kAtOnce}));
}

TEST_F(Iterations, APredictionFollowsTheRecordedOrderNotThatOfSaving) {
  Timeline timeline(50);
  const Places order{1, 3, 0, 2};
  forward(timeline, Sizes(4, 50)).backward(order);
  const Forward next = forward(timeline, Sizes(4, 50));
  EXPECT_EQ(next.verdicts, (std::vector<const char*>{nullptr, kAtOnce, nullptr, nullptr}));
  EXPECT_EQ(next.backward(order), (Asked{{3}, {0}, {2}, {}}));
}

TEST_F(Iterations, BytesAheadNeverExceedTheWindowAndEachStorageIsAskedForOnce) {
  const Sizes sizes{40, 10, 30, 50, 20, 10, 10};
  for (const int64_t window : {0, 10, 35, 60, 150}) {
    Timeline timeline(window);
    for (int times = 0; times < 3; ++times) {
      const Forward made = forward(timeline, sizes);
      std::set<size_t> waiting, asked;
      for (const size_t index : reversed(sizes.size())) {
        waiting.erase(index);
        for (const size_t ahead : made.demand(index)) {
          EXPECT_TRUE(asked.insert(ahead).second) << "a storage was asked for twice";
          waiting.insert(ahead);
        }
        int64_t nbytes = 0;
        for (const size_t one : waiting) {
          nbytes += sizes[one];
        }
        EXPECT_LE(nbytes, window);
      }
    }
  }
}

// Saved tensors: last saved first; checkpoint regions replay their forward.
TEST_F(Iterations, TheFirstGuessGoesBackByRegions) {
  constexpr int64_t kNone = Iteration::kNoGroup;
  const std::vector<std::pair<Sizes, Places>> cases = {
      {{kNone, kNone, kNone}, {2, 1, 0}},
      {{0, 0, 2, 2, 2, kNone, 6}, {6, 5, 2, 3, 4, 0, 1}},
      {{3}, {0}},
  };
  for (const auto& [groups, order] : cases) {
    Forward made{
        .iteration = std::make_shared<Iteration>(nullptr, 1 << 20), .entries = {}, .verdicts = {}};
    for (const int64_t group : groups) {
      save(made, 1, false, group);
    }
    EXPECT_EQ(made.demand(order[0]), Places(order.begin() + 1, order.end()));
  }
}

TEST_F(Iterations, ASecondDemandOfTheSameStorageAsksForNothing) {
  Timeline timeline(100);
  const Forward made = forward(timeline, Sizes(4, 50));
  EXPECT_FALSE(made.iteration->began_backward());
  EXPECT_FALSE(made.demand(3).empty());
  EXPECT_TRUE(made.iteration->began_backward());
  EXPECT_TRUE(made.demand(3).empty()) << "a retained graph's second backward prefetches again";
  EXPECT_EQ(made.iteration->order().demanded(), Places{3});
}

TEST_F(Iterations, ChangedSizesEndTheGuessingFromThereOn) {
  Timeline timeline(100);
  forward(timeline, Sizes(4, 50)).backward({3, 2, 1, 0});
  EXPECT_EQ(forward(timeline, {50, 60, 50, 50}).verdicts, std::vector<const char*>(4, nullptr))
      << "a forecast for other sizes was believed";
}

TEST_F(Iterations, LongerAndShorterIterationsThanTheForecast) {
  Timeline timeline(60);
  for (const size_t count : {4, 6, 2, 1, 5, 5}) {
    const Forward made = forward(timeline, Sizes(count, 50));
    for (const Places& asked : made.backward(reversed(count))) {
      for (const size_t index : asked) {
        EXPECT_LT(index, count);
      }
    }
  }
}

TEST_F(Iterations, WhatWasHeldIsNotSentAgain) {
  Timeline timeline(0);
  const Forward made = forward(timeline, Sizes(3, 50));
  made.iteration->note_never_freed(1);
  made.backward({2, 1, 0});
  EXPECT_EQ(forward(timeline, Sizes(3, 50)).verdicts,
            (std::vector<const char*>{nullptr, reasons::kNeverFreed, nullptr}));
}

TEST_F(Iterations, AnIterationWithoutBackwardTeachesNothing) {
  Timeline timeline(50);
  forward(timeline, Sizes(3, 50)).backward({2, 1, 0});
  forward(timeline, {10, 20});  // evaluation with gradients, dropped
  EXPECT_EQ(forward(timeline, Sizes(3, 50)).verdicts,
            (std::vector<const char*>{nullptr, nullptr, kAtOnce}));
}

// 1F1B: the forecast comes from the last iteration whose backward began.
TEST_F(Iterations, SeveralIterationsAreAliveAtOnce) {
  Timeline timeline(50);
  std::vector<Forward> alive;
  for (int times = 0; times < 3; ++times) {
    alive.push_back(forward(timeline, Sizes(3, 50)));
  }
  for (const Forward& made : alive) {
    EXPECT_EQ(made.backward({2, 1, 0}), (Asked{{1}, {0}, {}}));
  }
  EXPECT_EQ(forward(timeline, Sizes(3, 50)).verdicts,
            (std::vector<const char*>{nullptr, nullptr, kAtOnce}));
}

TEST_F(Iterations, DeadEntriesAreNotAskedFor) {
  Timeline timeline(1000);
  Forward made = forward(timeline, Sizes(4, 50));
  made.entries[1].reset();
  EXPECT_EQ(made.demand(3), (Places{2, 0}));
}

TEST_F(Iterations, TheAutomaticWindowIsAnEighthAndNeverLessThanTheLargest) {
  const std::vector<std::tuple<Sizes, std::optional<int64_t>, int64_t>> cases = {
      {{}, std::nullopt, 0},
      {{100, 10}, std::nullopt, 100},
      {Sizes(80, 10), std::nullopt, 100},
      {Sizes(80, 10), 7, 7},
  };
  for (const auto& [sizes, window, expected] : cases) {
    Timeline timeline(window);
    EXPECT_EQ(forward(timeline, sizes).iteration->prefetch_bytes(), expected);
  }
}

TEST_F(Iterations, TheAutomaticWindowIsShorterForWhatIsDecoded) {
  Iteration iteration(nullptr, std::nullopt);
  for (int times = 0; times < 320; ++times) {
    iteration.admit(10, /*decoded=*/true, Iteration::kNoGroup);
  }
  EXPECT_EQ(iteration.prefetch_bytes(), 100) << "a thirty-second of what is encoded";
  iteration.admit(800, false, Iteration::kNoGroup);
  EXPECT_EQ(iteration.prefetch_bytes(), 800);
  iteration.admit(800, true, Iteration::kNoGroup);
  EXPECT_EQ(iteration.prefetch_bytes(), 1000) << "the largest and what is around it";
}

TEST_F(Iterations, DecodesAreAheadByTheDemandsOfTwoWindows) {
  for (const double room_bytes : {0.0, 100.0, 1000.0}) {
    const Forward made = layered(Timeline(std::nullopt), [&](size_t) { return room_bytes; });
    EXPECT_EQ(made.iteration->order().bytes_ahead(), (2 + 2 + 1) * 50)
        << "one lies beside its frame";
    EXPECT_EQ(made.iteration->own_prefetch_bytes(), 250);
    EXPECT_EQ(made.iteration->least_prefetch_bytes(), 62)
        << "without windows, the largest and what is around it";
  }
}

TEST_F(Iterations, BeforeTheFirstBackwardTheWindowsOfTheForwardSayHowFarAhead) {
  Iteration iteration(nullptr, std::nullopt);
  EXPECT_EQ(iteration.order().bytes_ahead(), 0);
  for (int index = 0; index < 40; ++index) {
    if (index % 2 == 0) {
      iteration.open_window(0);
    }
    iteration.admit(50, true, Iteration::kNoGroup);
  }
  EXPECT_EQ(iteration.own_prefetch_bytes(), 250);
}

TEST_F(Iterations, WindowsTooShortForTheirDecodesAreMadeUpForByEarlierOnes) {
  // Each window has room for two decodes. That of 15 has none: its two are due a window earlier.
  const auto ahead = [&](auto rooms) {
    return layered(Timeline(std::nullopt), rooms).iteration->order().bytes_ahead();
  };
  const int64_t even = ahead([](size_t) { return 100; });
  EXPECT_EQ(ahead([](size_t index) { return index == 15 ? 1 : 100; }), even + 100);
  const Forward starved = layered(Timeline(std::nullopt), [](size_t) { return 1; });
  EXPECT_GT(starved.iteration->order().bytes_ahead(), 1000)
      << "decodes that never keep up begin at once";
  EXPECT_EQ(starved.iteration->own_prefetch_bytes(), 500) << "within a quarter of what is encoded";
  EXPECT_EQ(ahead([](size_t index) { return index == 15 ? 0 : 1; }), 250)
      << "an operator that was not measured says nothing about time";
  EXPECT_EQ(layered(Timeline(70), [](size_t) { return 100; }).iteration->own_prefetch_bytes(), 70)
      << "prefetch_bytes bounds what windows would need";
}

TEST_F(Iterations, WindowsWithNothingBetweenThemAreOne) {
  Iteration iteration(nullptr, std::nullopt);
  for (int times = 0; times < 20; ++times) {
    for (int windows = 0; windows < 3; ++windows) {
      iteration.open_window(0);
    }
    iteration.admit(50, true, Iteration::kNoGroup);
    iteration.admit(50, true, Iteration::kNoGroup);
  }
  EXPECT_EQ(iteration.order().bytes_ahead(), 250);
}

TEST_F(Iterations, ADecodedStorageInUseIsPartOfTheWindow) {
  Timeline wide(100), narrow(10);
  EXPECT_EQ(forward(wide, Sizes(6, 50), true).backward({5, 4, 3}), (Asked{{4}, {3}, {2}}));
  EXPECT_EQ(forward(narrow, Sizes(6, 50), true).backward({5, 4, 3}), Asked(3));
}

TEST_F(Iterations, BytesThatMayLeaveAtOnceAreTheWindowAndNeverLessThanOneStorage) {
  Timeline narrow(30), wide(300);
  EXPECT_EQ(forward(narrow, {50, 10}).iteration->leaving_bytes(), 50);
  EXPECT_EQ(forward(wide, {50, 10}).iteration->leaving_bytes(), 300);
}

TEST_F(Iterations, WhatWasNeverDemandedIsExpectedLastTheLastSavedFirst) {
  Timeline timeline(50);
  forward(timeline, Sizes(5, 50)).backward({2, 0});
  EXPECT_EQ(forward(timeline, Sizes(5, 50)).backward({2, 0, 4, 3, 1}),
            (Asked{{0}, {4}, {3}, {1}, {}}));
}

TEST_F(Iterations, APlanSaysWhatComesBackInTheWindowsPlace) {
  Timeline timeline(100);
  const Forward made = forward(timeline, Sizes(4, 50));
  made.iteration->course.set_terms({.plan = plan_of({{3, {0, 2}}, {2, {3, 1}}}, 4)});
  EXPECT_TRUE(made.iteration->returns_as_planned());
  EXPECT_EQ(made.backward({3, 2, 1, 0}), (Asked{{0, 2}, {1}, {}, {}}));
}

TEST_F(Iterations, APlanForOtherStoragesLeavesTheWindowInItsPlace) {
  for (const size_t planned : {3, 5}) {
    Timeline timeline(100);
    const Forward made = forward(timeline, Sizes(4, 50));
    made.iteration->course.set_terms({.plan = plan_of({{2, {0}}}, planned)});
    EXPECT_FALSE(made.iteration->returns_as_planned());
    EXPECT_EQ(made.backward({3, 2, 1, 0}), (Asked{{2, 1}, {0}, {}, {}}));
  }
}

TEST_F(Iterations, StoragesThatAreSavedDuringBackwardAreExpectedToo) {
  Timeline timeline(1000);
  Forward made = forward(timeline, Sizes(2, 50));
  EXPECT_EQ(made.demand(1), Places{0});
  save(made, 50);
  EXPECT_EQ(made.demand(2), Places{0});
  EXPECT_EQ(made.iteration->order().demanded(), (Places{1, 2}));
}

TEST_F(Iterations, AnEntryHasOnePlaceAndOnlyWhatWasAdmittedHasOne) {
  const auto iteration = std::make_shared<Iteration>(nullptr, 0);
  const EntryPtr entry = new_entry();
  EXPECT_THROW(iteration->place(entry), std::invalid_argument) << "nothing was admitted";
  iteration->admit(1, false, Iteration::kNoGroup);
  iteration->place(entry);
  iteration->admit(1, false, Iteration::kNoGroup);
  EXPECT_THROW(iteration->place(entry), std::invalid_argument) << "it has a place";
  EXPECT_EQ(entry->iteration(), iteration);
  EXPECT_EQ(entry->index(), 0u);
  EXPECT_EQ(iteration->entry(1), nullptr) << "a storage whose entry was never made has one";
  EXPECT_THROW(iteration->entry(2), std::out_of_range);
}

TEST_F(Iterations, EntriesThatDieInOtherThreadsAreFoundByNobody) {
  Timeline timeline(1'000'000);
  Forward made = forward(timeline, Sizes(400, 50));
  std::vector<std::thread> threads;
  for (size_t number = 0; number < 3; ++number) {
    threads.emplace_back([&, number] {
      for (size_t index = number * 100; index < (number + 1) * 100; ++index) {
        const Locked locked(engine->lock);  // as hooks do, whose lives Python serialises
        made.entries[index].reset();
      }
    });
  }
  for (size_t index = 0; index < 400; ++index) {
    const Locked locked(engine->lock);
    const EntryPtr found = made.iteration->entry(index);
    EXPECT_TRUE(!found || found->index() == index);
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  Places alive = reversed(399);
  alive.resize(99);
  EXPECT_EQ(made.demand(399), alive);
  EXPECT_EQ(engine->ledger.known_storages(), 100u);
}

}  // namespace
}  // namespace memswap
