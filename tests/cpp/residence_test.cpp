// One storage on the books: which steps are legal, and what each of them counts.
#include "engine/residence.h"

#include <gtest/gtest.h>

#include <memory>
#include <set>
#include <utility>

namespace memswap {
namespace {

constexpr State kStates[] = {State::kResident, State::kLeaving, State::kAway, State::kReturning};

TEST(Residence, TakesLegalStepsAlone) {
  const std::set<std::pair<State, State>> expected = {
      {State::kResident, State::kLeaving},   {State::kLeaving, State::kAway},
      {State::kLeaving, State::kResident},   {State::kAway, State::kReturning},
      {State::kReturning, State::kResident}, {State::kResident, State::kAway},
      {State::kAway, State::kResident},
  };
  for (const State from : kStates) {
    for (const State to : kStates) {
      EXPECT_EQ(legal(from, to), expected.contains({from, to}))
          << static_cast<int>(from) << " to " << static_cast<int>(to);
    }
  }
}

TEST(Residence, AStepThatIsNotLegalChangesNothing) {
  Counters counters;
  Residence one(counters, 100);
  EXPECT_FALSE(one.come_back());
  EXPECT_EQ(one.state(), State::kResident);
  EXPECT_EQ(counters.returned_storages, 0);
  EXPECT_TRUE(one.leave());
  EXPECT_FALSE(one.leave());
  EXPECT_EQ(counters.moved_bytes, 100);
}

TEST(Residence, AStorageIsCountedOnceOnItsWayAwayAndBack) {
  Counters counters;
  auto one = std::make_unique<Residence>(counters, 100);
  EXPECT_EQ(counters.resident_bytes, 100);
  ASSERT_TRUE(one->leave());
  one->count_away(0, 100);
  EXPECT_EQ(counters.resident_bytes, 100);  // until somebody notices that it went
  ASSERT_TRUE(one->go());
  EXPECT_EQ(counters.resident_bytes, 0);
  EXPECT_EQ(counters.freed_bytes, 100);
  ASSERT_TRUE(one->come_back());
  one->count_resident(true);  // twice is once
  EXPECT_EQ(counters.resident_bytes, 100);
  EXPECT_EQ(counters.returned_bytes, 100);
  EXPECT_EQ(counters.away_bytes, 100);
  one.reset();
  EXPECT_EQ(counters.resident_bytes, 0);
  EXPECT_EQ(counters.away_bytes, 0);
  EXPECT_EQ(counters.peak_resident_bytes, 100);
  EXPECT_EQ(counters.peak_away_bytes, 100);
}

TEST(Residence, AFrameOnTheDeviceIsResidentBesideItsStorage) {
  Counters counters;
  {
    Residence one(counters, 100);
    ASSERT_TRUE(one.leave());
    one.count_away(90, 0);
    EXPECT_EQ(counters.resident_bytes, 190);
    one.count_away(70, 0);  // the encoder has reported
    EXPECT_EQ(counters.resident_bytes, 170);
    ASSERT_TRUE(one.go());
    EXPECT_EQ(counters.resident_bytes, 70);
  }
  EXPECT_EQ(counters.resident_bytes, 0);
  EXPECT_EQ(counters.peak_resident_bytes, 190);
}

TEST(Counters, AResetForgetsAllButWhatIsThere) {
  Counters counters;
  Residence one(counters, 100);
  counters.offer(30);
  one.count_away(0, 40);
  counters.resident(50);
  counters.resident(-50);
  counters.reset();
  EXPECT_EQ(counters.offered_tensors, 0);
  EXPECT_EQ(counters.resident_bytes, 100);
  EXPECT_EQ(counters.peak_resident_bytes, 100);
  EXPECT_EQ(counters.peak_away_bytes, 40);
}

}  // namespace
}  // namespace memswap
