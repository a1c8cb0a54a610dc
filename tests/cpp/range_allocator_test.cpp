#include "pool/range_allocator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <optional>
#include <random>
#include <stdexcept>
#include <vector>

namespace memswap {
namespace {

constexpr size_t kAlign = RangeAllocator::kDefaultAlignment;

TEST(RangeAllocator, RoundsUpToTheAlignmentAndNeverToNothing) {
  const RangeAllocator ranges;
  EXPECT_EQ(ranges.rounded(0), kAlign);
  EXPECT_EQ(ranges.rounded(1), kAlign);
  EXPECT_EQ(ranges.rounded(kAlign), kAlign);
  EXPECT_EQ(ranges.rounded(kAlign + 1), 2 * kAlign);
  EXPECT_THROW(ranges.rounded(~size_t{0}), std::length_error);
  EXPECT_THROW(RangeAllocator(100), std::invalid_argument);
}

TEST(RangeAllocator, TakesTheShortestRangeThatIsLongEnough) {
  RangeAllocator ranges;
  ranges.add_slab(0, 16 * kAlign);
  const Range a = *ranges.allocate(4 * kAlign);
  const Range wall_1 = *ranges.allocate(kAlign);
  const Range b = *ranges.allocate(2 * kAlign);
  const Range wall_2 = *ranges.allocate(kAlign);
  ranges.free(a);
  ranges.free(b);  // free: 4 at 0, 2 at 5, 8 at 8
  EXPECT_EQ(ranges.allocate(2 * kAlign), b) << "best fit left the exact hole empty";
  EXPECT_EQ(ranges.allocate(3 * kAlign)->offset, a.offset);
  EXPECT_EQ(wall_1.offset, 4 * kAlign);
  EXPECT_EQ(wall_2.offset, 7 * kAlign);
}

TEST(RangeAllocator, PrefersTheOldestSlab) {
  RangeAllocator ranges;
  ranges.add_slab(7, 2 * kAlign);
  ranges.add_slab(3, 2 * kAlign);
  EXPECT_EQ(ranges.allocate(kAlign)->slab, 3U);
  EXPECT_EQ(ranges.allocate(2 * kAlign)->slab, 7U);
}

TEST(RangeAllocator, JoinsNeighboursOnBothSides) {
  RangeAllocator ranges;
  ranges.add_slab(0, 3 * kAlign);
  const Range left = *ranges.allocate(kAlign);
  const Range middle = *ranges.allocate(kAlign);
  const Range right = *ranges.allocate(kAlign);
  ranges.free(left);
  ranges.free(right);
  EXPECT_EQ(ranges.free_ranges(), 2U);
  ranges.free(middle);
  EXPECT_EQ(ranges.free_ranges(), 1U);
  EXPECT_EQ(ranges.largest_free_range(), 3 * kAlign) << "freed neighbours were not joined";
}

TEST(RangeAllocator, NeverJoinsAcrossSlabs) {
  RangeAllocator ranges;
  ranges.add_slab(0, kAlign);
  ranges.add_slab(1, kAlign);
  EXPECT_FALSE(ranges.allocate(2 * kAlign)) << "one range was given out over two slabs";
}

TEST(RangeAllocator, RemovesOnlyEntirelyFreeSlabs) {
  RangeAllocator ranges;
  ranges.add_slab(0, 2 * kAlign);
  const Range range = *ranges.allocate(kAlign);
  EXPECT_TRUE(ranges.free_slabs().empty());
  EXPECT_FALSE(ranges.remove_slab(0)) << "a slab in use was given away";
  ranges.free(range);
  EXPECT_EQ(ranges.free_slabs(), std::vector<SlabId>{0});
  EXPECT_TRUE(ranges.remove_slab(0));
  EXPECT_FALSE(ranges.remove_slab(0));
  EXPECT_FALSE(ranges.allocate(kAlign));
  EXPECT_EQ(ranges.total_bytes(), 0U);
}

TEST(RangeAllocator, RefusesRangesThatItDidNotGive) {
  RangeAllocator ranges;
  ranges.add_slab(0, 4 * kAlign);
  const Range range = *ranges.allocate(2 * kAlign);
  EXPECT_THROW(ranges.add_slab(0, kAlign), std::invalid_argument);
  EXPECT_THROW(ranges.free({.slab = 9, .offset = 0, .size = kAlign}), std::logic_error);
  EXPECT_THROW(ranges.free({.slab = 0, .offset = 3 * kAlign, .size = 2 * kAlign}),
               std::logic_error);
  EXPECT_THROW(ranges.free({.slab = 0, .offset = 1, .size = kAlign}), std::logic_error);
  ranges.free(range);
  EXPECT_THROW(ranges.free(range), std::logic_error) << "a double free went unnoticed";
}

// One flag per unit of alignment: slow and obviously right.
class NaiveModel {
 public:
  void add_slab(SlabId id, size_t units) { slabs_[id].assign(units, false); }
  bool remove_slab(SlabId id) {
    const auto slab = slabs_.find(id);
    if (slab == slabs_.end() || std::ranges::find(slab->second, true) != slab->second.end()) {
      return false;
    }
    slabs_.erase(slab);
    return true;
  }
  std::optional<Range> allocate(size_t units) {
    std::optional<Range> best;
    size_t best_length = 0;
    for (const auto& [id, used] : slabs_) {
      for (size_t begin = 0; begin < used.size();) {
        size_t end = begin;
        while (end < used.size() && !used[end]) {
          ++end;
        }
        const size_t length = end - begin;
        if (length >= units && (!best || length < best_length)) {
          best = Range{.slab = id, .offset = begin * kAlign, .size = units * kAlign};
          best_length = length;
        }
        begin = end + 1;
      }
    }
    if (best) {
      mark(*best, true);
    }
    return best;
  }
  void free(const Range& range) { mark(range, false); }
  size_t free_bytes() const {
    size_t units = 0;
    for (const auto& [id, used] : slabs_) {
      units += static_cast<size_t>(std::ranges::count(used, false));
    }
    return units * kAlign;
  }

 private:
  void mark(const Range& range, bool used) {
    auto& slab = slabs_.at(range.slab);
    for (size_t unit = range.offset / kAlign; unit < (range.offset + range.size) / kAlign; ++unit) {
      slab[unit] = used;
    }
  }
  std::map<SlabId, std::vector<bool>> slabs_;
};

class RandomTraces : public ::testing::TestWithParam<unsigned> {};

TEST_P(RandomTraces, AgreeWithTheNaiveModel) {
  std::mt19937 random(GetParam());
  const auto up_to = [&](size_t most) { return random() % (most + 1); };
  RangeAllocator ranges;
  NaiveModel model;
  std::vector<Range> live;
  SlabId next_slab = 0;
  for (int step = 0; step < 3000; ++step) {
    const size_t dice = up_to(99);
    if (dice < 4) {
      const size_t units = 1 + up_to(60);
      ranges.add_slab(next_slab, units * kAlign + up_to(kAlign - 1));
      model.add_slab(next_slab++, units);
    } else if (dice < 8 && next_slab > 0) {
      const SlabId id = up_to(next_slab - 1);
      ASSERT_EQ(ranges.remove_slab(id), model.remove_slab(id)) << "step " << step;
    } else if (dice < 56) {
      const size_t nbytes = up_to(20 * kAlign);
      const auto got = ranges.allocate(nbytes);
      ASSERT_EQ(got, model.allocate(ranges.rounded(nbytes) / kAlign)) << "step " << step;
      if (got) {
        live.push_back(*got);
      }
    } else if (!live.empty()) {
      std::swap(live[up_to(live.size() - 1)], live.back());
      ranges.free(live.back());
      model.free(live.back());
      live.pop_back();
    }
    ASSERT_EQ(ranges.free_bytes(), model.free_bytes()) << "step " << step;
  }
  for (const Range& range : live) {
    ranges.free(range);
  }
  EXPECT_EQ(ranges.free_ranges(), ranges.slabs()) << "not everything was joined at the end";
  EXPECT_EQ(ranges.used_bytes(), 0U);
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomTraces, ::testing::Range(0U, 12U));

}  // namespace
}  // namespace memswap
