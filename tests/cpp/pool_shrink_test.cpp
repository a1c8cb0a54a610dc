#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <stdexcept>
#include <vector>

#include "fakes.h"
#include "pool/pool.h"

namespace memswap {
namespace {

using testing::FakeSlabs;
using testing::FakeTicket;

constexpr size_t kSlabBytes = 64 << 10;

class PoolShrinkTest : public ::testing::Test {
 protected:
  Pool pool_{std::make_shared<FakeSlabs>(),
             PoolOptions{.slab_bytes = kSlabBytes, .alignment = 512}};

  // Every byte of the slabs is counted once.
  void expect_exact(size_t in_use, size_t waste) {
    const PoolStatistics now = pool_.statistics();
    EXPECT_EQ(now.in_use_bytes, in_use);
    EXPECT_EQ(now.waste_bytes, waste);
    EXPECT_EQ(now.free_bytes, now.reserved_bytes - in_use - waste - now.pending_bytes);
  }
};

TEST_F(PoolShrinkTest, TheRestCanBeHadAtOnceAndTheBytesStay) {
  const BlockPtr block = pool_.allocate(40 << 10);
  void* const first = block->data();
  std::memset(first, 0x5a, 40 << 10);
  block->shrink(1000);
  EXPECT_EQ(block->nbytes(), 1000U);
  EXPECT_EQ(block->data(), first);
  expect_exact(1000, 24);
  const BlockPtr next = pool_.allocate(60 << 10);
  EXPECT_EQ(pool_.statistics().slabs, 1U) << "the rest of the block was not given back";
  EXPECT_EQ(static_cast<std::byte*>(next->data()) - static_cast<std::byte*>(first), 1024);
  std::memset(next->data(), 0, 60 << 10);
  EXPECT_EQ(static_cast<unsigned char*>(first)[999], 0x5a);
}

TEST_F(PoolShrinkTest, ToTheSameLengthToLessThanAnAlignmentAndToNothing) {
  const BlockPtr block = pool_.allocate(2000);
  block->shrink(2000);
  expect_exact(2000, 48);
  block->shrink(1999);
  expect_exact(1999, 49);
  block->shrink(0);
  expect_exact(0, 512);
  EXPECT_THROW(block->shrink(1), std::invalid_argument);
}

TEST_F(PoolShrinkTest, ADroppedBlockGivesBackWhatItHadLeft) {
  BlockPtr block = pool_.allocate(30 << 10);
  block->shrink(5000);
  const auto ticket = std::make_shared<FakeTicket>();
  block->used_by(ticket);
  block.reset();
  EXPECT_EQ(pool_.statistics().pending_bytes, 5120U) << "only what was left is gated";
  expect_exact(0, 0);
  ticket->end();
  EXPECT_EQ(pool_.trim(), kSlabBytes);
}

TEST_F(PoolShrinkTest, ManyBlocksNeverOverlap) {
  std::mt19937 random(1);
  struct Owned {
    BlockPtr block;
    unsigned char mark;
  };
  std::vector<Owned> owned;
  size_t in_use = 0;
  for (int step = 0; step < 2000; ++step) {
    if (owned.size() > 20 || (step % 3 == 2 && !owned.empty())) {
      const size_t index = random() % owned.size();
      const auto* bytes = static_cast<const unsigned char*>(owned[index].block->data());
      for (size_t i = 0; i < owned[index].block->nbytes(); ++i) {
        ASSERT_EQ(bytes[i], owned[index].mark) << "somebody else wrote into this block";
      }
      in_use -= owned[index].block->nbytes();
      owned.erase(owned.begin() + static_cast<std::ptrdiff_t>(index));
      continue;
    }
    const size_t nbytes = random() % 9000;
    const auto mark = static_cast<unsigned char>(random());
    BlockPtr block = pool_.allocate(nbytes);
    block->shrink(random() % (nbytes + 1));
    std::memset(block->data(), mark, block->nbytes());
    in_use += block->nbytes();
    owned.push_back({std::move(block), mark});
    ASSERT_EQ(pool_.statistics().in_use_bytes, in_use);
  }
}

}  // namespace
}  // namespace memswap
