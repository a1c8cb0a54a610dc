// Frames of the CUDA kernels are the CPU oracle's, but for the positions of the payloads.
#include "emulated_codec.h"

namespace memswap::test {
namespace {

class Frames : public Emulated, public testing::WithParamInterface<uint8_t> {
 protected:
  Dtype dtype() const { return static_cast<Dtype>(GetParam()); }
};

TEST_P(Frames, AreTheOraclesForEveryPatternAndLayout) {
  for (const Layout layout : layouts_of(dtype())) {
    for (const uint64_t seed : {1, 2}) {
      SCOPED_TRACE(describe(dtype(), layout) + " seed " + std::to_string(seed));
      emulator::machine.seed = seed;
      const Tensor tensor = tensor_at(0, {Kind::kMixed, 0}, dtype(), seed,
                                      uint64_t{kPatternCount} * frame::kBlockElements);
      ASSERT_NO_FATAL_FAILURE(
          expect_same_as_oracle(tensor, {.layout = layout, .checksum = seed == 1}));
    }
  }
}

TEST_P(Frames, OfTheFastProfileAreTheOracles) {
  for (const Layout layout : layouts_of(dtype())) {
    if (!has_profiles(layout)) {
      continue;
    }
    const Tensor tensor = tensor_at(0, {Kind::kMixed, 0}, dtype(), 7,
                                    uint64_t{kPatternCount} * frame::kBlockElements);
    for (const uint8_t center : {0, 2, 9, 125, 255}) {
      SCOPED_TRACE(describe(dtype(), layout) + " center " + std::to_string(center));
      ASSERT_NO_FATAL_FAILURE(expect_same_as_oracle(
          tensor, {.layout = layout, .fast = true, .center = center, .checksum = false}));
    }
  }
}

TEST_P(Frames, OfAnyLengthAndAlignmentAreTheOracles) {
  const uint32_t width = frame::width_of(dtype());
  for (const Layout layout : layouts_of(dtype())) {
    uint32_t offset = 0;
    for (const uint64_t elements : {0, 1, 7, 255, 1023, 1024, 1025, 1100, 2049, 8191, 8192, 8193}) {
      SCOPED_TRACE(describe(dtype(), layout) + " of " + std::to_string(elements) + " at " +
                   std::to_string(offset));
      const Tensor tensor = tensor_at(offset, {Kind::kMixed, 0}, dtype(), elements, elements);
      ASSERT_NO_FATAL_FAILURE(expect_same_as_oracle(tensor, {.layout = layout}));
      offset = (offset + width) % 32;
    }
  }
}

// [Note: near exponents] in encode_exponents.cuh: blocks whose largest and smallest exponents are
// the last that words are subtracted for, or the first that bytes are.
class FramesAtTheEnds : public Emulated {};

TEST_F(FramesAtTheEnds, OfWhatIsNearACentreAreTheOracles) {
  constexpr int kBlocks = 16;
  for (const int center : {0, 1, 6, 100, 122, 127, 128, 129, 133, 255}) {
    Tensor tensor = tensor_at(0, {Kind::kRandomBits, 0}, Dtype::kBf16, 3,
                              uint64_t{kBlocks} * frame::kBlockElements);
    auto* words = reinterpret_cast<uint16_t*>(tensor.buffer.data());
    for (uint64_t i = 0; i < tensor.elements; ++i) {
      const int block = static_cast<int>(i / frame::kBlockElements);
      const uint16_t random = words[i];
      int exponent = center - random % 8;  // 0 to 7 below, and one in 32 far away
      if (random / 8 % 32 == 0) {
        exponent = random >> 15 != 0 ? center + 121 + block % 4 : center - 122 - block / 2;
      }
      exponent = std::clamp(exponent, 0, 255);
      words[i] = static_cast<uint16_t>((random & 0x807f) | exponent << 7);
    }
    SCOPED_TRACE("center " + std::to_string(center));
    ASSERT_NO_FATAL_FAILURE(expect_same_as_oracle(
        tensor, {.fast = true, .center = static_cast<uint8_t>(center), .checksum = false}));
    ASSERT_NO_FATAL_FAILURE(expect_same_as_oracle(tensor, {.checksum = false}));
  }
}

// [Note: usual blocks] in encode_exponents.cuh: most E are in a narrow range that ends at `top`,
// and some are `away` from that, which is inside of the window or outside, 0, or the largest E.
class FramesOfUsualBlocks : public Emulated, public testing::WithParamInterface<Dtype> {};

TEST_P(FramesOfUsualBlocks, AreTheOraclesWhereBlocksAreHardlyUsual) {
  constexpr int kFarthest = 34, kBlocks = 2 * kFarthest + 1;
  const FloatFields fields = float_fields(GetParam());
  const int largest = (1 << fields.exponent_bits) - 1;
  const int width_bits = 8 * static_cast<int>(frame::width_of(GetParam()));
  for (const int top : {12, 24, 120, 248}) {
    for (const int range : {1, 3, 6}) {
      for (const uint32_t one_in : {2, 1024}) {
        Tensor tensor = tensor_at(0, {Kind::kSign, 0}, GetParam(), 0,
                                  uint64_t{kBlocks} * frame::kBlockElements);
        for (uint64_t i = 0; i < tensor.elements; ++i) {
          const int away = static_cast<int>(i / frame::kBlockElements) - kFarthest;
          const uint64_t random = splitmix64(static_cast<uint64_t>(top), i);
          const bool is_away = i % one_in == 0;
          int exponent = top - (is_away ? -away : static_cast<int>(random % 64) % range);
          exponent = std::clamp(exponent, 0, largest);
          const uint64_t element = static_cast<uint64_t>(exponent) << fields.mantissa_bits |
                                   (random >> 8 & low_bits(fields.mantissa_bits)) |
                                   (random >> 63) << (width_bits - 1);
          memcpy(tensor.buffer.data() + i * frame::width_of(GetParam()), &element,
                 frame::width_of(GetParam()));
        }
        SCOPED_TRACE("top " + std::to_string(top) + ", range " + std::to_string(range) +
                     ", away one in " + std::to_string(one_in));
        ASSERT_NO_FATAL_FAILURE(expect_same_as_oracle(tensor, {.checksum = false}));
        if (range == 6) {
          ASSERT_NO_FATAL_FAILURE(expect_same_as_oracle(
              tensor, {.fast = true, .center = static_cast<uint8_t>(top), .checksum = false}));
        }
      }
    }
    if (top > largest) {
      break;  // the same again
    }
  }
}

// From block to block the mean of E grows past where the centre's next value begins. An element
// that is far above takes no part in it, except where it is in the window.
TEST_F(FramesAtTheEnds, OfMeansNextToAStepOfTheCentreAreTheOracles) {
  constexpr uint16_t kTop = 120, kBlocks = 128;
  for (const uint16_t above : {0, 4, 7, 8, 9, 20}) {
    Tensor tensor = tensor_at(0, {Kind::kRandomBits, 0}, Dtype::kBf16, 5,
                              uint64_t{kBlocks} * frame::kBlockElements);
    auto* words = reinterpret_cast<uint16_t*>(tensor.buffer.data());
    for (uint64_t i = 0; i < tensor.elements; ++i) {
      const uint64_t place = i % frame::kBlockElements;
      const bool is_top = place * 37 % frame::kBlockElements < i / frame::kBlockElements;
      const uint16_t exponent = place == 500 ? kTop + above : is_top ? kTop : kTop - 2;
      words[i] = static_cast<uint16_t>((words[i] & 0x807f) | exponent << 7);
    }
    SCOPED_TRACE("one is " + std::to_string(above) + " above");
    ASSERT_NO_FATAL_FAILURE(expect_same_as_oracle(tensor, {.checksum = false}));
  }
}

INSTANTIATE_TEST_SUITE_P(Dtype, FramesOfUsualBlocks,
                         testing::Values(Dtype::kBf16, Dtype::kFp16, Dtype::kE4m3));

INSTANTIATE_TEST_SUITE_P(Dtype, Frames,
                         testing::Range(uint8_t{1}, static_cast<uint8_t>(frame::kLastDtype + 1)));

}  // namespace
}  // namespace memswap::test
