#include "pool/pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <future>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include "fakes.h"

namespace memswap {
namespace {

using testing::FakeSlabs;
using testing::FakeTicket;

constexpr size_t kSlab = 64 << 10;

class PoolTest : public ::testing::Test {
 protected:
  std::unique_ptr<Pool> make(size_t budget = size_t{1} << 40, size_t grow_ahead = 0) {
    return std::make_unique<Pool>(
        std::make_shared<BudgetedSlabs>(below_, budget),
        PoolOptions{.slab_bytes = kSlab, .alignment = 512, .grow_ahead_bytes = grow_ahead});
  }
  static std::shared_ptr<FakeTicket> use(const BlockPtr& block) {
    auto ticket = std::make_shared<FakeTicket>();
    block->used_by(ticket);
    return ticket;
  }

  std::shared_ptr<FakeSlabs> below_ = std::make_shared<FakeSlabs>();
};

TEST_F(PoolTest, GivesExactSizesAtAlignedAddresses) {
  const auto pool = make();
  const auto first = pool->allocate(1);
  const auto second = pool->allocate(513);
  EXPECT_EQ(first->nbytes(), 1U);
  EXPECT_EQ(second->nbytes(), 513U);
  EXPECT_EQ(static_cast<std::byte*>(second->data()) - static_cast<std::byte*>(first->data()), 512);
  const auto statistics = pool->statistics();
  EXPECT_EQ(statistics.in_use_bytes, 514U);
  EXPECT_EQ(statistics.waste_bytes, 511U + 511U);
  EXPECT_EQ(statistics.blocks, 2U);
  EXPECT_EQ(statistics.reserved_bytes, kSlab);
  EXPECT_EQ(statistics.free_bytes, kSlab - 1536);
  EXPECT_EQ(pool->allocate(0)->nbytes(), 0U);
}

TEST_F(PoolTest, ASlabForgetsWhatIsDroppedWhenTheLastUseHasEnded) {
  using Ranges = std::vector<std::pair<size_t, size_t>>;
  Ranges forgotten;
  below_->at_forget = [&](size_t offset, size_t nbytes) { forgotten.emplace_back(offset, nbytes); };
  const auto pool = make();
  auto first = pool->allocate(1000);
  auto second = pool->allocate(5000);
  const auto copy = use(second);
  first.reset();
  EXPECT_EQ(forgotten, (Ranges{{0, 1024}}));
  second.reset();
  EXPECT_EQ(forgotten.size(), 1U) << "a copy still reads it";
  copy->end();
  const auto third = pool->allocate(700);
  EXPECT_EQ(forgotten.back(), (Ranges::value_type{0, kSlab})) << "with what is free around it";
}

TEST_F(PoolTest, WhatHasNoRoomGoesToTheOverflow) {
  const auto pool = make(/*budget=*/kSlab);
  const std::shared_ptr<Pool> overflow = make(/*budget=*/kSlab);
  pool->set_overflow(overflow);
  const auto first = pool->allocate(kSlab);
  const auto second = pool->allocate(kSlab);
  ASSERT_TRUE(first && second);
  EXPECT_EQ(pool->statistics().in_use_bytes, kSlab);
  EXPECT_EQ(overflow->statistics().in_use_bytes, kSlab);
  EXPECT_EQ(pool->allocate(1), nullptr) << "both are full";
}

TEST_F(PoolTest, SlabsArePowersOfTwoWithRoomForTwo) {
  const auto pool = make();
  const auto small = pool->allocate(100);
  const auto large = pool->allocate(3 * kSlab);
  EXPECT_EQ(below_->asked_for, (std::vector<size_t>{kSlab, 8 * kSlab}));
}

TEST_F(PoolTest, TakesAShorterSlabWhereTheSystemHasNoLongOne) {
  const auto pool = make();
  below_->most = 3 * kSlab;
  EXPECT_TRUE(pool->allocate(3 * kSlab)) << "the bytes were there and were not taken";
  EXPECT_EQ(below_->asked_for, (std::vector<size_t>{8 * kSlab, 4 * kSlab, 3 * kSlab}));
  EXPECT_EQ(pool->statistics().last_refusal, "");
}

TEST_F(PoolTest, ABlockWithoutRunningTicketsIsFreeAtOnce) {
  const auto pool = make();
  auto block = pool->allocate(1000);
  void* address = block->data();
  use(block)->end();
  block.reset();
  EXPECT_EQ(pool->statistics().pending, 0U);
  const auto next = pool->allocate(1000);
  EXPECT_EQ(next->data(), address);
  EXPECT_TRUE(next->uses().empty());
  EXPECT_EQ(pool->statistics().waits, 0U);
}

TEST_F(PoolTest, ARangeInFlightIsNotFree) {
  const auto pool = make();
  auto block = pool->allocate(kSlab);
  const auto ticket = use(block);
  void* address = block->data();
  block.reset();
  EXPECT_EQ(pool->statistics().pending_bytes, kSlab);
  const auto other = pool->allocate(2 * kSlab);
  EXPECT_NE(other->data(), address) << "bytes that a copy still uses were given away";
  EXPECT_EQ(below_->live, 2);
}

TEST_F(PoolTest, ARangeInFlightGoesToTheSameSizeBehindItsTickets) {
  const auto pool = make(kSlab);
  auto block = pool->allocate(kSlab);
  const auto ticket = use(block);
  void* address = block->data();
  block.reset();
  const auto next = pool->allocate(kSlab - 100);  // the same size once rounded
  ASSERT_TRUE(next);
  EXPECT_EQ(next->data(), address);
  EXPECT_EQ(next->uses(), std::vector<TicketPtr>{ticket});
  EXPECT_EQ(ticket->synchronized, 0) << "the host waited";
  EXPECT_EQ(pool->statistics().waits, 1U);
  EXPECT_EQ(pool->statistics().pending, 0U);
}

TEST_F(PoolTest, TheOldestRangeInFlightGoesFirst) {
  const auto pool = make(kSlab);
  auto first = pool->allocate(kSlab / 2);
  auto second = pool->allocate(kSlab / 2);
  const auto ticket_2 = use(second);
  const auto ticket_1 = use(first);
  second.reset();
  first.reset();
  EXPECT_EQ(pool->allocate(kSlab / 2)->uses(), std::vector<TicketPtr>{ticket_2});
}

TEST_F(PoolTest, EndedRangesAreReapedAndJoined) {
  const auto pool = make(kSlab);
  std::vector<std::shared_ptr<FakeTicket>> tickets;
  {
    std::vector<BlockPtr> blocks;
    for (int i = 0; i < 4; ++i) {
      blocks.push_back(pool->allocate(kSlab / 4));
      tickets.push_back(use(blocks.back()));
    }
  }
  EXPECT_FALSE(pool->allocate(kSlab)) << "quarters in flight were given out as a whole";
  for (const auto& ticket : tickets) {
    ticket->end();
  }
  EXPECT_TRUE(pool->allocate(kSlab));
  EXPECT_EQ(pool->statistics().pending, 0U);
}

TEST_F(PoolTest, AnAllocationAsksFewTickets) {
  const auto pool = make(100 * kSlab);
  std::vector<std::shared_ptr<FakeTicket>> tickets;
  {
    std::vector<BlockPtr> blocks;
    for (int i = 0; i < 100; ++i) {
      blocks.push_back(pool->allocate(kSlab));
      tickets.push_back(use(blocks.back()));
    }
  }
  for (const auto& ticket : tickets) {
    ticket->asked = 0;
  }
  const auto block = pool->allocate(kSlab);
  int asked = 0;
  for (const auto& ticket : tickets) {
    asked += ticket->asked;
  }
  EXPECT_LE(asked, 80) << "one allocation polled everything";
  EXPECT_FALSE(block->uses().empty());
}

TEST_F(PoolTest, WithRoomAnAllocationAsksHardlyAnyTicket) {
  const auto pool = make();
  std::vector<std::shared_ptr<FakeTicket>> tickets;
  {
    std::vector<BlockPtr> blocks;
    for (int i = 0; i < 100; ++i) {
      blocks.push_back(pool->allocate(512));
      tickets.push_back(use(blocks.back()));
    }
  }
  for (const auto& ticket : tickets) {
    ticket->asked = 0;
  }
  ASSERT_TRUE(pool->allocate(512));
  int asked = 0;
  for (const auto& ticket : tickets) {
    asked += ticket->asked;
  }
  EXPECT_LE(asked, 2) << "a steady step pays for tickets that are still running";
}

TEST_F(PoolTest, ASlowTicketDoesNotHideEndedOnes) {
  const auto pool = make(2 * kSlab);
  auto slow = pool->allocate(kSlab);
  const auto slow_ticket = use(slow);
  slow.reset();
  for (int i = 0; i < 50; ++i) {
    auto block = pool->allocate(512 * (1 + i % 7));
    ASSERT_TRUE(block);
    const auto ticket = use(block);
    block.reset();
    ticket->end();
  }
  EXPECT_EQ(pool->statistics().reserved_bytes, 2 * kSlab);
  EXPECT_LE(pool->statistics().pending, 3U);
}

TEST_F(PoolTest, RefusesBeyondTheBudgetAndSaysWhy) {
  const auto pool = make(2 * kSlab);
  const auto all = pool->allocate(2 * kSlab);
  ASSERT_TRUE(all);
  EXPECT_EQ(pool->allocate(1), nullptr);
  EXPECT_EQ(pool->allocate(~size_t{0}), nullptr);
  EXPECT_EQ(pool->statistics().refusals, 2U);
  EXPECT_FALSE(pool->statistics().last_refusal.empty());
  EXPECT_EQ(pool->statistics().reserved_bytes, 2 * kSlab);
}

TEST_F(PoolTest, UsesTheRestOfABudgetThatHoldsNoWholeSlab) {
  const auto pool = make(kSlab + kSlab / 2);
  const auto first = pool->allocate(kSlab);
  const auto second = pool->allocate(kSlab / 4);
  ASSERT_TRUE(second) << "half a slab of the budget was left and nothing was given";
  EXPECT_TRUE(pool->allocate(kSlab / 4));
  EXPECT_FALSE(pool->allocate(kSlab / 2));
  const auto odd = make(3 * kSlab);
  EXPECT_TRUE(odd->allocate(3 * kSlab)) << "the budget would have held exactly this";
}

TEST_F(PoolTest, APinFailureIsARefusal) {
  const auto pool = make();
  below_->fail = true;
  EXPECT_EQ(pool->allocate(10), nullptr);
  EXPECT_NE(pool->statistics().last_refusal.find("pinned"), std::string::npos);
  EXPECT_EQ(pool->statistics().refusals, 1U);
  below_->fail = false;
  pool->trim();
  EXPECT_TRUE(pool->allocate(10));
}

TEST_F(PoolTest, TrimReturnsEntirelyFreeSlabsOnly) {
  const auto pool = make();
  auto kept = pool->allocate(kSlab / 2);
  auto dropped = pool->allocate(kSlab / 2 + 512);  // fits no rest
  auto flying = pool->allocate(3 * kSlab / 2);     // nor does this
  const auto ticket = use(flying);
  EXPECT_EQ(below_->live, 3);
  dropped.reset();
  flying.reset();
  EXPECT_EQ(pool->trim(), 2 * kSlab);
  EXPECT_EQ(below_->live, 2);
  EXPECT_EQ(below_->trimmed, 1);
  ticket->end();
  EXPECT_EQ(pool->trim(), 4 * kSlab);
  kept.reset();
  EXPECT_EQ(pool->trim(), kSlab);
  EXPECT_EQ(below_->live, 0);
  EXPECT_EQ(pool->statistics().reserved_bytes, 0U);
}

TEST_F(PoolTest, BlocksOutliveThePool) {
  auto pool = make();
  auto block = pool->allocate(64);
  pool.reset();
  const char text[64] = "still here";
  block->write(text);
  char back[64] = {};
  block->read(back);
  EXPECT_STREQ(back, text);
  EXPECT_EQ(below_->live, 1);
  block.reset();
  EXPECT_EQ(below_->live, 0);
}

TEST_F(PoolTest, MemoryInFlightIsReturnedOnlyAfterTheCopy) {
  auto pool = make();
  auto block = pool->allocate(64);
  const auto ticket = use(block);
  block.reset();
  bool returned_early = false;
  pool.reset();
  returned_early = ticket->synchronized == 0;
  EXPECT_FALSE(returned_early) << "a slab went back to the system under a running copy";
  EXPECT_EQ(below_->live, 0);
}

TEST_F(PoolTest, TicketsRunWithoutTheLockOfThePool) {
  const auto pool = make();
  int entered = 0;
  {
    auto block = pool->allocate(512);
    auto ticket = std::make_shared<FakeTicket>();
    // What a ticket may do at its end: drop storage whose owner comes back to the pool.
    ticket->at_end = [&] { entered += pool->allocate(512) != nullptr; };
    ticket->at_done = [&] { entered += static_cast<int>(pool->statistics().slabs); };
    block->used_by(ticket);
    ticket->end();
  }
  EXPECT_GE(entered, 2);
}

TEST_F(PoolTest, AskedForManyTicketsABlockForgetsEndedOnes) {
  const auto pool = make();
  const auto block = pool->allocate(512);
  const auto running = use(block);
  for (int i = 0; i < 1000; ++i) {
    use(block)->end();
  }
  const auto uses = block->uses();
  EXPECT_LE(uses.size(), 32U) << "tickets pile up on a block that is fetched again and again";
  EXPECT_NE(std::ranges::find(uses, running), uses.end()) << "a running use was forgotten";
}

TEST_F(PoolTest, ReserveGrowsInTheBackground) {
  const auto pool = make();
  pool->reserve(5 * kSlab);
  EXPECT_TRUE(pool->wait_reserved());
  const auto reserved = pool->statistics();
  EXPECT_GE(reserved.reserved_bytes, 5 * kSlab);
  EXPECT_EQ(reserved.grown_in_background, reserved.slabs);
  const auto block = pool->allocate(kSlab);
  EXPECT_EQ(pool->statistics().slabs_acquired, reserved.slabs_acquired);
}

TEST_F(PoolTest, ReserveSaysThatTheBudgetIsTooSmall) {
  const auto pool = make(3 * kSlab);
  pool->reserve(5 * kSlab);
  EXPECT_FALSE(pool->wait_reserved());
  EXPECT_NE(pool->statistics().last_refusal.find("budget"), std::string::npos);
  EXPECT_EQ(pool->statistics().refusals, 0U) << "nobody's allocation was refused";
  pool->reserve(2 * kSlab);
  EXPECT_TRUE(pool->wait_reserved());
}

TEST_F(PoolTest, GrowsAheadOfNeed) {
  const auto pool = make(size_t{1} << 40, kSlab / 4);
  const auto half = pool->allocate(kSlab / 2);
  const auto most = pool->allocate(kSlab / 2 - 512);
  EXPECT_TRUE(pool->wait_reserved());
  EXPECT_EQ(pool->statistics().grown_in_background, 1U);
  const auto next = pool->allocate(kSlab / 2);
  EXPECT_TRUE(pool->wait_reserved());
  EXPECT_EQ(pool->statistics().slabs_acquired, 2U) << "half a slab was left; none was needed";
}

TEST_F(PoolTest, OthersAllocateWhileTheDriverIsBusy) {
  const auto pool = make();
  const auto first = pool->allocate(512);
  std::promise<void> in_driver;
  std::promise<void> let_go;
  below_->at_acquire = [&] {
    in_driver.set_value();
    let_go.get_future().wait();
  };
  pool->reserve(2 * kSlab);
  in_driver.get_future().wait();
  // Would deadlock if the driver were called under the pool's lock.
  EXPECT_TRUE(pool->allocate(512));
  EXPECT_EQ(pool->statistics().blocks, 1U);
  let_go.set_value();
  EXPECT_TRUE(pool->wait_reserved());
}

// Every live block holds its own pattern; two owners of one byte would show.
void hammer(Pool& pool, unsigned seed, int steps, std::vector<std::shared_ptr<FakeTicket>>* later) {
  struct Held {
    BlockPtr block;
    std::byte mark;
  };
  std::mt19937 random(seed);
  std::vector<Held> held;
  std::vector<std::byte> buffer;
  for (int step = 0; step < steps; ++step) {
    if (random() % 2 == 0 || held.empty()) {
      const size_t nbytes = 1 + random() % 6000;
      auto block = pool.allocate(nbytes);
      if (!block) {
        held.clear();
        continue;
      }
      for (const TicketPtr& ticket : block->uses()) {
        ticket->synchronize();
      }
      const auto mark = static_cast<std::byte>(random());
      buffer.assign(nbytes, mark);
      block->write(buffer.data());
      held.push_back({std::move(block), mark});
    } else {
      std::swap(held[random() % held.size()], held.back());
      const Held last = std::move(held.back());
      held.pop_back();
      buffer.resize(last.block->nbytes());
      last.block->read(buffer.data());
      ASSERT_TRUE(std::ranges::all_of(buffer, [&](std::byte b) { return b == last.mark; }))
          << "a block was overwritten by another owner";
      if (random() % 3 == 0) {
        const auto ticket = std::make_shared<FakeTicket>();
        last.block->used_by(ticket);
        later->push_back(ticket);
      }
      if (later->size() > 20) {
        later->front()->end();
        later->erase(later->begin());
      }
    }
    if (random() % 200 == 0) {
      pool.trim();
    }
  }
}

TEST_F(PoolTest, HoldsUnderManyThreads) {
  const auto pool = make(6 * kSlab, kSlab / 4);
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < 6; ++seed) {
    threads.emplace_back([&, seed] {
      std::vector<std::shared_ptr<FakeTicket>> later;
      hammer(*pool, seed, 3000, &later);
      for (const auto& ticket : later) {
        ticket->end();
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  pool->wait_reserved();
  pool->trim();
  const auto statistics = pool->statistics();
  EXPECT_EQ(statistics.blocks, 0U);
  EXPECT_EQ(statistics.in_use_bytes, 0U);
  EXPECT_EQ(statistics.pending, 0U);
  EXPECT_EQ(statistics.reserved_bytes, 0U) << "bytes were lost: a free pool could not be trimmed";
  EXPECT_EQ(below_->live, 0);
  EXPECT_GT(statistics.waits + statistics.refusals, 0U) << "the budget was never tight";
}

TEST_F(PoolTest, StatisticsAddUpOnRandomTraces) {
  for (unsigned seed = 0; seed < 10; ++seed) {
    const auto pool = make(8 * kSlab);
    std::mt19937 random(seed);
    std::vector<std::pair<BlockPtr, size_t>> held;
    std::vector<std::shared_ptr<FakeTicket>> tickets;
    size_t in_use = 0;
    size_t peak = 0;
    for (int step = 0; step < 2000; ++step) {
      if (random() % 100 < 52 || held.empty()) {
        const size_t nbytes = random() % 20000;
        if (auto block = pool->allocate(nbytes)) {
          held.emplace_back(std::move(block), nbytes);
          in_use += nbytes;
          peak = std::max(peak, in_use);
        }
      } else {
        std::swap(held[random() % held.size()], held.back());
        if (random() % 2 == 0) {
          tickets.push_back(use(held.back().first));
        }
        in_use -= held.back().second;
        held.pop_back();
      }
      if (!tickets.empty() && random() % 3 == 0) {
        tickets[random() % tickets.size()]->end();
      }
      const auto now = pool->statistics();
      ASSERT_EQ(now.in_use_bytes, in_use) << "seed " << seed << ", step " << step;
      ASSERT_EQ(now.peak_bytes, peak);
      ASSERT_EQ(now.blocks, held.size());
      ASSERT_EQ(now.in_use_bytes + now.waste_bytes + now.pending_bytes + now.free_bytes,
                now.reserved_bytes)
          << "seed " << seed << ", step " << step;
      ASSERT_LE(now.reserved_bytes, 8 * kSlab);
    }
  }
}

}  // namespace
}  // namespace memswap
