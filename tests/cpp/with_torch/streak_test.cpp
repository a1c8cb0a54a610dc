// Streak: for how long iterations follow a plan without anybody being asked, and what was seen.
#include "engine/streak.h"

#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine/engine.h"

namespace memswap {
namespace {

constexpr size_t kStorages = 4;
constexpr int64_t kSavedBytes = 50, kPeakBytes = 150, kLimitBytes = 160, kBudgetBytes = 170;

class Streaks : public ::testing::Test {
 protected:
  // One iteration, and what its graph holds.
  struct Step {
    IterationPtr iteration;
    std::vector<EntryPtr> graph;
  };

  Streaks() {
    plan->places.resize(kStorages);
    follow(first);
  }

  // `expected` and `limit_bytes`: other ones than all iterations have.
  void follow(Step& step, int64_t limit_bytes = kLimitBytes,
              Course::Expected expected = {kStorages * kSavedBytes, kPeakBytes, kBudgetBytes}) {
    step.iteration->course.set_terms({plan, expected, limit_bytes});
  }
  void forward(Step& step, size_t storages = kStorages) {
    for (size_t index = 0; index < storages; ++index) {
      const at::Tensor tensor = at::empty({1});
      step.iteration->admit(kSavedBytes, /*decoded=*/false, Iteration::kNoGroup);
      step.graph.push_back(
          Entry::make(engine, *SavedView::capture(tensor), StorageRef(tensor.storage())));
      step.iteration->place(step.graph.back());
    }
  }
  static void backward(Step& step) {
    step.iteration->course.begin_backward(step.iteration->size(), /*away_bytes=*/0);
    step.iteration->demand(step.graph.size() - 1);
    step.graph.clear();
  }
  void as_planned(Step& step, int64_t peak_bytes = kPeakBytes) {
    forward(step);
    step.iteration->course.note_resident(peak_bytes);
    backward(step);
  }
  Step begin() { return {timeline.begin(), {}}; }

  EnginePtr engine = std::make_shared<Engine>(/*prefetch_bytes=*/0);
  Timeline timeline{0};
  std::shared_ptr<Plan> plan = std::make_shared<Plan>(Plan{.device = c10::Device(c10::kCPU)});
  Step first = begin();
};

TEST_F(Streaks, NobodyIsAskedBeforeAsManyForwardsAsWereSaid) {
  Streak streak(first.iteration, {.forwards = 3});
  as_planned(first, kPeakBytes - 1);
  Step second = begin(), third = begin();
  ASSERT_TRUE(streak.extend(second.iteration));
  EXPECT_EQ(second.iteration->course.plan(), plan);
  EXPECT_EQ(second.iteration->course.limit_bytes(), kLimitBytes);
  as_planned(second, kPeakBytes);
  ASSERT_TRUE(streak.extend(third.iteration));
  as_planned(third, kLimitBytes);
  const Step fourth = begin();
  EXPECT_FALSE(streak.extend(fourth.iteration));
  EXPECT_FALSE(fourth.iteration->course.follows_plan());

  const Streak::Seen seen = streak.end();
  EXPECT_EQ(seen.forwards, 3);
  EXPECT_EQ(seen.ended, 2);
  EXPECT_EQ(seen.in_flight, std::vector{third.iteration}) << "how it went, nobody has looked";
  EXPECT_EQ(seen.most_in_flight, 1u);
  EXPECT_EQ(seen.peak_bytes, kPeakBytes);
}

TEST_F(Streaks, WhatIsNotAsPlannedIsAskedAbout) {
  using Change = std::function<void(Step&)>;
  const std::map<std::string, Change> changes{
      {"nothing", [&](Step& step) { as_planned(step); }},
      {"no backward",
       [&](Step& step) {
         forward(step);
         step.graph.clear();
       }},
      {"fewer storages",
       [&](Step& step) {
         forward(step, kStorages - 1);
         backward(step);
       }},
      {"more bytes",
       [&](Step& step) {
         follow(step, kLimitBytes, {kStorages * kSavedBytes / 1.26, kPeakBytes, kBudgetBytes});
         as_planned(step);
       }},
      {"a little more bytes",
       [&](Step& step) {
         follow(step, kLimitBytes, {kStorages * kSavedBytes / 1.24, kPeakBytes, kBudgetBytes});
         as_planned(step);
       }},
      {"another way",
       [&](Step& step) {
         step.iteration->course.leave_plan();
         as_planned(step);
       }},
      {"a longer frame",
       [&](Step& step) {
         step.iteration->course.note_unfit();
         as_planned(step);
       }},
      {"a full pool",
       [&](Step& step) {
         step.iteration->course.note_refused(1);
         as_planned(step);
       }},
      {"no recipe",
       [&](Step& step) {
         step.iteration->course.note_no_recipe(1);
         as_planned(step);
       }},
      {"more than its limit", [&](Step& step) { as_planned(step, kLimitBytes + 1); }},
      {"more than planned, without a limit",
       [&](Step& step) {
         follow(step, /*limit_bytes=*/0);
         as_planned(step, kPeakBytes + 1);
       }},
      {"more than the budget",
       [&](Step& step) {
         follow(step, /*limit_bytes=*/1, {kStorages * kSavedBytes, kPeakBytes, 0});
         as_planned(step);
       }},
  };
  for (const auto& [name, change] : changes) {
    Step step = begin();
    follow(step);
    Streak streak(step.iteration, {.forwards = 10});
    change(step);
    const bool fine = name == "nothing" || name == "a little more bytes";
    EXPECT_EQ(streak.extend(begin().iteration), fine) << name;
    const Streak::Seen seen = streak.end();
    EXPECT_EQ(seen.ended, fine ? 1 : 0) << name;
    EXPECT_EQ(seen.in_flight.size(), fine ? 0u : 1u) << name << ": whoever is asked looks at it";
  }
}

TEST_F(Streaks, AsManyWaitForTheirBackwardAsWereSaid) {
  Streak streak(first.iteration, {.forwards = 10, .in_flight = 2});
  forward(first);
  Step second = begin(), third = begin();
  ASSERT_TRUE(streak.extend(second.iteration));
  EXPECT_EQ(streak.in_flight(), 2u);
  forward(second);
  EXPECT_FALSE(streak.extend(third.iteration));
  backward(first);
  ASSERT_TRUE(streak.extend(third.iteration));
  forward(third);
  const Streak::Seen seen = streak.end();
  EXPECT_EQ(seen.in_flight, (std::vector{second.iteration, third.iteration}));
  EXPECT_EQ(seen.most_in_flight, 2u);
  EXPECT_EQ(seen.ended, 1);
}

TEST_F(Streaks, WhatHasSavedNothingFollowsNoPlanOnceTheStreakHasEnded) {
  Streak streak(first.iteration, {.forwards = 10});
  as_planned(first);
  const Step second = begin();
  ASSERT_TRUE(streak.extend(second.iteration));
  const Streak::Seen seen = streak.end();
  EXPECT_FALSE(second.iteration->course.follows_plan());
  EXPECT_FALSE(second.iteration->course.terms().expected);
  EXPECT_EQ(second.iteration->course.limit_bytes(), 0);
  EXPECT_EQ(seen.forwards, 2);
  EXPECT_EQ(seen.ended, 1);
  EXPECT_TRUE(seen.in_flight.empty());
}

}  // namespace
}  // namespace memswap
