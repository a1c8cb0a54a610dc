#include "pool/slab_source.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "fakes.h"

namespace memswap {
namespace {

using namespace std::chrono_literals;
using testing::FakeSlabs;

TEST(BudgetedSlabs, RefusesBeyondTheBudgetAndTakesBackWhatIsReturned) {
  const auto below = std::make_shared<FakeSlabs>();
  BudgetedSlabs source(below, 100);
  auto first = source.acquire(60);
  ASSERT_TRUE(first.slab);
  EXPECT_EQ(source.room(), 40U);
  const auto second = source.acquire(41);
  EXPECT_FALSE(second.slab) << "the budget was passed";
  EXPECT_NE(second.refusal.find("budget of 100 bytes"), std::string::npos) << second.refusal;
  EXPECT_EQ(below->asked_for.size(), 1U) << "a refusal went to the system";
  EXPECT_TRUE(source.acquire(40).slab);
  first.slab.reset();
  EXPECT_EQ(source.room(), 100U) << "a returned slab still counts";
}

TEST(BudgetedSlabs, AFailureBelowCostsNoBudget) {
  const auto below = std::make_shared<FakeSlabs>();
  BudgetedSlabs source(below, 100);
  below->fail = true;
  EXPECT_THROW(source.acquire(100), std::runtime_error);
  EXPECT_EQ(source.room(), 100U);
}

TEST(BudgetedSlabs, HoldsUnderManyThreads) {
  const auto below = std::make_shared<FakeSlabs>();
  BudgetedSlabs source(below, 10 * 64);
  std::atomic<int> most = 0;
  below->at_acquire = [&] {
    int seen = most;
    const int now = below->live + 1;
    while (now > seen && !most.compare_exchange_weak(seen, now)) {
    }
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] {
      std::vector<SlabResult> held;
      for (int step = 0; step < 500; ++step) {
        auto result = source.acquire(64);
        if (result.slab) {
          held.push_back(std::move(result));
        }
        if (held.size() > 2) {
          held.clear();
        }
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  EXPECT_LE(most, 10);
  EXPECT_EQ(source.room(), 640U);
  EXPECT_EQ(below->live, 0);
}

TEST(BudgetedSlabs, SlabsMayOutliveTheSource) {
  const auto below = std::make_shared<FakeSlabs>();
  auto source = std::make_unique<BudgetedSlabs>(below, 100);
  auto result = source->acquire(50);
  source.reset();
  result.slab.reset();
  EXPECT_EQ(below->live, 0);
}

TEST(CountedSlabs, CountsWhatIsOutAndWhatWas) {
  const auto below = std::make_shared<FakeSlabs>();
  CountedSlabs source(std::make_shared<BudgetedSlabs>(below, 100));
  auto first = source.acquire(30);
  auto second = source.acquire(50);
  EXPECT_FALSE(source.acquire(50).slab);
  first.slab.reset();
  const auto counts = source.counts();
  EXPECT_EQ(counts.live, 1U);
  EXPECT_EQ(counts.bytes, 50U);
  EXPECT_EQ(counts.peak_bytes, 80U);
  EXPECT_EQ(counts.acquired, 2U);
  EXPECT_EQ(counts.refused, 1U);
  EXPECT_EQ(source.room(), 50U);
}

TEST(FallbackSlabs, TurnsAFailureIntoARefusalWithItsWords) {
  const auto below = std::make_shared<FakeSlabs>();
  FallbackSlabs source(below, 0ms);
  below->fail = true;
  const auto refused = source.acquire(64);
  EXPECT_FALSE(refused.slab);
  EXPECT_NE(refused.refusal.find("64 bytes"), std::string::npos) << refused.refusal;
  EXPECT_NE(refused.refusal.find("no more memory can be pinned"), std::string::npos);
  below->fail = false;
  EXPECT_TRUE(source.acquire(64).slab);
}

TEST(FallbackSlabs, DoesNotPesterADriverThatHasFailed) {
  const auto below = std::make_shared<FakeSlabs>();
  FallbackSlabs source(below, 1h);
  below->fail = true;
  EXPECT_FALSE(source.acquire(64).slab);
  EXPECT_FALSE(source.acquire(64).slab);
  EXPECT_EQ(below->asked_for.size(), 1U) << "the driver was asked again at once";
  EXPECT_FALSE(source.acquire(32).slab);
  EXPECT_EQ(below->asked_for.size(), 2U) << "less than what failed may be there";
  below->fail = false;
  source.trim();
  EXPECT_TRUE(source.acquire(64).slab) << "trim() did not make it ask anew";
  EXPECT_EQ(below->trimmed, 1);
}

}  // namespace
}  // namespace memswap
