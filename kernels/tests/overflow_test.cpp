// Frames whose var is too small: the arena takes what does not fit, or the status says so.
#include "support.h"

namespace memswap::test {
namespace {

class Overflow : public CpuCodecTest {};

const Tensor& tensor() {
  static const Tensor tensor({Kind::kOutliers, 9}, Dtype::kBf16, 21, 5 * 8192 + 100);
  return tensor;
}

uint64_t needed_units(const memswap_codec& codec) {
  return encode(codec, tensor(), {}).header().var_used;
}

TEST_P(Overflow, TilesThatDoNotFitGoToTheArenaAndComeBack) {
  const uint64_t needed = needed_units(codec());
  for (const uint64_t capacity : {uint64_t{0}, uint64_t{1}, needed / 3, needed - 1, needed}) {
    SCOPED_TRACE(capacity);
    const Frame frame =
        encode(codec(), tensor(), {.var_capacity = capacity, .overflow_capacity = needed});
    const Header header = frame.header();
    EXPECT_EQ(header.status, frame::kOk);
    EXPECT_LE(header.var_used, capacity);
    EXPECT_EQ(header.var_used + header.overflow_used, needed);
    EXPECT_EQ(header.overflow_used, frame.overflow_cursor);
    EXPECT_EQ((header.flags & frame::kOrdered) != 0, capacity == needed);
    expect_round_trip(codec(), frame, tensor());
  }
}

TEST_P(Overflow, AFrameWithoutRoomSaysSoAndDoesNotDecode) {
  const uint64_t needed = needed_units(codec());
  for (const uint64_t arena : {uint64_t{0}, uint64_t{1}, needed / 2}) {
    const Frame frame = encode(codec(), tensor(), {.var_capacity = 0, .overflow_capacity = arena});
    EXPECT_EQ(frame.header().status, frame::kNoRoom);
    EXPECT_EQ(frame.header().flags & frame::kOrdered, 0);
    EXPECT_LE(frame.overflow_cursor, arena) << "a tile that does not fit moved the cursor";
    Tensor output(tensor().dtype, tensor().elements);
    EXPECT_EQ(decode(codec(), frame, &output), frame::kBadHeader);
  }
}

TEST_P(Overflow, TheArenaIsUsedToItsLastUnit) {
  const uint64_t needed = needed_units(codec());
  const Frame exact = encode(codec(), tensor(), {.var_capacity = 0, .overflow_capacity = needed});
  EXPECT_EQ(exact.header().status, frame::kOk);
  expect_round_trip(codec(), exact, tensor());
  const Frame short_of_one =
      encode(codec(), tensor(), {.var_capacity = 0, .overflow_capacity = needed - 1});
  EXPECT_EQ(short_of_one.header().status, frame::kNoRoom);
}

TEST_P(Overflow, FramesShareAnArena) {
  const uint64_t needed = needed_units(codec());
  Frame frames[2];
  GuardedBuffer arena(2 * needed * frame::kUnitBytes);
  uint64_t cursor = 0;
  for (Frame& frame : frames) {
    memswap_encode_job job = encode_job(tensor(), {.var_capacity = needed / 2}, &frame);
    job.overflow = arena.data();
    job.overflow_capacity = 2 * needed;
    job.overflow_cursor = &cursor;
    ASSERT_EQ(codec().encode(&job, nullptr), MEMSWAP_CODEC_OK);
  }
  EXPECT_TRUE(arena.guards_are_whole());
  EXPECT_EQ(frames[0].header().overflow_used + frames[1].header().overflow_used, cursor);
  for (const Frame& frame : frames) {
    uint32_t status = 0;
    Tensor output(tensor().dtype, tensor().elements);
    memswap_decode_job job = decode_job(frame, &output, &status);
    job.overflow = arena.data();
    job.overflow_capacity = 2 * needed;
    ASSERT_EQ(codec().decode(&job, nullptr), MEMSWAP_CODEC_OK);
    EXPECT_EQ(status, frame::kOk);
    EXPECT_TRUE(output.buffer == tensor().buffer);
  }
}

// CUDA bumps before it looks, so a shared cursor may stand beyond its arena.
TEST_P(Overflow, ACursorBeyondTheArenaMeansNoRoom) {
  Frame frame;
  memswap_encode_job job =
      encode_job(tensor(), {.var_capacity = 0, .overflow_capacity = 100}, &frame);
  frame.overflow_cursor = 101;
  ASSERT_EQ(codec().encode(&job, nullptr), MEMSWAP_CODEC_OK);
  EXPECT_EQ(frame.header().status, frame::kNoRoom);
  EXPECT_EQ(frame.overflow_cursor, 101u);
  EXPECT_TRUE(frame.overflow.guards_are_whole());
}

MEMSWAP_FOR_EACH_INSTRUCTION_SET(Overflow);

}  // namespace
}  // namespace memswap::test
