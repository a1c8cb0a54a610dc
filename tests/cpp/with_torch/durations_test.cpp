// What operators and the codec take, in iterations that are measured, and nothing in others.
#include "engine/durations.h"

#include <gtest/gtest.h>

#include "fake_device.h"
#include "lane/graph_capture.h"

namespace memswap {
namespace {

class Measured : public ::testing::Test {
 protected:
  Measured() { durations.begin_iteration(); }  // the second one
  void SetUp() override { testing::events_have_ended = true; }
  void TearDown() override {
    testing::events_have_ended = false;
    testing::elapsed_ms = 0;
  }

  void run(const std::string& key, double ms, double amount = 1) {
    testing::elapsed_ms = ms;
    auto span = durations.start(key, amount, testing::kFakeDevice);
    ASSERT_TRUE(span);
    durations.stop(std::move(*span));
  }
  void submit(double ms, bool encodes) {
    testing::elapsed_ms = ms;
    durations.submitted(kStream, 1'000'000, encodes);
    durations.seconds("", 1);  // reads
  }

  static inline const c10::Stream kStream{c10::Stream::UNSAFE, testing::kFakeDevice, 3};
  double encode_rate = 1, decode_rate = 1;
  Durations durations{encode_rate, decode_rate};
};

TEST_F(Measured, AnOperatorTakesWhatItTookForEachUnit) {
  run("product", 4, 2);
  EXPECT_DOUBLE_EQ(durations.seconds("product", 3).value(), 6e-3);
  EXPECT_FALSE(durations.seconds("another", 1));
}

TEST_F(Measured, TheShortestOfAnIterationCountsAndTheLatestIteration) {
  run("product", 4);
  EXPECT_DOUBLE_EQ(durations.seconds("product", 1).value(), 4e-3);
  run("product", 3);
  EXPECT_DOUBLE_EQ(durations.seconds("product", 1).value(), 3e-3);
  run("product", 5);
  EXPECT_DOUBLE_EQ(durations.seconds("product", 1).value(), 3e-3) << "it has waited for the host";
  durations.begin_iteration();
  run("product", 5);
  EXPECT_DOUBLE_EQ(durations.seconds("product", 1).value(), 5e-3);
}

TEST_F(Measured, NobodyWaitsForTheDevice) {
  testing::events_have_ended = false;
  run("product", 4);
  EXPECT_FALSE(durations.seconds("product", 1));
  testing::events_have_ended = true;
  EXPECT_TRUE(durations.seconds("product", 1));
}

TEST_F(Measured, AnOperatorOfTheHostIsNotTimed) {
  EXPECT_FALSE(durations.start("product", 1, c10::Device(c10::kCPU)));
}

TEST_F(Measured, TheCodecsRatesAreTheMeansOfAnIteration) {
  submit(9, true);  // the first one of a go may have had to wait
  EXPECT_EQ(encode_rate, 1);
  submit(1, true);
  submit(3, true);
  EXPECT_DOUBLE_EQ(encode_rate, 2e6 / 4e-3);
  EXPECT_DOUBLE_EQ(decode_rate, encode_rate) << "decodes that nobody has seen take as long";
  durations.begin_go();
  submit(9, false);
  submit(2, false);
  EXPECT_DOUBLE_EQ(decode_rate, 1e6 / 2e-3);
  durations.begin_iteration();
  submit(9, true);
  submit(5, true);
  EXPECT_DOUBLE_EQ(encode_rate, 1e6 / 5e-3);
  EXPECT_DOUBLE_EQ(decode_rate, 1e6 / 2e-3);
}

TEST(Durations, TheSecondAndThirdIterationAreMeasuredAndThenOneInAHundred) {
  double encode_rate = 1, decode_rate = 1;
  Durations durations(encode_rate, decode_rate);
  std::vector<int> measured;
  for (int iteration = 0; iteration <= 200; ++iteration) {
    if (durations.measuring()) {
      measured.push_back(iteration);
    } else {
      EXPECT_FALSE(durations.start("product", 1, testing::kFakeDevice));
    }
    durations.begin_iteration();
  }
  EXPECT_EQ(measured, (std::vector<int>{1, 2, 100, 200}));
}

TEST_F(Measured, NothingIsTimedWhileAGraphIsCaptured) {
  if (!kEveryDeviceIsAsked) {
    GTEST_SKIP() << "this torch asks no device of ours whether it captures a graph";
  }
  auto before = durations.start("product", 1, testing::kFakeDevice);
  ASSERT_TRUE(before);
  testing::graph_is_captured = true;
  EXPECT_FALSE(durations.start("product", 1, testing::kFakeDevice));
  durations.stop(std::move(*before));
  submit(1, true);
  submit(1, true);
  testing::graph_is_captured = false;
  EXPECT_FALSE(durations.seconds("product", 1)) << "its end is an event of a graph";
  EXPECT_EQ(encode_rate, 1);
}

}  // namespace
}  // namespace memswap
