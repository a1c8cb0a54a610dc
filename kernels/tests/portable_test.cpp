// Frames in the form in which they leave the machine.
#include "memswap/portable.h"

#include "support.h"

namespace memswap::test {
namespace {

const memswap_codec& codec() { return *memswap_codec_cpu(); }

Frame to_portable(const Frame& frame) {
  const void* arena = frame.overflow.size() != 0 ? frame.overflow.data() : nullptr;
  const uint64_t arena_units = frame.overflow.size() / frame::kUnitBytes;
  uint64_t bytes = 0;
  EXPECT_EQ(memswap_frame_portable(frame.bytes.data(), frame.bytes.size(), arena, arena_units,
                                   nullptr, 0, &bytes),
            frame::kNoRoom);
  Frame portable{GuardedBuffer(bytes), GuardedBuffer()};
  uint64_t written = 0;
  EXPECT_EQ(memswap_frame_portable(frame.bytes.data(), frame.bytes.size(), arena, arena_units,
                                   portable.bytes.data(), bytes, &written),
            frame::kOk);
  EXPECT_EQ(written, bytes);
  EXPECT_TRUE(portable.bytes.guards_are_whole());
  return portable;
}

TEST(Portable, AFrameInTwoPartsBecomesTheOrderedOneOfExactlyItsSize) {
  for (const Dtype dtype : all_dtypes()) {
    for (const Layout layout : layouts_of(dtype)) {
      for (const uint64_t elements : {0, 1, 8192, 30000}) {
        SCOPED_TRACE(describe(dtype, layout) + " elements " + std::to_string(elements));
        const Tensor tensor({Kind::kMixed, 0}, dtype, 3, elements);
        const uint64_t needed = encode(codec(), tensor, {.layout = layout}).header().var_used;
        const Frame exact = encode(codec(), tensor, {.layout = layout, .var_capacity = needed});
        const Frame scattered = encode(
            codec(), tensor,
            {.layout = layout, .var_capacity = needed / 2 + 5, .overflow_capacity = needed + 1});
        const Frame portable = to_portable(scattered);
        EXPECT_TRUE(portable.bytes == exact.bytes);
        expect_round_trip(codec(), portable, tensor);
      }
    }
  }
}

TEST(Portable, DamagedFramesAreErrors) {
  const Tensor tensor({Kind::kNormal, 0}, Dtype::kBf16, 1, 20000);
  Frame frame = encode(codec(), tensor, {});
  uint64_t written = 1;
  EXPECT_EQ(memswap_frame_portable(frame.bytes.data(), 127, nullptr, 0, nullptr, 0, &written),
            frame::kBadHeader);
  EXPECT_EQ(written, 0u);
  Record record = frame.record(2);
  record.base = frame::kMaxBaseUnits;
  memcpy(frame.bytes.data() + frame.sections().records + 2 * sizeof(record), &record,
         sizeof(record));
  EXPECT_EQ(memswap_frame_portable(frame.bytes.data(), frame.bytes.size(), nullptr, 0, nullptr, 0,
                                   &written),
            frame::kBadRecord);
}

}  // namespace
}  // namespace memswap::test
