// Expectations without Python: what the last frame of a tensor says about its next one. What each
// rule does stands in tests/unit/test_expectations.py, through the bindings.
#include "engine/expectations.h"

#include <gtest/gtest.h>

#include <atomic>
#include <optional>
#include <string>
#include <thread>

namespace memswap {
namespace {

constexpr int64_t kBytes = 1 << 20;

TensorKey tensor(int64_t ordinal = 0, int64_t nbytes = kBytes) {
  return {"layer", ordinal, nbytes, c10::ScalarType::BFloat16};
}

FrameFacts facts(double ratio, uint64_t var_used = 5000) {
  FrameFacts found;
  found.frame_nbytes = static_cast<int64_t>(ratio * kBytes);
  found.elements = kBytes / 2;
  found.blocks = 512;
  found.var_used = var_used;
  return found;
}

TEST(Expectations, ACapacityFollowsTheLastFrameAndSizesAreKnownFromThenOn) {
  Expectations known({}, {});
  EXPECT_FALSE(known.sizes(tensor()));
  const Expectation first = known.of(tensor());
  EXPECT_TRUE(first.pays);
  known.learn(first, facts(0.67));
  const Expectation next = known.of(tensor());
  EXPECT_LT(*next.options.var_capacity, *first.options.var_capacity);
  EXPECT_NEAR(static_cast<double>(*next.options.var_capacity), 5000 * 1.10, 20);
  const std::optional<FrameSizes> sizes = known.sizes(tensor());
  ASSERT_TRUE(sizes);
  EXPECT_EQ(sizes->used, static_cast<int64_t>(0.67 * kBytes) + 0);
  EXPECT_TRUE(known.sizes(tensor(0, 2 * kBytes))) << "of another size in the same place";
}

TEST(Expectations, WhatIsAtFaultIsAskedOnceAndSaysWhy) {
  int asked = 0;
  std::string fault = "it gave other bits";
  Expectations known({.fault = [&](uint8_t, uint8_t) { return ++asked, fault; }}, {});
  EXPECT_EQ(known.of(tensor()).fault, fault);
  EXPECT_FALSE(known.of(tensor()).pays);
  EXPECT_EQ(asked, 2) << "it may have had no memory for the check";
  fault.clear();
  EXPECT_TRUE(known.of(tensor()).pays);
  EXPECT_TRUE(known.of(tensor()).pays);
  EXPECT_EQ(asked, 3) << "what is trusted is not asked about again";
}

TEST(Expectations, MemoryIsBoundedAndTheOldestGoFirst) {
  Expectations known({}, {.most_keys = 4});
  known.learn(known.of(tensor(0)), facts(0.67));
  for (int64_t ordinal = 1; ordinal < 20; ++ordinal) {
    known.of(tensor(ordinal));
    known.of(tensor(0));
  }
  EXPECT_EQ(known.size(), 4u);
  EXPECT_TRUE(known.sizes(tensor(0))) << "what each step uses was forgotten";
  EXPECT_FALSE(known.sizes(tensor(1)));
}

TEST(Expectations, APlannerReadsSizesWhileTensorsLeave) {
  Expectations known({}, {.most_keys = 8});
  std::atomic<bool> ended{false};
  std::thread planner([&] {
    while (!ended) {
      for (int64_t ordinal = 0; ordinal < 16; ++ordinal) {
        if (const auto sizes = known.sizes(tensor(ordinal))) {
          EXPECT_GT(sizes->used, 0);
        }
      }
    }
  });
  for (int times = 0; times < 200; ++times) {
    for (int64_t ordinal = 0; ordinal < 16; ++ordinal) {
      known.learn(known.of(tensor(ordinal)), facts(0.67, 5000 + ordinal));
    }
    known.begin_iteration();
  }
  ended = true;
  planner.join();
}

}  // namespace
}  // namespace memswap
