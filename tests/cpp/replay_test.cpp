// The replay of a step, of steps that can be worked out by hand, and of random ones.
#include "engine/replay.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

#include "engine/link_model.h"
#include "engine/running_peak.h"

namespace memswap {
namespace {

// One byte takes a microsecond on the link, a tenth of it in the codec; no latencies.
constexpr MachineRates kRates = {1e6, 1e6, 1e6, 1e6, 1e7, 1e7, 0, 0, 0, false};

// Layers that save 1000 bytes each, demanded in reverse, let go by the next layer: 1 ms forward and
// 2 ms backward.
StepRecord stack(int32_t layers) {
  StepRecord step;
  for (int32_t index = 0; index < layers; ++index) {
    step.nbytes.push_back(1000);
    step.held_frame_nbytes.push_back(500);
    step.overflow_nbytes.push_back(0);
    step.held_until.push_back(std::min(index + 1, layers));
    step.last_demand.push_back(2 * layers - 1 - index);
    step.gone_after.push_back(2 * layers - 1 - index);
    step.recipe_s.push_back(kNoRecipe);
    step.inner_nbytes.push_back(0);
    step.recipe_sources.emplace_back();
    step.order.push_back(layers - 1 - index);
  }
  step.gaps_s.assign(layers, 1e-3);
  step.gaps_s.insert(step.gaps_s.end(), layers, 2e-3);
  return step;
}

std::vector<PlannedAction> first(int32_t layers, PlannedAction action) {
  std::vector<PlannedAction> actions(layers, PlannedAction::kKeep);
  actions[0] = action;
  return actions;
}

TEST(Replay, ASwapThatHasTimeCostsNothing) {
  const Replay found = replay(stack(3), kRates, first(3, PlannedAction::kSwap), 2000);
  // Saved at 1 ms, sent until 2 ms; room for the third is needed when the second is saved, at 2.
  ASSERT_EQ(found.releases.size(), 1u);
  EXPECT_EQ(found.releases[0].at, 1);
  EXPECT_EQ(found.releases[0].storage, 0);
  EXPECT_EQ(found.total_exposed_s, 0);
  EXPECT_EQ(found.peak_bytes, 2000);
  ASSERT_EQ(found.fetches.size(), 1u);
  EXPECT_EQ(found.fetches[0].at, 1) << "half the speed needs the two milliseconds before its use";
  EXPECT_TRUE(found.idle.empty());
}

TEST(Replay, WhatARecipeReadsComesBackWithIt) {
  StepRecord step = stack(3);
  step.recipe_s[2] = 1e-4;
  step.recipe_sources[2] = {0};
  std::vector<PlannedAction> actions = first(3, PlannedAction::kSwap);
  actions[2] = PlannedAction::kRecompute;
  const Replay found = replay(step, kRates, actions, 1000);
  // At the first demand: 0, which the recipe reads, 1, which has stayed, and 2 itself.
  EXPECT_EQ(found.resident_bytes, (std::vector<int64_t>{1000, 1000, 2000, 3000, 2000, 1000}));
  EXPECT_GE(found.exposed_s[2], 1e-4);
  EXPECT_GT(found.exposed_s[0], 0) << "0 was waited for two demands early";
  EXPECT_TRUE(found.fetches.empty());
}

TEST(Replay, WhatARecipeMakesOnTheWayIsThereWhileItRuns) {
  StepRecord step = stack(3);
  step.recipe_s[1] = 1e-4;
  step.recipe_sources[1] = {0};
  step.inner_nbytes[1] = 700;
  std::vector<PlannedAction> actions = first(3, PlannedAction::kKeep);
  actions[1] = PlannedAction::kRecompute;
  const Replay found = replay(step, kRates, actions, kNoBudget);
  // 0 stays, 2 goes before 1 is demanded, which is 0, 1 and what is made on the way then.
  EXPECT_EQ(found.resident_bytes, (std::vector<int64_t>{1000, 2000, 2000, 2000, 2700, 1000}));
}

TEST(Replay, WhatRecipesAloneReadGoesAfterTheLastOfThem) {
  StepRecord step = stack(4);
  // 1 is made of 0, and 2 of 1; 0 and 1 are demanded first.
  step.order = {0, 1, 3, 2};
  step.last_demand = {4, 5, 7, 6};
  step.gone_after = step.last_demand;
  step.recipe_s[1] = step.recipe_s[2] = 1e-4;
  step.recipe_sources[1] = {0};
  step.recipe_sources[2] = {1};
  std::vector<PlannedAction> actions = first(4, PlannedAction::kSwap);
  actions[1] = actions[2] = PlannedAction::kRecompute;
  const Replay found = replay(step, kRates, actions, 0);
  // At the last demand 1 is still there from its own, for the recipe of 2; 0 is gone.
  EXPECT_EQ(found.resident_bytes.back(), 2000);
  EXPECT_EQ(found.peak_bytes, 3000);
}

// A step of recipes in rows, of which nothing moves, counted without looking ahead or back.
std::vector<int64_t> counted(const StepRecord& step, const std::vector<PlannedAction>& actions) {
  const int32_t saves = step.saves();
  const auto again = [&](int32_t index) { return actions[index] == PlannedAction::kRecompute; };
  // Who runs when, in the order of backward.
  std::vector<std::pair<int32_t, int32_t>> runs;  // the mark, and the storage
  std::vector<uint8_t> there(saves, false);
  const std::function<void(int32_t, int32_t)> ask = [&](int32_t mark, int32_t index) {
    if (!std::exchange(there[index], uint8_t{true}) && again(index)) {
      for (const int32_t source : step.recipe_sources[index]) {
        ask(mark, source);
      }
      runs.emplace_back(mark, index);
    }
  };
  for (size_t place = 0; place < step.order.size(); ++place) {
    ask(saves + static_cast<int32_t>(place), step.order[place]);
  }
  const auto reads = [&](int32_t reader, int32_t source) {
    const auto& sources = step.recipe_sources[reader];
    return std::find(sources.begin(), sources.end(), source) != sources.end();
  };
  // What stays goes with the last that could ask for it.
  const std::function<int32_t(int32_t)> kept_until = [&](int32_t index) {
    int32_t mark = step.gone_after[index];
    for (int32_t reader = 0; reader < saves; ++reader) {
      mark = again(reader) && reads(reader, index) ? std::max(mark, kept_until(reader)) : mark;
    }
    return mark;
  };
  std::vector<int64_t> resident;
  for (int32_t mark = 0; mark < step.marks(); ++mark) {
    int64_t at_rest = 0;
    for (int32_t index = 0; index < std::min(saves, mark + 1); ++index) {
      const bool leaves = again(index) && step.held_until[index] <= mark && index != mark;
      at_rest += (again(index) ? !leaves : mark <= kept_until(index)) ? step.nbytes[index] : 0;
    }
    // Of what is made again: those that an earlier run has made, for the sake of a later use.
    const auto live = [&](size_t ran, size_t now) {
      const int32_t index = runs[ran].second;
      bool used = step.last_demand[index] >= mark;
      for (size_t later = now; later < runs.size(); ++later) {
        used = used || reads(runs[later].second, index);
      }
      return used;
    };
    int64_t most = at_rest;
    size_t before = 0;
    while (before < runs.size() && runs[before].first < mark) {
      ++before;
    }
    int64_t made = 0;
    for (size_t ran = 0; ran < before; ++ran) {
      made += live(ran, before) ? step.nbytes[runs[ran].second] : 0;
    }
    most = std::max(most, at_rest + made);
    for (size_t now = before; now < runs.size() && runs[now].first == mark; ++now) {
      int64_t nbytes =
          at_rest + step.nbytes[runs[now].second] + step.inner_nbytes[runs[now].second];
      for (size_t ran = 0; ran < now; ++ran) {
        nbytes += live(ran, now) ? step.nbytes[runs[ran].second] : 0;
      }
      most = std::max(most, nbytes);
    }
    resident.push_back(most);
  }
  return resident;
}

TEST(Replay, RandomRecipesTakeWhatACountByHandSays) {
  std::mt19937 random(11);
  for (int turn = 0; turn < 300; ++turn) {
    const auto layers = static_cast<int32_t>(2 + random() % 10);
    StepRecord step = stack(layers);
    std::vector<PlannedAction> actions(layers, PlannedAction::kKeep);
    for (int32_t index = 0; index < layers; ++index) {
      step.nbytes[index] = 1 + static_cast<int64_t>(random() % 100);
      if (index == 0 || random() % 2 == 0) {
        continue;
      }
      step.recipe_s[index] = 1e-6;
      step.inner_nbytes[index] = static_cast<int64_t>(random() % 100);
      step.recipe_sources[index] = {static_cast<int32_t>(random() % index)};
      actions[index] = random() % 3 == 0 ? PlannedAction::kKeep : PlannedAction::kRecompute;
    }
    std::shuffle(step.order.begin(), step.order.end(), random);
    for (int32_t place = 0; place < layers; ++place) {
      step.last_demand[step.order[place]] = step.gone_after[step.order[place]] = layers + place;
    }
    ASSERT_EQ(replay(step, kRates, actions, kNoBudget).resident_bytes, counted(step, actions))
        << "turn " << turn;
  }
}

TEST(Replay, ARecipeThatThereIsNotIsRefused) {
  EXPECT_THROW(replay(stack(3), kRates, first(3, PlannedAction::kRecompute), 2000),
               std::invalid_argument);
}

TEST(Replay, AWaitForASlowLinkIsCounted) {
  MachineRates slow = kRates;
  slow.d2h_bytes_per_s = slow.h2d_bytes_per_s = 2.5e5;
  slow.duplex_d2h_bytes_per_s = slow.duplex_h2d_bytes_per_s = 2.5e5;
  const Replay found = replay(stack(3), slow, first(3, PlannedAction::kSwap), 2000);
  // 4 ms each way: sent until 5 ms, 3 ms too late; back 4 ms after its fetch, 2 ms too late.
  EXPECT_NEAR(found.exposed_s[0], 5e-3, 1e-12);
}

TEST(Replay, WhatMovesInVainIsKept) {
  const std::vector<PlannedAction> everything(4, PlannedAction::kSwap);
  const ReplayedPlan found = replay_without_idle(stack(4), kRates, everything, 3000);
  const auto moved = std::count(found.actions.begin(), found.actions.end(), PlannedAction::kSwap);
  EXPECT_GT(moved, 0);
  EXPECT_LT(moved, 4);
  EXPECT_TRUE(found.found.idle.empty());
  EXPECT_LE(found.found.peak_bytes, 3000);
}

TEST(Replay, APlanThatTheMachineCannotFollowIsRefused) {
  MachineRates none = kRates;
  none.d2h_bytes_per_s = 0;
  EXPECT_THROW(replay(stack(3), none, first(3, PlannedAction::kSwap), 2000), std::invalid_argument);
  EXPECT_NO_THROW(replay(stack(3), none, first(3, PlannedAction::kEncode), 2000));
  EXPECT_THROW(replay(stack(3), kRates, first(4, PlannedAction::kSwap), 2000),
               std::invalid_argument);
}

TEST(Replay, AColumnOfActionsHasNumbersThatThereAre) {
  EXPECT_EQ(actions_of(std::string_view("\0\2\4", 3)),
            (std::vector{PlannedAction::kKeep, PlannedAction::kSwap, PlannedAction::kRecompute}));
  EXPECT_THROW(actions_of("\5"), std::invalid_argument);
  EXPECT_THROW(actions_of("\xff"), std::invalid_argument);
}

TEST(StepRecord, ColumnsThatContradictEachOtherAreRefused) {
  EXPECT_NO_THROW(stack(3).check());
  StepRecord twice = stack(3);
  twice.order[0] = twice.order[1];
  EXPECT_THROW(twice.check(), std::invalid_argument);
  StepRecord early = stack(3);
  early.last_demand[0] = 2;
  EXPECT_THROW(early.check(), std::invalid_argument);
  StepRecord brief = stack(3);
  brief.gaps_s.pop_back();
  EXPECT_THROW(brief.check(), std::invalid_argument);
}

TEST(StepRecord, NumbersThatNoStepHasAreRefused) {
  const auto refused = [](auto change) {
    StepRecord step = stack(3);
    change(step);
    EXPECT_THROW(step.check(), std::invalid_argument);
  };
  refused([](StepRecord& step) { step.gone_after[0] = -2; });
  refused([](StepRecord& step) { step.held_until[0] = -2; });
  refused([](StepRecord& step) { step.recipe_s[0] = -2; });
  refused([](StepRecord& step) { step.recipe_sources[0] = {7}; });
  refused([](StepRecord& step) {
    step.recipe_sources[0] = {1};
    step.recipe_sources[1] = {0};
  });
  refused([](StepRecord& step) { step.nbytes[0] = -1; });
  refused([](StepRecord& step) { step.nbytes[0] = step.nbytes[1] = INT64_MAX / 2; });
  refused([](StepRecord& step) { step.gaps_s[0] = std::nan(""); });
  refused([](StepRecord& step) { step.gaps_s[0] = std::numeric_limits<double>::infinity(); });
  refused([](StepRecord& step) { step.windows_s.assign(6, -1.0); });
}

TEST(Replay, WhatIsKeptBeyondTheLastMarkIsThereToTheEnd) {
  StepRecord step = stack(3);
  step.gone_after[0] = INT32_MAX;
  step.check();
  EXPECT_EQ(replay(step, kRates, first(3, PlannedAction::kKeep), kNoBudget).peak_bytes, 3000);
}

// What is resident in backward, and how often it is asked for, decides how long a plan takes.
TEST(Replay, RandomPlansStayWithinABudgetThatEverythingAwayMeets) {
  std::mt19937 random(7);
  for (int turn = 0; turn < 200; ++turn) {
    const auto layers = static_cast<int32_t>(2 + random() % 30);
    StepRecord step = stack(layers);
    for (int64_t& nbytes : step.nbytes) {
      nbytes = 100 + static_cast<int64_t>(random() % 2000);
    }
    const std::vector<PlannedAction> everything(layers, PlannedAction::kSwap);
    const int64_t least = replay(step, kRates, everything, 0).peak_bytes;
    const int64_t budget = least + static_cast<int64_t>(random() % 5000);
    EXPECT_LE(replay(step, kRates, everything, budget).peak_bytes, budget);
  }
}

TEST(LinkModel, BothDirectionsAtOnceAreSlower) {
  const MachineRates duplex = {1e6, 1e6, 5e5, 2.5e5, 0, 0, 0, 0, 0, false};
  LinkModel link(duplex, 2);
  link.add(Direction::kAway, 0, 1000, 0);
  link.add(Direction::kBack, 1, 1000, 0);
  // Together until the first is away at 2 ms, when half of the other is left: 0.5 ms.
  EXPECT_NEAR(link.end_s(Direction::kAway, 0), 2e-3, 1e-12);
  EXPECT_NEAR(link.end_s(Direction::kBack, 1), 2.5e-3, 1e-12);
  LinkModel alone(duplex, 2);
  alone.add(Direction::kBack, 1, 1000, 1e-3);
  EXPECT_NEAR(alone.end_s(Direction::kBack, 1), 2e-3, 1e-12);
  EXPECT_EQ(alone.begin_s(Direction::kBack, 1), 1e-3);
  EXPECT_EQ(alone.begin_s(Direction::kAway, 0), std::nullopt);
}

TEST(LinkModel, ManyAwayAndAFewBackSlowEachOtherDownForAsLongAsTheyMeet) {
  constexpr int kMany = 12;
  for (const double duplex : {1.0, 0.75, 0.5}) {
    for (const int few : {0, 4, 12}) {
      LinkModel link({1e6, 1e6, 1e6 * duplex, 1e6 * duplex, 0, 0, 0, 0, 0, false}, kMany);
      for (int index = 0; index < kMany; ++index) {
        link.add(Direction::kAway, index, 1000, 0);
        if (index < few) {
          link.add(Direction::kBack, index, 1000, 0);
        }
      }
      const double expected_s = (few / duplex + kMany - few) * 1e-3;
      EXPECT_NEAR(link.end_s(Direction::kAway, kMany - 1), expected_s, 1e-9) << few << " back";
    }
  }
}

TEST(RunningPeak, IsTheLargestRunningSumAfterAnyChange) {
  std::mt19937 random(3);
  for (size_t count = 1; count < 40; ++count) {
    std::vector<int64_t> numbers(count);
    for (int64_t& number : numbers) {
      number = static_cast<int64_t>(random() % 2001) - 1000;
    }
    RunningPeak peak(numbers);
    for (int change = 0; change < 20; ++change) {
      int64_t sum = 0;
      int64_t most = INT64_MIN;
      for (const int64_t number : numbers) {
        sum += number;
        most = std::max(most, sum);
      }
      ASSERT_EQ(peak.peak(), most) << count << " numbers after " << change << " changes";
      const size_t place = random() % (count + 1);
      const int64_t more = static_cast<int64_t>(random() % 2001) - 1000;
      peak.add(place, more);
      if (place < count) {
        numbers[place] += more;
      }
    }
  }
}

}  // namespace
}  // namespace memswap
