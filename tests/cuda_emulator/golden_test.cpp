// The committed frames are what the kernels write, and they read them.
#include <fstream>
#include <iterator>

#include "emulated_codec.h"
#include "golden_frames.h"

namespace memswap::test {
namespace {

class Golden : public Emulated {};

TEST_F(Golden, FramesAreWrittenAndRead) {
  for (const GoldenFrame& golden : kGoldenFrames) {
    SCOPED_TRACE(golden.name);
    const std::string path = std::string(MEMSWAP_GOLDEN_DIR) + "/" + golden.name + ".msf";
    std::ifstream file(path, std::ios::binary);
    ASSERT_TRUE(file) << "cannot read " << path;
    const std::vector<char> bytes(std::istreambuf_iterator<char>(file), {});
    Frame frame{GuardedBuffer(bytes.size()), GuardedBuffer()};
    memcpy(frame.bytes.data(), bytes.data(), bytes.size());
    const Tensor tensor = tensor_at(0, golden.pattern, golden.dtype, golden.seed, golden.elements);
    const Frame found = encode(
        emulated(), tensor,
        {.layout = golden.layout, .fast = golden.fast, .center = golden.center, .checksum = true});
    ASSERT_NO_FATAL_FAILURE(expect_same_frame(frame, found));
    ASSERT_NO_FATAL_FAILURE(expect_round_trip(emulated(), frame, tensor));
  }
}

}  // namespace
}  // namespace memswap::test
