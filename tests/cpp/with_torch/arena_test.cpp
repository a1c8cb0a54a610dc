// Arena: what shares set aside, what they give back, and when a chunk begins anew.
#include "codec/arena.h"

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>

#include "fake_device.h"
#include "memswap/frame.h"
#include "pool/host_slabs.h"
#include "pool/pool.h"

namespace memswap {
namespace {

constexpr size_t kUnit = frame::kUnitBytes;
constexpr uint64_t kUnits = 8;  // of the one chunk that the budget has
constexpr size_t kChunk = Arena::kBefore + kUnits * kUnit;

class Arenas : public ::testing::Test {
 protected:
  std::shared_ptr<Arena> new_arena(size_t budget_bytes, std::shared_ptr<Pool> pinned = nullptr) {
    return std::make_shared<Arena>(streams, streams->new_stream(), budget_bytes, kChunk,
                                   std::move(pinned));
  }
  std::shared_ptr<Arena::Share> reserve(uint64_t units) { return arena->reserve(units, refusal); }

  const std::shared_ptr<DeviceStreams> streams =
      std::make_shared<DeviceStreams>(testing::kFakeDevice);
  const std::shared_ptr<Arena> arena = new_arena(kChunk);
  std::string refusal;
};

TEST_F(Arenas, TheWorstCaseIsSetAsideUntilTheHostKnowsBetter) {
  const auto first = reserve(kUnits);
  ASSERT_TRUE(first);
  EXPECT_FALSE(reserve(1)) << "two frames may overflow into the same bytes";
  EXPECT_NE(refusal.find("no room"), std::string::npos) << refusal;
  EXPECT_EQ(arena->statistics().refusals, 1u);
  first->settle(kUnits - 2);
  EXPECT_FALSE(reserve(3));
  EXPECT_TRUE(reserve(2));
}

TEST_F(Arenas, AShareThatTookNothingIsGivenBackWholeAndTheCursorStays) {
  const auto first = reserve(kUnits);
  first->settle(0);
  EXPECT_EQ(arena->statistics().live_shares, 0u);
  EXPECT_EQ(first->read().memory(), nullptr) << "there is nothing to decode from";
  EXPECT_TRUE(reserve(kUnits));
  EXPECT_EQ(arena->statistics().resets, 0u) << "an encoder has moved no cursor";
}

TEST_F(Arenas, WhatWasTakenIsFreeAgainWithTheLastShareOfTheChunk) {
  auto first = reserve(kUnits - 1), second = reserve(1);
  first->settle(kUnits - 1);
  *first->cursor() = kUnits - 1;  // as the encoder has it
  first.reset();
  EXPECT_FALSE(reserve(2)) << "the cursor only moves forward";
  second.reset();
  const auto next = reserve(kUnits);
  ASSERT_TRUE(next);
  EXPECT_EQ(*next->cursor(), 0u) << "the next encoder writes beyond the end of the chunk";
  EXPECT_EQ(arena->statistics().resets, 1u);
  EXPECT_EQ(arena->statistics().chunks, 1u);
}

TEST_F(Arenas, ADecodeKeepsWhatItReadsWhileTheFrameGoes) {
  auto share = reserve(kUnits);
  share->settle(kUnits);
  std::optional<Arena::Reading> reading(share->read());
  const void* const memory = share->memory();
  share.reset();
  EXPECT_EQ(reading->memory(), memory);
  EXPECT_FALSE(reserve(1)) << "the next encode overwrites what a decode reads";
  EXPECT_EQ(arena->trim(), 0u);
  reading.reset();
  EXPECT_TRUE(reserve(kUnits));
}

TEST_F(Arenas, WhatAnEncoderTookIsSaidOnce) {
  const auto share = reserve(4);
  share->settle(99);  // no more than was set aside
  EXPECT_EQ(share->units(), 4u);
  share->settle(1);
  EXPECT_EQ(share->units(), 4u) << "bytes of a frame that is there were given away";
  EXPECT_EQ(arena->statistics().set_aside_bytes, 4 * kUnit);
}

TEST_F(Arenas, ALowerBudgetTakesNothingFromWhoHasAShare) {
  auto share = reserve(kUnits);
  arena->set_budget(0);
  EXPECT_EQ(arena->trim(), 0u);
  EXPECT_FALSE(arena->could_hold(1));
  share.reset();
  EXPECT_EQ(arena->trim(), kChunk);
  EXPECT_FALSE(reserve(1));
}

TEST_F(Arenas, ARoomIsOneChunkOfJustThatSize) {
  auto share = reserve(1);
  const size_t room = Arena::kBefore + 20 * kUnit;
  arena->set_room(room);
  EXPECT_TRUE(arena->could_hold(20));
  EXPECT_FALSE(arena->could_hold(21));
  EXPECT_FALSE(reserve(20)) << "the old chunk counts for as long as somebody has a share of it";
  share.reset();
  arena->set_room(room);
  EXPECT_TRUE(reserve(20));
  EXPECT_EQ(arena->statistics().reserved_bytes, room);
}

TEST_F(Arenas, MemoryThatTheDeviceCannotReachIsNotTakenForPinned) {
  const auto pageable =
      std::make_shared<Pool>(std::make_shared<OrdinarySlabs>(), PoolOptions{.slab_bytes = 1 << 16});
  const std::shared_ptr<Arena> other = new_arena(kChunk, pageable);
  const auto share = other->reserve(1, refusal);
  ASSERT_TRUE(share) << refusal;
  EXPECT_EQ(share->device_units(), 1u);
  EXPECT_EQ(other->statistics().pinned_bytes, 0u);
}

}  // namespace
}  // namespace memswap
