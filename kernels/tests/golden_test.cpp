// The committed frames: every encoder writes exactly these bytes, every decoder reads them.
#include <fstream>
#include <iterator>

#include "golden_frames.h"
#include "support.h"

namespace memswap::test {
namespace {

class Golden : public CpuCodecTest {};

Frame read_golden(const GoldenFrame& golden) {
  const std::string path = std::string(MEMSWAP_GOLDEN_DIR) + "/" + golden.name + ".msf";
  std::ifstream file(path, std::ios::binary);
  const std::string bytes(std::istreambuf_iterator<char>(file), {});
  EXPECT_TRUE(file.good() || !bytes.empty()) << path << " is not there";
  Frame frame{GuardedBuffer(bytes.size()), GuardedBuffer()};
  memcpy(frame.bytes.data(), bytes.data(), bytes.size());
  return frame;
}

TEST_P(Golden, FramesAreReadAndWrittenAsCommitted) {
  for (const GoldenFrame& golden : kGoldenFrames) {
    SCOPED_TRACE(golden.name);
    const Frame frame = read_golden(golden);
    ASSERT_GE(frame.bytes.size(), frame::kHeaderBytes);
    const Tensor tensor(golden.pattern, golden.dtype, golden.seed, golden.elements);
    expect_round_trip(codec(), frame, tensor);
    const Frame encoded = encode(codec(), tensor,
                                 {.layout = golden.layout,
                                  .fast = golden.fast,
                                  .center = golden.center,
                                  .var_capacity = frame.header().var_capacity});
    ASSERT_TRUE(encoded.bytes == frame.bytes) << "the encoder's bytes have changed";
    if (golden.elements != 0) {
      EXPECT_EQ(Record::mode(frame.record(0).block[0]), golden.mode)
          << "the file does not show what its name says";
    }
  }
}

MEMSWAP_FOR_EACH_INSTRUCTION_SET(Golden);

}  // namespace
}  // namespace memswap::test
