// The emulated intrinsics beside the processor's own, where it has them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string_view>

#include "operations.h"

namespace memswap::test {
namespace {

constexpr int kRounds = 400;

// Bytes of all kinds, and such as make extremes, ties and zeros likely.
Operands random_operands(std::mt19937_64& random) {
  Operands operands;
  for (unsigned char* vector : {operands.a, operands.b, operands.c}) {
    const uint64_t kind = random() % 4;
    for (int i = 0; i < 64; ++i) {
      const uint64_t bits = random();
      vector[i] = static_cast<unsigned char>(kind == 0   ? bits % 4
                                             : kind == 1 ? 0 - bits % 3
                                                         : bits);
    }
  }
  operands.mask = random() & (random() % 2 == 0 ? ~uint64_t{0} : random());
  return operands;
}

void expect_agreement(std::span<const Operation> processor) {
  std::mt19937_64 random(1);
  for (const Operation& real : processor) {
    const auto emulated = emulated_operations();
    const auto mine = std::find_if(
        emulated.begin(), emulated.end(),
        [&](const Operation& operation) { return std::string_view(operation.name) == real.name; });
    ASSERT_NE(mine, emulated.end()) << real.name;
    for (int round = 0; round < kRounds; ++round) {
      const Operands operands = random_operands(random);
      unsigned char expected[64] = {}, result[64] = {};
      real.run(operands, expected);
      mine->run(operands, result);
      ASSERT_EQ(std::memcmp(expected, result, sizeof(result)), 0)
          << real.name << " differs from the processor's, round " << round;
    }
  }
}

TEST(EmulatedBesideProcessor, Avx512Agrees) {
  if (!has_avx512()) {
    GTEST_SKIP() << "this processor has no AVX-512 with VBMI2";
  }
  expect_agreement(avx512_operations());
}

TEST(EmulatedBesideProcessor, Avx2AgreesWithItsHalves) {
  if (!has_avx2()) {
    GTEST_SKIP() << "this processor has no AVX2";
  }
  expect_agreement(avx2_operations());
}

}  // namespace
}  // namespace memswap::test
