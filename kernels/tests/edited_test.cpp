// Elements that somebody edits while they are encoded. The frame is of no use then and may hold
// anything, but nothing is written outside of it: a program may edit what it has saved if it asks
// for it no more, and an encoder that runs beside it does not know.
#include <atomic>
#include <thread>

#include "../cpu/codec.h"
#include "support.h"

namespace memswap::test {
namespace {

using cpu::BlockCodec;
using cpu::EncodedBlock;
using cpu::EncodeParams;
using cpu::Isa;

constexpr uint32_t kRuns = 400;
constexpr uint64_t kBehind = 64 * 1024;  // what a block too many would write, and more

// Makes other blocks of a tile's elements all the time, until it ends.
class Editor {
 public:
  Editor(Dtype dtype, GuardedBuffer& elements) {
    const uint64_t block = uint64_t{frame::kBlockElements} * frame::width_of(dtype);
    std::vector<uint8_t> patterns(std::size(kPatterns) * block);
    for (size_t i = 0; i < std::size(kPatterns); ++i) {
      fill(kPatterns[i], dtype, i, 0, frame::kBlockElements, patterns.data() + i * block);
    }
    thread_ = std::thread([this, &elements, block, patterns = std::move(patterns)] {
      for (uint64_t i = 0; !stop_.load(std::memory_order_relaxed); ++i) {
        const uint64_t from = splitmix64(1, i) % std::size(kPatterns) * block;
        memcpy(elements.data() + i % frame::kTileBlocks * block, patterns.data() + from, block);
      }
    });
  }
  ~Editor() {
    stop_ = true;
    thread_.join();
  }

 private:
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

class Edited : public testing::TestWithParam<Isa> {};

TEST_P(Edited, ElementsAreEncodedWithinBounds) {
  const BlockCodec* blocks = cpu::blocks_of(GetParam());
  if (blocks == nullptr) {
    GTEST_SKIP() << "not built, or not on this processor";
  }
  for (const Dtype dtype : all_dtypes()) {
    GuardedBuffer elements(uint64_t{frame::kTileElements} * frame::width_of(dtype));
    const Editor editor(dtype, elements);
    for (const Layout layout : layouts_of(dtype)) {
      SCOPED_TRACE(describe(dtype, layout));
      const uint64_t most = uint64_t{frame::kTileBlocks} * frame::max_payload_units(dtype, layout) *
                                frame::kUnitBytes +
                            cpu::kEncoderSlackBytes;
      GuardedBuffer slabs(frame::kTileBlocks * frame::slab_bytes(dtype, layout));
      GuardedBuffer payloads(most + kBehind);
      memset(payloads.data(), 0, payloads.size());
      for (uint32_t run = 0; run < kRuns; ++run) {
        const EncodeParams params{dtype, layout, run % 2 == 1, 128, run % 4 >= 2};
        EncodedBlock encoded[frame::kTileBlocks];
        blocks->encoder(params)(params, elements.data(), frame::kTileElements, slabs.data(),
                                payloads.data(), encoded);
        blocks->fence();
        for (const EncodedBlock& block : encoded) {
          ASSERT_TRUE(frame::block_fits(dtype, layout,
                                        frame::Record::pack(block.mode, block.units, block.packed)))
              << "mode " << block.mode << ", " << block.units << " units";
        }
      }
      const uint8_t* behind = payloads.data() + most;
      EXPECT_TRUE(std::all_of(behind, behind + kBehind, [](uint8_t byte) { return byte == 0; }))
          << "wrote behind the payloads";
      EXPECT_TRUE(slabs.guards_are_whole() && payloads.guards_are_whole())
          << "wrote outside of the slabs or the payloads";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cpu, Edited, testing::Values(Isa::kScalar, Isa::kVector, Isa::kAvx512),
                         [](const testing::TestParamInfo<Isa>& info) {
                           return info.param == Isa::kScalar   ? "scalar"
                                  : info.param == Isa::kVector ? "vector"
                                                               : "avx512";
                         });

}  // namespace
}  // namespace memswap::test
