// The order of demands, and what it says about bytes that come back ahead.
#include "engine/demand_order.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <vector>

namespace memswap {
namespace {

DemandOrder saved(std::vector<int64_t> sizes) {
  DemandOrder order;
  for (const int64_t nbytes : sizes) {
    order.save(nbytes, /*decoded=*/false);
  }
  return order;
}

std::vector<size_t> ahead_of(DemandOrder& order, size_t index) {
  const auto ahead = order.advance(index);
  return {ahead.begin(), ahead.end()};
}

TEST(DemandOrder, AWrongOrderIsAnErrorAndNotAWildRead) {
  DemandOrder order = saved({1, 1});
  EXPECT_THROW(order.expect({0, 0}, 10), std::invalid_argument);
  EXPECT_THROW(order.expect({1}, 10), std::invalid_argument);
  EXPECT_THROW(order.expect({0, 2}, 10), std::invalid_argument);
  EXPECT_FALSE(order.expects_all());
}

TEST(DemandOrder, WhatIsAheadIsNamedOnceAndStaysBelowTheBound) {
  DemandOrder order = saved({50, 50, 50, 50, 50});
  order.expect({4, 3, 2, 1, 0}, 100);
  EXPECT_EQ(ahead_of(order, 4), (std::vector<size_t>{3, 2}));
  EXPECT_EQ(ahead_of(order, 3), (std::vector<size_t>{1}));
  EXPECT_EQ(ahead_of(order, 2), (std::vector<size_t>{0}));
  EXPECT_EQ(ahead_of(order, 1), (std::vector<size_t>{}));
}

TEST(DemandOrder, AForecastKeepsWhatIsDemandedFirstAndWhatWasNeverFreed) {
  DemandOrder order = saved({50, 50, 50});
  order.demand(2);
  EXPECT_FALSE(order.demand(2));
  const std::vector<size_t> held{0};
  const Forecast forecast(order, held, 60);
  EXPECT_EQ(forecast.order, (std::vector<size_t>{2, 1, 0}));
  EXPECT_EQ(forecast.verdicts[2], Forecast::Verdict::kNeededAtOnce);
  EXPECT_EQ(forecast.verdicts[1], Forecast::Verdict::kNone);
  EXPECT_EQ(forecast.verdicts[0], Forecast::Verdict::kNeverFreed);
  EXPECT_TRUE(forecast.expects(1, 50));
  EXPECT_FALSE(forecast.expects(1, 51));
  EXPECT_FALSE(forecast.expects(3, 50));
}

}  // namespace
}  // namespace memswap
