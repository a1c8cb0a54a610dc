// Vectors by lane, for the tests of the emulated intrinsics.
#pragma once

#include <gtest/gtest.h>
#include <immintrin.h>

#include "loops.h"

namespace memswap::test {

using emulated::lanes_of;
using emulated::make_lanes;

// 0, 1, 2, ... in bytes, from `first` on.
inline __m512i count_from(unsigned first) {
  return make_lanes<uint8_t>([&](size_t i) { return first + i; });
}

// Lane i has to be expected(i).
template <typename Lane, typename Vector, typename Expected>
void expect_lanes(const Vector& vector, Expected expected) {
  const auto lanes = lanes_of<Lane>(vector);
  for (size_t i = 0; i < lanes.size(); ++i) {
    EXPECT_EQ(+lanes[i], +static_cast<Lane>(expected(i))) << "lane " << i;
  }
}

// All lanes have to be the same.
template <typename Lane, typename Vector>
void expect_all(const Vector& vector, Lane expected) {
  expect_lanes<Lane>(vector, [&](size_t) { return expected; });
}

}  // namespace memswap::test
