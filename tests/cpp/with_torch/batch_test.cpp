// Batches without Python: what a group saved leaves and returns when it is told to.
#include "engine/batch.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "failing_lane.h"
#include "lane/lane_around.h"
#include "lane/worker_lane.h"
#include "pool/host_slabs.h"
#include "pool/pool.h"
#include "with_host.h"

namespace memswap {
namespace {

constexpr int64_t kBytes = 1000;

at::Tensor filled(uint8_t value, int64_t nbytes = kBytes) {
  at::Tensor tensor = at::empty({nbytes}, at::kByte);
  std::memset(tensor.mutable_data_ptr(), value, static_cast<size_t>(nbytes));
  return tensor;
}

class Batches : public ::testing::Test {
 protected:
  static EnginePtr engine_by(std::shared_ptr<BlockSender> sender) {
    return testing::hosted_engine(testing::transfers_by(std::move(sender)), /*prefetch_bytes=*/0,
                                  Schedule::kBatches)
        .engine;
  }

  // From here on storages leave by this lane, and by an engine of their own.
  void leave_by(std::shared_ptr<Lane> lane) {
    sender = std::make_shared<BlockSender>(std::move(lane), pool);
    engine = engine_by(sender);
  }

  // The same by a lane whose sends are on their way until what is returned says that they failed.
  std::shared_ptr<bool> leave_by_sends_that_may_fail() {
    const auto lane =
        std::make_shared<testing::FailingLane>(std::make_shared<WorkerLane>(2, 1 << 20));
    *lane->fails = false;
    leave_by(lane);
    return lane->fails;
  }

  BatchPtr begin() {
    return std::make_shared<Batch>(engine, "layer", std::make_shared<Iteration>(nullptr, 0));
  }

  EntryPtr save(Batch& batch, at::Tensor tensor, Action action = Action::kSwap) {
    const Locked locked(engine->lock);
    const SavedView view = *SavedView::capture(tensor);
    scope.action = action;
    const SaveResult saved = engine->save(
        {.tensor = tensor, .view = view, .scope = scope, .number = 0, .batch = &batch});
    EXPECT_TRUE(saved.moves) << "it waits";
    auto entry = std::static_pointer_cast<Entry>(saved.known);
    entry->add_handle();
    return entry;
  }

  bool demands(Batch& batch, const EntryPtr& entry, uint8_t value) {
    batch.notice_demand(entry);
    const StorageRefPtr storage = engine->demand(entry);
    const auto* const bytes = static_cast<const uint8_t*>(storage->storage.data());
    return bytes[0] == value && bytes[entry->nbytes() - 1] == value;
  }

  std::shared_ptr<Pool> pool = std::make_shared<Pool>(
      std::make_shared<BudgetedSlabs>(std::make_shared<OrdinarySlabs>(), 1 << 20),
      PoolOptions{.slab_bytes = 1 << 20, .alignment = 512});
  std::shared_ptr<BlockSender> sender =
      std::make_shared<BlockSender>(std::make_shared<WorkerLane>(2, 1 << 20), pool);
  EnginePtr engine = engine_by(sender);
  HookScope scope{.unit = "unit", .covered = true};
};

TEST_F(Batches, NothingLeavesBeforeItIsTold) {
  const BatchPtr batch = begin();
  const EntryPtr entry = save(*batch, filled(1));
  EXPECT_EQ(entry->state(), State::kResident);
  EXPECT_EQ(batch->nbytes(), kBytes);
  EXPECT_EQ(pool->statistics().blocks, 0u);
  EXPECT_TRUE(demands(*batch, entry, 1));
}

TEST_F(Batches, WhatWasSavedLeavesTogetherAndComesBack) {
  const BatchPtr batch = begin();
  std::vector<EntryPtr> entries;
  for (uint8_t value = 1; value <= 5; ++value) {
    entries.push_back(save(*batch, filled(value)));
  }
  batch->launch_offload();
  EXPECT_EQ(batch->phase(), Batch::Phase::kOffloading);
  batch->wait_offload();
  EXPECT_EQ(batch->phase(), Batch::Phase::kOffloaded);
  EXPECT_EQ(pool->statistics().blocks, 1u) << "small storages travel in one bucket";
  for (const EntryPtr& entry : entries) {
    EXPECT_EQ(entry->state(), State::kAway);
  }
  batch->launch_load();
  batch->wait_load();
  for (uint8_t value = 5; value >= 1; --value) {
    EXPECT_TRUE(demands(*batch, entries[value - 1], value));
  }
  EXPECT_EQ(engine->ledger.counters.stalls, 0);
}

TEST_F(Batches, BucketsAreNoLongerThanTheyMayBeAndLargeStoragesTravelAlone) {
  engine->batch_limits = {.small_bytes = kBytes, .bucket_bytes = 2 * kBytes};
  const BatchPtr batch = begin();
  std::vector<EntryPtr> entries;
  for (const int64_t nbytes : {kBytes, kBytes, kBytes + 1, kBytes, kBytes, kBytes}) {
    entries.push_back(save(*batch, filled(7, nbytes)));
  }
  batch->launch_offload();
  EXPECT_EQ(pool->statistics().blocks, 4u) << "buckets of 2, 2 and 1, and one alone";
  batch->wait_offload();
  for (const EntryPtr& entry : entries) {
    EXPECT_TRUE(demands(*batch, entry, 7));
  }
}

TEST_F(Batches, AStorageOfTwoBatchesMovesOnceAndBelongsToBoth) {
  const BatchPtr first = begin(), second = begin();
  at::Tensor shared = filled(3);
  const EntryPtr one = save(*first, shared), two = save(*second, shared);
  EXPECT_EQ(one, two);
  shared.reset();
  first->launch_offload();
  second->launch_offload();
  EXPECT_EQ(engine->ledger.counters.moved_storages, 1);
  EXPECT_EQ(second->nbytes(), kBytes);
  EXPECT_TRUE(demands(*first, one, 3));
  EXPECT_TRUE(demands(*second, two, 3));
}

TEST_F(Batches, BackwardIsNoticedOncePerBatch) {
  const BatchPtr batch = begin();
  const EntryPtr one = save(*batch, filled(1)), two = save(*batch, filled(2));
  int reached = 0;
  batch->on_demand = [&] { ++reached; };
  batch->launch_offload();
  batch->wait_offload();
  EXPECT_TRUE(demands(*batch, two, 2));
  EXPECT_TRUE(demands(*batch, one, 1));
  EXPECT_EQ(reached, 1);
}

TEST_F(Batches, WhatIsDemandedIsBroughtBackByWhoeverHearsOfIt) {
  const BatchPtr batch = begin();
  const EntryPtr entry = save(*batch, filled(4));
  batch->on_demand = [&] { batch->launch_load(); };
  batch->launch_offload();
  batch->wait_offload();
  EXPECT_TRUE(demands(*batch, entry, 4));
  EXPECT_EQ(engine->ledger.counters.stalls, 1) << "it was asked for only now";
  batch->on_demand = nullptr;
}

TEST_F(Batches, CallsThatCannotBeAreRefusedWithTheReason) {
  const BatchPtr batch = begin();
  for (const auto call : {&Batch::wait_offload, &Batch::wait_load}) {
    EXPECT_THROW((*batch.*call)(), BatchError);
  }
  try {
    batch->launch_load();
    FAIL() << "nothing was offloaded";
  } catch (const BatchError& error) {
    EXPECT_NE(std::string(error.what()).find("call launch_offload() first"), std::string::npos)
        << error.what();
  }
  batch->close();
  EXPECT_THROW(batch->launch_offload(), BatchError);
}

TEST_F(Batches, AGraphThatIsDroppedTakesEverythingWithIt) {
  const BatchPtr batch = begin();
  EntryPtr entry = save(*batch, filled(5));
  batch->launch_offload();
  batch->wait_offload();
  const std::weak_ptr<Entry> alive = entry;
  entry.reset();
  EXPECT_TRUE(alive.expired()) << "the batch holds what it saved";
  EXPECT_FALSE(batch->alive());
  batch->launch_load();
  batch->wait_load();
  EXPECT_EQ(engine->ledger.counters.away_bytes, 0);
}

TEST_F(Batches, AnEngineIsNotHeldByItself) {
  const std::weak_ptr<Engine> alive = engine;
  {
    const BatchPtr batch = begin();
    const EntryPtr entry = save(*batch, filled(6));
    batch->launch_offload();
    batch->wait_offload();
    EXPECT_TRUE(demands(*batch, entry, 6));
  }
  engine.reset();
  EXPECT_TRUE(alive.expired()) << "an engine and its batches own each other";
}

TEST_F(Batches, WhatFindsNoRoomStaysAndIsCounted) {
  engine->batch_limits = {.small_bytes = 0};
  const BatchPtr batch = begin();
  const EntryPtr entry = save(*batch, filled(8, 2 << 20));
  batch->launch_offload();
  batch->wait_offload();
  EXPECT_EQ(entry->state(), State::kResident);
  EXPECT_EQ(engine->ledger.kept().at("pool").tensors, 1);
  EXPECT_TRUE(demands(*batch, entry, 8));
}

// A device without memory for what is gathered.
class NoRoomToGather final : public LaneAround {
 public:
  using LaneAround::LaneAround;
  std::pair<StorageRefPtr, std::vector<size_t>> gather(const std::vector<StorageRefPtr>&) override {
    TORCH_CHECK_WITH(OutOfMemoryError, false, "the device is full");
  }
};

TEST_F(Batches, WhatCannotBeGatheredIsSentOneByOne) {
  sender = std::make_shared<BlockSender>(
      std::make_shared<NoRoomToGather>(std::make_shared<WorkerLane>(2, 1 << 20)), pool);
  engine = engine_by(sender);
  const BatchPtr batch = begin();
  const std::vector<EntryPtr> entries = {save(*batch, filled(1)), save(*batch, filled(2))};
  batch->launch_offload();
  batch->wait_offload();
  EXPECT_EQ(engine->ledger.counters.moved_storages, 2);
  EXPECT_EQ(entries[0]->state(), State::kAway);
  EXPECT_TRUE(demands(*batch, entries[0], 1));
  EXPECT_TRUE(demands(*batch, entries[1], 2));
}

// What was loaded before it had gone, and told to leave again, is leaving as before; its bytes are
// still with the send, which then fails.
TEST_F(Batches, ABucketThatFailedAfterItWasLoadedIsGivenBack) {
  const std::shared_ptr<bool> fails = leave_by_sends_that_may_fail();
  const BatchPtr batch = begin();
  at::Tensor first = filled(1), second = filled(2);
  const std::vector<EntryPtr> entries = {save(*batch, first), save(*batch, second)};
  batch->launch_offload();
  batch->launch_load();
  batch->launch_offload();
  EXPECT_EQ(entries[0]->state(), State::kLeaving);
  EXPECT_EQ(engine->ledger.counters.resident_bytes, 2 * kBytes);
  first.reset();
  second.reset();
  EXPECT_FALSE(entries[0]->notice_gone(/*wait=*/false)) << "its bytes are nowhere else yet";
  *fails = true;
  EXPECT_TRUE(demands(*batch, entries[0], 1));
  EXPECT_TRUE(demands(*batch, entries[1], 2));
  EXPECT_EQ(engine->ledger.kept().at("pool").tensors, 2);
  EXPECT_EQ(engine->ledger.counters.away_bytes, 0);
  EXPECT_EQ(engine->ledger.counters.resident_bytes, 2 * kBytes);
}

// A send that failed is noticed by the load, and not taken for one that is still to be waited for.
TEST_F(Batches, ALoadNoticesThatTheSendHasFailed) {
  const std::shared_ptr<bool> fails = leave_by_sends_that_may_fail();
  std::vector<std::string> told;
  engine->ledger.warn = [&](const std::string& message) { told.push_back(message); };
  engine->batch_limits = {.small_bytes = 0};
  const BatchPtr batch = begin();
  const at::Tensor held = filled(1);
  const EntryPtr entry = save(*batch, held);
  batch->launch_offload();
  *fails = true;
  batch->launch_load();
  EXPECT_EQ(entry->away(), nullptr) << "its bytes were never written";
  EXPECT_EQ(told.size(), 1u);
  batch->launch_offload();
  batch->wait_offload();
  EXPECT_TRUE(demands(*batch, entry, 1));
  EXPECT_EQ(entry->state(), State::kResident);
}

// The same, noticed when the last save has read the storage.
TEST_F(Batches, ASendThatFailedWhileTheStorageWasReadGivesItBack) {
  const std::shared_ptr<bool> fails = leave_by_sends_that_may_fail();
  const BatchPtr batch = begin();
  at::Tensor held = filled(1);
  const EntryPtr entry = save(*batch, held);
  batch->launch_offload();
  batch->launch_load();
  *fails = true;
  EXPECT_TRUE(demands(*batch, entry, 1));
  EXPECT_EQ(entry->state(), State::kResident);
  EXPECT_EQ(entry->away(), nullptr);
  held.reset();
  EXPECT_TRUE(demands(*batch, entry, 1)) << "a second backward";
}

// Brings back nothing for as long as there is no memory, and owns what it brings until somebody
// waits for it or nobody will, as streams do.
class MemoryLane final : public LaneAround {
 public:
  using LaneAround::LaneAround;

  std::pair<StorageRefPtr, TicketPtr> fetch(BlockPtr block, Tickets after) override {
    if (room == 0) {
      throw c10::OutOfMemoryError({__func__, __FILE__, __LINE__}, "no memory");
    }
    --room;
    auto [storage, arrival] = LaneAround::fetch(std::move(block), std::move(after));
    arrival->wait();
    fetched.emplace(*storage);
    auto ticket = std::make_shared<Holding>(storage);
    return {std::move(storage), std::move(ticket)};
  }

  int room = 100;
  std::optional<WeakStorage> fetched;

 private:
  struct Holding final : Ticket {
    explicit Holding(StorageRefPtr storage) : storage(std::move(storage)) {}
    void wait() override { storage.reset(); }
    bool done() override { return storage == nullptr; }
    void synchronize() override { wait(); }
    void abandon() noexcept override { wait(); }

    StorageRefPtr storage;
  };
};

TEST_F(Batches, WhatIsToldToLeaveWhileItReturnsGivesItsMemoryBack) {
  for (const int64_t small_bytes : {int64_t{0}, kBytes}) {  // alone, and in a bucket
    SCOPED_TRACE(small_bytes);
    const auto lane = std::make_shared<MemoryLane>(std::make_shared<WorkerLane>(2, 1 << 20));
    leave_by(lane);
    engine->batch_limits = {.small_bytes = small_bytes};
    const BatchPtr batch = begin();
    const std::vector<EntryPtr> entries = {save(*batch, filled(1)), save(*batch, filled(2))};
    batch->launch_offload();
    batch->wait_offload();
    batch->launch_load();
    EXPECT_EQ(entries[0]->state(), State::kReturning);
    EXPECT_FALSE(lane->fetched->expired());
    batch->launch_offload();
    EXPECT_EQ(entries[0]->state(), State::kAway);
    EXPECT_EQ(engine->ledger.counters.resident_bytes, 0);
    EXPECT_TRUE(lane->fetched->expired()) << "its ticket holds it, and nobody waits for that";
    batch->wait_offload();
    EXPECT_TRUE(demands(*batch, entries[0], 1));
    EXPECT_TRUE(demands(*batch, entries[1], 2));
  }
}

TEST_F(Batches, ALoadThatLackedMemoryGoesOnWhenItIsCalledAgain) {
  const auto lane = std::make_shared<MemoryLane>(std::make_shared<WorkerLane>(2, 1 << 20));
  leave_by(lane);
  engine->batch_limits = {.small_bytes = 0};
  const BatchPtr batch = begin();
  std::vector<EntryPtr> entries;
  for (uint8_t value = 1; value <= 3; ++value) {
    entries.push_back(save(*batch, filled(value)));
  }
  batch->launch_offload();
  batch->wait_offload();
  lane->room = 1;
  batch->launch_load();
  EXPECT_EQ(entries[0]->state(), State::kReturning);
  EXPECT_EQ(entries[1]->state(), State::kAway);
  lane->room = 100;
  batch->launch_load();
  EXPECT_EQ(entries[1]->state(), State::kReturning);
  EXPECT_EQ(entries[2]->state(), State::kReturning);
  lane->room = 0;
  batch->launch_load();  // nothing is left to do
  batch->wait_load();
  for (uint8_t value = 1; value <= 3; ++value) {
    EXPECT_TRUE(demands(*batch, entries[value - 1], value));
  }
  EXPECT_EQ(engine->ledger.counters.stalls, 0);
}

TEST_F(Batches, AWarningThatIsAnErrorLosesNoStorage) {
  engine->batch_limits = {.small_bytes = 0};
  engine->ledger.warn = [](const std::string& message) { throw std::runtime_error(message); };
  const BatchPtr batch = begin();
  const EntryPtr large = save(*batch, filled(1, 2 << 20)), other = save(*batch, filled(2));
  EXPECT_THROW(batch->launch_offload(), std::runtime_error) << "the pool has no room for one";
  EXPECT_EQ(large->state(), State::kResident);
  EXPECT_EQ(engine->ledger.kept().at("pool").tensors, 1);
  EXPECT_EQ(other->state(), State::kLeaving) << "it was sent all the same";
  batch->wait_offload();
  EXPECT_EQ(other->state(), State::kAway);
  EXPECT_TRUE(demands(*batch, large, 1));
  EXPECT_TRUE(demands(*batch, other, 2));
}

TEST_F(Batches, ThreadsMoveBatchesOfOneEngine) {
  std::vector<std::thread> threads;
  for (uint8_t number = 1; number <= 4; ++number) {
    threads.emplace_back([&, number] {
      for (int times = 0; times < 30; ++times) {
        const BatchPtr batch = begin();
        std::vector<EntryPtr> entries = {save(*batch, filled(number)),
                                         save(*batch, filled(number))};
        batch->launch_offload();
        batch->wait_offload();
        batch->launch_load();
        batch->wait_load();
        for (const EntryPtr& entry : entries) {
          EXPECT_TRUE(demands(*batch, entry, number));
        }
        const Locked locked(engine->lock);  // as Python serialises the lives of handles
        entries.clear();
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(engine->ledger.known_storages(), 0u);
  EXPECT_EQ(engine->ledger.counters.away_bytes, 0);
}

}  // namespace
}  // namespace memswap
