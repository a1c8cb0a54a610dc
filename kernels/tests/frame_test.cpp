// What the header and the records of a frame say.
#include <algorithm>
#include <numeric>

#include "support.h"

namespace memswap::test {
namespace {

class FrameContents : public CpuCodecTest {};

uint64_t element_at(const Tensor& tensor, uint64_t index) {
  const uint32_t width = frame::width_of(tensor.dtype);
  uint64_t element = 0;
  memcpy(&element, tensor.buffer.data() + index * width, width);
  return element;
}

// Header::zeros by the words of the specification.
uint64_t expected_zeros(const Tensor& tensor, const Frame& frame) {
  const auto layout = static_cast<Layout>(frame.header().layout);
  const frame::Split split = frame::split_of(tensor.dtype);
  const uint32_t width_bits = 8 * split.width;
  uint64_t zeros = 0;
  for (uint64_t i = 0; i < tensor.elements; ++i) {
    const uint64_t magnitude = element_at(tensor, i) & low_bits(width_bits - 1);
    const Record record = frame.record(static_cast<uint32_t>(i / frame::kTileElements));
    const bool literal =
        Record::mode(record.block[i / frame::kBlockElements % frame::kTileBlocks]) ==
        frame::kLiteral;
    if (layout == Layout::kSparse) {
      zeros += magnitude == 0;
    } else if (layout == Layout::kDense || (layout == Layout::kUpcast && !literal)) {
      zeros += magnitude >> (width_bits - 1 - split.exponent_bits) == 0;
    }
  }
  return zeros;
}

TEST_P(FrameContents, CountersAreThoseOfTheSpecification) {
  for (const Dtype dtype : all_dtypes()) {
    for (const Layout layout : layouts_of(dtype)) {
      SCOPED_TRACE(describe(dtype, layout));
      const Tensor tensor({Kind::kMixed, 0}, dtype, 11, 40000);
      const Frame frame = encode(codec(), tensor, {.layout = layout});
      const Header header = frame.header();
      const Sections sections = frame.sections();
      EXPECT_EQ(header.flags, frame::kOrdered | frame::kChecked);
      EXPECT_EQ(header.zeros, expected_zeros(tensor, frame));
      uint32_t modes[frame::kModeCounts] = {};
      uint64_t units = 0;
      for (uint32_t tile = 0; tile < sections.tiles; ++tile) {
        const Record record = frame.record(tile);
        EXPECT_EQ(record.base, units) << "positions are not the prefix sum of the sizes";
        for (uint32_t i = 0; i < frame::kTileBlocks; ++i) {
          const uint32_t mode = Record::mode(record.block[i]);
          units += Record::units(record.block[i]);
          EXPECT_EQ(mode == frame::kNone, tile * frame::kTileBlocks + i >= sections.blocks);
          if (mode != frame::kNone) {
            ++modes[mode - 1];
          } else {
            EXPECT_EQ(record.block[i], 0);
            EXPECT_EQ(record.center[i], 0);
          }
        }
      }
      EXPECT_EQ(header.var_used, units);
      EXPECT_EQ(header.overflow_used, 0u);
      EXPECT_TRUE(std::equal(modes, modes + frame::kModeCounts, header.mode_count));
      const bool has_centers =
          layout == Layout::kDense || layout == Layout::kSparse || layout == Layout::kUpcast;
      EXPECT_EQ(header.center_sum != 0, has_centers);
    }
  }
}

TEST_P(FrameContents, CenterSumOfTheFastProfileIsTheGivenCenter) {
  const Tensor tensor({Kind::kNormal, 0}, Dtype::kBf16, 1, 5000);
  const Header header =
      encode(codec(), tensor, {.layout = Layout::kDense, .fast = true, .center = 131}).header();
  EXPECT_EQ(header.center_sum, 131u * 5);
}

TEST_P(FrameContents, ChecksumIsTheWeightedSumOfTheWords) {
  for (const Dtype dtype : {Dtype::kUint8, Dtype::kBf16, Dtype::kFp64}) {
    const Tensor tensor({Kind::kRandomBits, 0}, dtype, 5, 8192 + 77);
    const Frame frame = encode(codec(), tensor, {.layout = Layout::kRaw});
    const uint64_t tile_bytes = uint64_t{frame::kTileElements} * frame::width_of(dtype);
    for (uint32_t tile = 0; tile < 2; ++tile) {
      uint64_t sum = 0;
      for (uint64_t byte = 0; byte < tile_bytes; ++byte) {
        const uint64_t at = tile * tile_bytes + byte;
        const uint64_t value = at < tensor.buffer.size() ? tensor.buffer.data()[at] : 0;
        sum += (value << (8 * (byte % 4))) * (2 * (byte / 4) + 1);
      }
      EXPECT_EQ(frame.record(tile).checksum, sum % 4294967291);
    }
    EXPECT_EQ(
        encode(codec(), tensor, {.layout = Layout::kRaw, .checksum = false}).record(0).checksum,
        0u);
  }
}

TEST_P(FrameContents, NoFrameIsLongerThanTheDocumentedBound) {
  for (const Dtype dtype : all_dtypes()) {
    for (const Layout layout : layouts_of(dtype)) {
      SCOPED_TRACE(describe(dtype, layout));
      const uint64_t elements = 3 * frame::kTileElements;
      const Sections sections = frame::sections_of(dtype, layout, elements);
      EXPECT_LE(sections.bytes(sections.max_var_units()),
                elements * frame::width_of(dtype) + 128 + 32 * sections.tiles);
      const Tensor tensor({Kind::kRandomBits, 0}, dtype, 9, elements);
      const Header header = encode(codec(), tensor, {.layout = layout}).header();
      EXPECT_EQ(header.status, frame::kOk);
      EXPECT_LE(header.var_used, sections.max_var_units());
    }
  }
}

MEMSWAP_FOR_EACH_INSTRUCTION_SET(FrameContents);

}  // namespace
}  // namespace memswap::test
