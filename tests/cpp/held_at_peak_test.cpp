#include "engine/held_at_peak.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

namespace memswap {
namespace {

using Frames = HeldAtPeak::Frames;

// A storage of a made-up iteration: it is saved in its turn, let go of before a mark, and demanded
// in the other order.
struct Made {
  int64_t nbytes;
  int64_t frame_nbytes;
  size_t let_go_at;
};

// The marks of such an iteration with some storages as they are, the others as frames, as an engine
// would have counted them.
struct Counted {
  Counted(const std::vector<Made>& storages, const Frames& stay) {
    const size_t count = storages.size();
    std::vector<bool> there(count, false);
    int64_t resident = 0;
    const auto let_go = [&](size_t mark) {
      for (size_t index = 0; index < std::min(mark, count); ++index) {
        if (there[index] && storages[index].let_go_at <= mark) {
          there[index] = false;
          resident -= stay.contains(index) ? 0 : storages[index].nbytes;
          marks.let_go(index);
        }
      }
    };
    const auto note = [&] { peak = std::max(peak, resident); };
    for (size_t index = 0; index < count; ++index) {
      let_go(index);
      const Made& one = storages[index];
      const bool stays = stay.contains(index);
      there[index] = true;
      resident += one.nbytes + (stays ? 0 : one.frame_nbytes);
      note();
      marks.saved(index, one.nbytes, one.frame_nbytes, stays, resident);
    }
    for (size_t mark = count; mark < 2 * count; ++mark) {
      let_go(mark);
      const size_t index = 2 * count - 1 - mark;
      const bool stays = stay.contains(index);
      resident += stays || there[index] ? 0 : storages[index].nbytes;
      note();
      marks.demanded(index, resident);
      resident -= storages[index].nbytes + (stays ? 0 : storages[index].frame_nbytes);
      there[index] = false;
    }
  }

  HeldAtPeak marks;
  int64_t peak = 0;
};

int64_t peak_with(const std::vector<Made>& storages, const Frames& stay) {
  return Counted(storages, stay).peak;
}

std::vector<Made> drawn(unsigned seed) {
  std::mt19937 random(seed);
  const auto from = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  std::vector<Made> storages(static_cast<size_t>(from(1, 9)));
  for (size_t index = 0; index < storages.size(); ++index) {
    const int64_t nbytes = from(4, 40);
    storages[index] = {nbytes, from(1, nbytes - 1), index + static_cast<size_t>(from(1, 5))};
  }
  return storages;
}

TEST(HeldAtPeak, AStreamThatIsHeldWhileTheLastLayerMultipliesStays) {
  // Two parts of a stream, held until a wide product has been saved.
  const std::vector<Made> storages = {{12, 8, 1}, {3, 2, 4}, {3, 2, 4}, {12, 8, 4}};
  const Frames found = Counted(storages, {}).marks.best();
  EXPECT_TRUE(found.contains(1) && found.contains(2)) << "their frames raise the peak";
  EXPECT_FALSE(found.contains(0)) << "what is gone by then had better be a frame";
  EXPECT_LT(peak_with(storages, found), peak_with(storages, {}));
}

TEST(HeldAtPeak, WhatIsLetGoOfBeforeThePeakStaysAFrame) {
  const std::vector<Made> storages = {{12, 8, 1}, {12, 8, 2}, {12, 8, 4}};
  EXPECT_EQ(Counted(storages, {}).marks.best(), (Frames{{2, 8}}));
}

TEST(HeldAtPeak, WhatIsNotHeldAtThePeakAnyMoreBecomesAFrameAgain) {
  const std::vector<Made> before = {{12, 8, 3}, {12, 8, 3}, {2, 1, 3}};
  const Frames found = Counted(before, {}).marks.best();
  ASSERT_TRUE(found.contains(0));
  const std::vector<Made> after = {{12, 8, 1}, {12, 8, 3}, {2, 1, 3}};
  EXPECT_FALSE(Counted(after, found).marks.best().contains(0)) << "it is held for nobody";
}

TEST(HeldAtPeak, NoChoiceHasAHigherPeakAndTheNextOneFindsNothingBetter) {
  int lower = 0;
  for (unsigned seed = 0; seed < 2000; ++seed) {
    const std::vector<Made> storages = drawn(seed);
    const Frames found = Counted(storages, {}).marks.best();
    const int64_t peak = peak_with(storages, found), before = peak_with(storages, {});
    EXPECT_LE(peak, before) << "seed " << seed;
    EXPECT_LE(peak_with(storages, Counted(storages, found).marks.best()), peak) << "seed " << seed;
    lower += peak < before ? 1 : 0;
  }
  EXPECT_GT(lower, 500) << "the test says nothing if nothing is chosen";
}

TEST(HeldAtPeak, AStorageThatIsSavedWhileAnotherOneIsCountsAtItsOwnPlace) {
  HeldAtPeak marks;
  marks.saved(1, 3, 2, false, 5);
  marks.saved(0, 12, 0, false, 17);
  marks.let_go(1);
  marks.demanded(0, 14);
  marks.demanded(1, 5);
  EXPECT_TRUE(marks.best().empty()) << "it is not the peak's";
}

}  // namespace
}  // namespace memswap
