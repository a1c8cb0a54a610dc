// Every barrier of the kernels is needed, and the emulator would notice if one were missing: each
// is taken away in turn. This also is the test of the emulator.
#include <iostream>

#include "emulated_codec.h"

namespace memswap::test {
namespace {

class Barriers : public Emulated {};

// Reaches every barrier: many blocks per warp, every mode.
bool everything_works(uint64_t seed) {
  emulator::machine.seed = seed;
  emulator::machine.processors = seed % 2 == 0 ? 2 : 1;  // fences are between thread blocks
  emulator::machine.blocks_per_processor = 1;
  emulator::errors.clear();
  bool is_right = true;
  for (const auto& [dtype, layout] : {std::pair{Dtype::kBf16, Layout::kDense},
                                      {Dtype::kFp16, Layout::kSparse},
                                      {Dtype::kInt16, Layout::kInts}}) {
    Frame frame;
    uint32_t status = 0;
    Tensor tensor = tensor_at(0, {Kind::kMixed, 0}, dtype, seed, 57 * 1024);
    if (seed % 2 == 0 && layout == Layout::kSparse) {
      // Two survivors a block and signed zeros: streams of different kinds share words.
      tensor = tensor_at(0, {Kind::kSign, 0}, dtype, seed, 57 * 1024);
      for (uint64_t i = 0; i < tensor.elements; i += 512) {
        tensor.buffer.data()[2 * i] = static_cast<uint8_t>(splitmix64(seed, i) | 1);
      }
    }
    Tensor output = tensor_at(0, {Kind::kRandomBits, 0}, dtype, 1, tensor.elements);
    const memswap_encode_job encode = encode_job(tensor, {.layout = layout}, &frame);
    memswap_decode_job decode = decode_job(frame, &output, &status);
    decode.verify = seed % 3 == 0;  // the check brings barriers with it
    emulated_encode(&encode, nullptr);
    if (!emulator::errors.empty()) {
      return false;
    }
    emulated_decode(&decode, nullptr);
    is_right &= status == frame::kOk && emulator::errors.empty() && output.buffer == tensor.buffer;
  }
  return is_right;
}

TEST_F(Barriers, AreAllNeededAndTheEmulatorMissesEachOfThem) {
  emulator::seen_sites.clear();
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    ASSERT_TRUE(everything_works(seed))
        << (emulator::errors.empty() ? "another tensor" : emulator::errors[0]);
  }
  const std::set<emulator::Site> sites = emulator::seen_sites;
  EXPECT_GE(sites.size(), 15u);
  for (const emulator::Site& site : sites) {
    emulator::skipped_site = site;
    bool is_missed = false;
    for (uint64_t seed = 1; seed <= 3 && !is_missed; ++seed) {
      is_missed = !everything_works(seed);
    }
    if (is_missed && !emulator::errors.empty()) {
      std::cout << site.first << ":" << site.second << " left out: " << emulator::errors[0] << "\n";
    }
    EXPECT_TRUE(is_missed) << "without the barrier at " << site.first << ":" << site.second
                           << " nothing is wrong";
  }
  emulator::errors.clear();
}

}  // namespace
}  // namespace memswap::test
