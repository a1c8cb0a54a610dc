// Moments, and what lies between them: on the host, on a device, on a device without a clock.
#include "engine/clock.h"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "fake_device.h"

namespace memswap {
namespace {

using namespace std::chrono_literals;
const c10::Device kCpu(c10::kCPU);

class Laps : public ::testing::Test {
 protected:
  void SetUp() override { testing::events_have_ended = true; }
  void TearDown() override {
    testing::events_have_ended = false;
    testing::elapsed_ms = 0;
    testing::in_event_call = nullptr;
  }
};

TEST_F(Laps, ALapOfTheHostIsByItsClock) {
  Lap lap(kCpu);
  const auto before = std::chrono::steady_clock::now();
  lap.begin();
  std::this_thread::sleep_for(2ms);  // or for longer, on a busy machine
  lap.end();
  const std::chrono::duration<double> around = std::chrono::steady_clock::now() - before;
  std::this_thread::sleep_for(20ms);
  EXPECT_GE(lap.seconds(), 2e-3);
  EXPECT_LE(lap.seconds(), around.count()) << "what came after the end is no part of it";
}

TEST_F(Laps, ALapOfADeviceIsByItsEventsAndWaitsForTheLast) {
  Lap lap(testing::kFakeDevice);
  lap.begin();
  lap.end();
  int calls = 0;
  testing::in_event_call = [&] { ++calls; };
  testing::elapsed_ms = 7;
  EXPECT_DOUBLE_EQ(lap.seconds(), 7e-3);
  EXPECT_EQ(calls, 3) << "one waits for the end; then torch asks both events whether they are over";
}

TEST_F(Laps, ALapOfADeviceWithoutAClockIsByTheHosts) {
  testing::elapsed_ms = testing::kNoClock;
  Lap lap(testing::kFakeDevice);
  lap.begin();
  lap.end();
  testing::in_event_call = [] { std::this_thread::sleep_for(3ms); };  // the device works
  EXPECT_GE(lap.seconds(), 3e-3);
}

TEST_F(Laps, TimeDoesNotRunBackwards) {
  testing::elapsed_ms = -1;
  const MomentPtr begin = moment_on(testing::kFakeDevice), end = moment_on(testing::kFakeDevice);
  EXPECT_EQ(seconds_between(*begin, *end), 0);
}

TEST_F(Laps, AProcessorCapturesNoGraph) {
  testing::graph_is_captured = true;
  EXPECT_NE(Clock(kCpu).now(), nullptr);
  EXPECT_EQ(Clock(testing::kFakeDevice).now() == nullptr, kEveryDeviceIsAsked);
  testing::graph_is_captured = false;
  EXPECT_NE(Clock(testing::kFakeDevice).now(), nullptr);
}

}  // namespace
}  // namespace memswap
