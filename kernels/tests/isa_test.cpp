// Blocks, every instruction set beside the oracle: what it writes, what it refuses, and that it
// stays inside its buffers. Also where frames cannot reach: outputs around the caches
// for small jobs, payloads that are cut or damaged, at every alignment.
#include "../cpu/codec.h"
#include "support.h"

namespace memswap::test {
namespace {

using cpu::BlockCodec;
using cpu::EncodedBlock;
using cpu::EncodeParams;
using cpu::Isa;

constexpr uint32_t kBlock = frame::kBlockElements;

struct EncodeResult {
  std::vector<EncodedBlock> blocks;
  GuardedBuffer slab;
  GuardedBuffer payload;
};

// The random choices of a case, by number.
class Choices {
 public:
  explicit Choices(uint64_t seed) : seed_(seed) {}
  uint64_t below(uint64_t bound) { return splitmix64(seed_, counter_++) % bound; }

 private:
  uint64_t seed_;
  uint64_t counter_ = 0;
};

class Blocks : public testing::TestWithParam<Isa> {
 protected:
  void SetUp() override {
    blocks_ = cpu::blocks_of(GetParam());
    if (blocks_ == nullptr) {
      GTEST_SKIP() << "not built, or not on this processor";
    }
  }

  static EncodeResult encode(const BlockCodec& codec, const EncodeParams& params,
                             const GuardedBuffer& elements, uint32_t count) {
    const uint32_t blocks = (count + kBlock - 1) / kBlock;
    const uint32_t slab = blocks * frame::slab_bytes(params.dtype, params.layout);
    const uint32_t payload =
        blocks * frame::max_payload_units(params.dtype, params.layout) * frame::kUnitBytes;
    EncodeResult result{std::vector<EncodedBlock>(blocks), GuardedBuffer(slab),
                        GuardedBuffer(payload + cpu::kEncoderSlackBytes)};
    codec.encoder(params)(params, elements.data(), count, result.slab.data(), result.payload.data(),
                          result.blocks.data());
    codec.fence();
    return result;
  }

  void expect_same_blocks(const EncodeResult& mine, const EncodeResult& oracle) {
    uint64_t units = 0;
    ASSERT_EQ(mine.blocks.size(), oracle.blocks.size());
    for (size_t b = 0; b < oracle.blocks.size(); ++b) {
      SCOPED_TRACE("block " + std::to_string(b));
      EXPECT_EQ(mine.blocks[b].mode, oracle.blocks[b].mode);
      EXPECT_EQ(mine.blocks[b].units, oracle.blocks[b].units);
      EXPECT_EQ(mine.blocks[b].zeros, oracle.blocks[b].zeros);
      EXPECT_EQ(mine.blocks[b].center, oracle.blocks[b].center);
      EXPECT_EQ(mine.blocks[b].center2, oracle.blocks[b].center2);
      EXPECT_EQ(mine.blocks[b].packed, oracle.blocks[b].packed);
      units += oracle.blocks[b].units;
    }
    EXPECT_TRUE(mine.slab == oracle.slab) << "another slab than the oracle's";
    EXPECT_EQ(0, memcmp(mine.payload.data(), oracle.payload.data(), units * frame::kUnitBytes))
        << "another payload than the oracle's";
    EXPECT_TRUE(mine.slab.guards_are_whole() && mine.payload.guards_are_whole())
        << "wrote outside of the slab or the payload";
  }

  static bool decode(const BlockCodec& codec, const cpu::DecodeParams& params,
                     const GuardedBuffer& slabs, const GuardedBuffer& payloads,
                     const frame::Record& record, uint32_t blocks, GuardedBuffer& out) {
    const bool ok =
        codec.decoder(params)(params, out.data(), slabs.data(), payloads.data(), record, 0, blocks);
    codec.fence();
    return ok;
  }

  // Whether both accept, with the same elements. `units` of `payload` are what the decoders are
  // told.
  void expect_same_elements(Dtype dtype, Layout layout, bool streaming, uint32_t offset,
                            const EncodeResult& coded, const EncodedBlock& told) {
    const uint32_t bytes = kBlock * frame::width_of(dtype);
    const uint32_t told_bytes = told.units * frame::kUnitBytes;
    GuardedBuffer payload(told_bytes + cpu::kSlackBytes);
    memcpy(payload.data(), coded.payload.data(),
           std::min<uint64_t>(told_bytes, coded.payload.size()));
    GuardedBuffer mine(bytes, offset), oracle(bytes, offset);
    const cpu::DecodeParams params{.dtype = dtype,
                                   .layout = layout,
                                   .streaming = streaming,
                                   .touches_pages = streaming,
                                   .asks_pages = offset == 0};
    frame::Record record{};
    record.block[0] = frame::Record::pack(told.mode, told.units, told.packed);
    record.center[0] = told.center;
    const bool expected =
        decode(cpu::scalar_blocks(), params, coded.slab, payload, record, 1, oracle);
    ASSERT_EQ(decode(*blocks_, params, coded.slab, payload, record, 1, mine), expected)
        << "accepts what the oracle does not, or refuses";
    EXPECT_TRUE(!expected || mine == oracle) << "other elements than the oracle's";
    EXPECT_TRUE(mine.guards_are_whole()) << "wrote outside of the elements";
  }

  // All blocks of a tile at once, damaged or not: whether both accept, with the same elements.
  void expect_same_tile(Dtype dtype, Layout layout, bool streaming, const EncodeResult& coded,
                        const GuardedBuffer& elements, Choices& choices) {
    const auto blocks = static_cast<uint32_t>(coded.blocks.size());
    for (uint32_t damage = 0; damage < 4; ++damage) {
      frame::Record record{};
      uint64_t units = 0;
      for (uint32_t b = 0; b < blocks; ++b) {
        const EncodedBlock& block = coded.blocks[b];
        record.block[b] = frame::Record::pack(block.mode, block.units, block.packed);
        record.center[b] = block.center;
        units += block.units;
      }
      GuardedBuffer payloads(units * frame::kUnitBytes + cpu::kSlackBytes);
      memcpy(payloads.data(), coded.payload.data(), units * frame::kUnitBytes);
      if (damage != 0 && units != 0) {
        payloads.data()[choices.below(units * frame::kUnitBytes)] ^=
            static_cast<uint8_t>(1 + choices.below(255));
      }
      const uint32_t offset = damage % 2 == 0 ? 0 : frame::width_of(dtype);
      GuardedBuffer mine(elements.size(), offset), oracle(elements.size(), offset);
      const bool around_caches = streaming && offset == 0;
      const cpu::DecodeParams params{.dtype = dtype,
                                     .layout = layout,
                                     .streaming = around_caches,
                                     .touches_pages = around_caches && damage != 0,
                                     .asks_pages = damage < 2};
      const bool expected =
          decode(cpu::scalar_blocks(), params, coded.slab, payloads, record, blocks, oracle);
      ASSERT_EQ(decode(*blocks_, params, coded.slab, payloads, record, blocks, mine), expected)
          << "accepts what the oracle does not, or refuses";
      EXPECT_TRUE(!expected || mine == oracle) << "other elements than the oracle's";
      EXPECT_TRUE(mine.guards_are_whole()) << "wrote outside of the elements";
    }
  }

  const BlockCodec* blocks_ = nullptr;
};

template <typename Check>
void for_each_block(uint32_t repeats, Check check) {
  for (const Dtype dtype : all_dtypes()) {
    for (const Layout layout : layouts_of(dtype)) {
      for (const Pattern pattern : kPatterns) {
        for (uint64_t seed = 0; seed < repeats; ++seed) {
          SCOPED_TRACE(describe(dtype, layout) + " " + describe(pattern) + " seed " +
                       std::to_string(seed));
          Choices choices(seed * 1000 + static_cast<uint64_t>(dtype));
          const auto count =
              static_cast<uint32_t>(seed % 3 == 0 ? 1 + choices.below(kBlock) : kBlock);
          const uint32_t width = frame::width_of(dtype);
          GuardedBuffer elements(uint64_t{kBlock} * width, seed % 2 == 0 ? 0 : width);
          memset(elements.data(), 0, elements.size());
          fill(pattern, dtype, seed, 0, count, elements.data());
          check(dtype, layout, elements, count, choices);
          if (testing::Test::HasFailure()) {
            return;
          }
        }
      }
    }
  }
}

TEST_P(Blocks, IsCodedToTheOraclesBytesAndBack) {
  for_each_block(6, [&](Dtype dtype, Layout layout, const GuardedBuffer& elements, uint32_t count,
                        Choices& choices) {
    for (const bool streaming : {false, true}) {
      for (const bool fast : {false, true}) {
        const EncodeParams params{.dtype = dtype,
                                  .layout = layout,
                                  .fast = fast,
                                  .center = static_cast<uint8_t>(choices.below(256)),
                                  .streaming = streaming,
                                  .touches_pages = streaming && fast,
                                  .asks_pages = fast};
        const EncodeResult oracle = encode(cpu::scalar_blocks(), params, elements, count);
        expect_same_blocks(encode(*blocks_, params, elements, count), oracle);
        for (const uint32_t offset : {0u, frame::width_of(dtype)}) {
          expect_same_elements(dtype, layout, streaming && offset == 0, offset, oracle,
                               oracle.blocks[0]);
        }
      }
    }
  });
}

// All blocks of a tile are given at once, and an instruction set may work on several of them at a
// time. Neighbours of all kinds, so that what belongs to one shows in another.
TEST_P(Blocks, AmongOthersIsCodedToTheOraclesBytesAndBack) {
  for (const Dtype dtype : all_dtypes()) {
    for (const Layout layout : layouts_of(dtype)) {
      for (uint64_t seed = 0; seed < 24; ++seed) {
        SCOPED_TRACE(describe(dtype, layout) + " seed " + std::to_string(seed));
        Choices choices(seed * 1000 + static_cast<uint64_t>(dtype));
        const uint32_t width = frame::width_of(dtype);
        const auto blocks = static_cast<uint32_t>(1 + choices.below(frame::kTileBlocks));
        const auto missing = static_cast<uint32_t>(seed % 2 == 0 ? 0 : choices.below(kBlock));
        const uint32_t count = blocks * kBlock - missing;
        GuardedBuffer elements(uint64_t{blocks} * kBlock * width, width);
        for (uint32_t b = 0; b < blocks; ++b) {
          const Pattern pattern = kPatterns[choices.below(std::size(kPatterns))];
          fill(pattern, dtype, seed, 0, kBlock, elements.data() + uint64_t{b} * kBlock * width);
        }
        memset(elements.data() + uint64_t{count} * width, 0, uint64_t{missing} * width);
        const bool streaming = seed % 3 == 0;
        const EncodeParams params{.dtype = dtype,
                                  .layout = layout,
                                  .fast = seed % 4 == 3,
                                  .center = static_cast<uint8_t>(choices.below(256)),
                                  .streaming = streaming,
                                  .touches_pages = streaming && seed % 2 == 0,
                                  .asks_pages = seed % 4 >= 2};
        const auto mine = encode(*blocks_, params, elements, count);
        const auto oracle = encode(cpu::scalar_blocks(), params, elements, count);
        expect_same_blocks(mine, oracle);
        expect_same_tile(dtype, layout, params.streaming, oracle, elements, choices);
        if (testing::Test::HasFailure()) {
          return;
        }
      }
    }
  }
}

TEST_P(Blocks, DamagedIsRefusedExactlyWhereTheOracleRefuses) {
  for_each_block(4, [&](Dtype dtype, Layout layout, const GuardedBuffer& elements, uint32_t count,
                        Choices& choices) {
    const EncodeParams params{
        .dtype = dtype, .layout = layout, .fast = false, .center = 0, .streaming = false};
    const uint32_t longest = frame::max_payload_units(dtype, layout);
    for (uint32_t damage = 0; damage < 12; ++damage) {
      EncodeResult coded = encode(cpu::scalar_blocks(), params, elements, count);
      EncodedBlock told = coded.blocks[0];
      const uint64_t payload_bytes = uint64_t{told.units} * frame::kUnitBytes;
      switch (damage % 6) {
        case 0:
          told.units = static_cast<uint32_t>(choices.below(longest + 1));
          break;
        case 1:
          told.units -= told.units != 0;
          break;
        case 2:
          told.units += told.units != longest;
          break;
        case 3:
          told.center = static_cast<uint8_t>(choices.below(256));
          break;
        case 4:
          if (payload_bytes != 0) {
            coded.payload.data()[choices.below(payload_bytes)] ^=
                static_cast<uint8_t>(1 << choices.below(8));
          }
          break;
        default:
          if (coded.slab.size() != 0) {
            coded.slab.data()[choices.below(coded.slab.size())] ^=
                static_cast<uint8_t>(1 << choices.below(8));
          }
      }
      const auto mode = static_cast<uint32_t>(choices.below(frame::kModes));
      if (damage >= 6 && frame::mode_fits(dtype, layout, mode)) {
        told.mode = mode;
      }
      if (frame::has_bitmap(told.mode)) {
        told.packed ^= damage % 4 == 3;
      } else {
        told.packed = false;
      }
      expect_same_elements(dtype, layout, false, 0, coded, told);
    }
  });
}

TEST_P(Blocks, ChecksumIsTheOraclesForEveryNumberOfBytes) {
  GuardedBuffer bytes(uint64_t{frame::kTileElements} * 8, 1);
  fill({Kind::kRandomBits, 0}, Dtype::kUint8, 1, 0, bytes.size(), bytes.data());
  for (uint64_t size = 0; size <= bytes.size(); size += size < 1100 ? 1 : 997) {
    ASSERT_EQ(blocks_->checksum(bytes.data(), size),
              cpu::scalar_blocks().checksum(bytes.data(), size))
        << size << " bytes";
  }
  memset(bytes.data(), 255, bytes.size());
  EXPECT_EQ(blocks_->checksum(bytes.data(), bytes.size()),
            cpu::scalar_blocks().checksum(bytes.data(), bytes.size()))
      << "the largest sum there is";
}

TEST_P(Blocks, CopyAroundCachesIsMemcpyAtEveryAlignment) {
  GuardedBuffer from(512, 1);
  fill({Kind::kRandomBits, 0}, Dtype::kUint8, 2, 0, from.size(), from.data());
  for (uint32_t offset = 0; offset < 64; ++offset) {
    for (uint32_t bytes = 0; bytes <= from.size(); bytes += bytes < 140 ? 1 : 31) {
      GuardedBuffer to(bytes, offset);
      blocks_->copy_around_caches(to.data(), from.data(), bytes);
      blocks_->fence();
      ASSERT_EQ(0, memcmp(to.data(), from.data(), bytes)) << bytes << " bytes to +" << offset;
      ASSERT_TRUE(to.guards_are_whole()) << bytes << " bytes to +" << offset;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cpu, Blocks, testing::Values(Isa::kVector, Isa::kAvx512),
                         [](const testing::TestParamInfo<Isa>& info) {
                           return info.param == Isa::kVector ? "vector" : "avx512";
                         });

}  // namespace
}  // namespace memswap::test
