// Frames of the CUDA kernels are the CPU oracle's, but for the positions of the payloads.
#include "emulated_codec.h"

namespace memswap::test {
namespace {

class Frames : public Emulated, public testing::WithParamInterface<uint8_t> {
 protected:
  Dtype dtype() const { return static_cast<Dtype>(GetParam()); }
};

TEST_P(Frames, AreTheOraclesForEveryPatternAndShape) {
  for (const Shape shape : shapes_of(dtype())) {
    for (const uint64_t seed : {1, 2}) {
      SCOPED_TRACE(describe(dtype(), shape) + " seed " + std::to_string(seed));
      emulator::machine.seed = seed;
      const Tensor tensor = tensor_at(0, {Kind::kMixed, 0}, dtype(), seed,
                                      uint64_t{kPatternCount} * frame::kBlockElements);
      ASSERT_NO_FATAL_FAILURE(
          expect_same_as_oracle(tensor, {.shape = shape, .checksum = seed == 1}));
    }
  }
}

TEST_P(Frames, OfTheFastProfileAreTheOracles) {
  for (const Shape shape : shapes_of(dtype())) {
    if (!has_profiles(shape)) {
      continue;
    }
    const Tensor tensor = tensor_at(0, {Kind::kMixed, 0}, dtype(), 7,
                                    uint64_t{kPatternCount} * frame::kBlockElements);
    for (const uint8_t center : {0, 2, 9, 125, 255}) {
      SCOPED_TRACE(describe(dtype(), shape) + " center " + std::to_string(center));
      ASSERT_NO_FATAL_FAILURE(expect_same_as_oracle(
          tensor, {.shape = shape, .fast = true, .center = center, .checksum = false}));
    }
  }
}

TEST_P(Frames, OfAnyLengthAndAlignmentAreTheOracles) {
  const uint32_t width = frame::width_of(dtype());
  for (const Shape shape : shapes_of(dtype())) {
    uint32_t offset = 0;
    for (const uint64_t elements : {0, 1, 7, 255, 1023, 1024, 1025, 1100, 2049, 8191, 8192, 8193}) {
      SCOPED_TRACE(describe(dtype(), shape) + " of " + std::to_string(elements) + " at " +
                   std::to_string(offset));
      const Tensor tensor = tensor_at(offset, {Kind::kMixed, 0}, dtype(), elements, elements);
      ASSERT_NO_FATAL_FAILURE(expect_same_as_oracle(tensor, {.shape = shape}));
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

INSTANTIATE_TEST_SUITE_P(Dtype, Frames,
                         testing::Range(uint8_t{1}, static_cast<uint8_t>(frame::kLastDtype + 1)));

}  // namespace
}  // namespace memswap::test
