// Recorder: what a record says of storages whose sends end while it looks, and of the whole step.
#include "engine/recorder.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <barrier>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "fake_device.h"
#include "lane/worker_lane.h"
#include "pool/host_slabs.h"
#include "pool/pool.h"
#include "with_host.h"

namespace memswap {
namespace {

constexpr int64_t kBytes = 1000;
constexpr size_t kBudget = 1 << 20;

at::Tensor bytes(int64_t nbytes = kBytes) { return at::empty({nbytes}, at::kByte); }

// A send that a test ends in two parts, as a worker does: it lets go of the storage, and its ticket
// says so.
struct Send final : Ticket {
  explicit Send(StorageRefPtr sent) : storage(std::move(sent)) {}
  void wait() override {}
  bool done() override { return said_done; }
  void synchronize() override {}

  StorageRefPtr storage;
  bool said_done = false;
};

class TestLane : public Lane {
 public:
  TicketPtr send(StorageRefPtr storage, BlockPtr, ByteRange, Tickets) override {
    sends.push_back(std::make_shared<Send>(std::move(storage)));
    return sends.back();
  }
  std::pair<StorageRefPtr, TicketPtr> fetch(BlockPtr block, Tickets) override {
    const at::Tensor fetched = bytes(static_cast<int64_t>(block->nbytes()));
    return {std::make_shared<StorageRef>(fetched.storage()), std::make_shared<Send>(nullptr)};
  }
  TicketPtr fetch_into(BlockPtr, StorageRefPtr, size_t, Tickets) override { return nullptr; }
  void settle() override {}
  size_t leaving_bytes() override { return kBudget; }
  void set_max_leaving_bytes(size_t) override {}

  std::vector<std::shared_ptr<Send>> sends;
};

class Records : public ::testing::Test {
 protected:
  // Engines whose storages leave by a lane, and whose iterations are taken down.
  void direct(std::shared_ptr<Lane> lane, int64_t prefetch_bytes = 0) {
    sender = std::make_shared<BlockSender>(std::move(lane), pool);
    engine = testing::hosted_engine(testing::transfers_by(sender), prefetch_bytes).engine;
    engine->set_policy({.min_bytes = 1});
    engine->planning.set_directed(true);
    begin_iteration();
  }

  void begin_iteration() {
    const Locked locked(engine->lock);
    engine->next_iteration();
    recorder = std::make_shared<Recorder>(Clock(c10::Device(c10::kCPU)));
    engine->iteration()->set_recorder(recorder);
    ordinal = -1;
  }

  // What Python does with a storage that no plan says anything of.
  EntryPtr save(const at::Tensor& tensor, bool fails = false) {
    const Locked locked(engine->lock);
    const SavedView view = *SavedView::capture(tensor);
    recorder->choose({"unit", ++ordinal, tensor.numel(), tensor.scalar_type(),  //
                      PlannedAction::kSwap});
    engine->iteration()->admit(tensor.numel(), false, Iteration::kNoGroup);
    if (fails) {
      return nullptr;
    }
    auto storage = std::make_shared<StorageRef>(tensor.storage());
    const EntryPtr entry = engine->make_entry(view, *storage);
    engine->depart(*entry, sender->send(storage).value());
    storage.reset();  // its ticket's share is the last one
    entry->add_handle();
    engine->planning.after_save(entry);
    return entry;
  }

  std::optional<IterationRecord> taken() {
    const Locked locked(engine->lock);
    engine->iteration()->set_recorder(nullptr);
    recorder->close();
    return recorder->take();
  }

  std::shared_ptr<Pool> pool = std::make_shared<Pool>(
      std::make_shared<BudgetedSlabs>(std::make_shared<OrdinarySlabs>(), kBudget),
      PoolOptions{.slab_bytes = kBudget, .alignment = 512});
  std::shared_ptr<TestLane> lane = std::make_shared<TestLane>();
  std::shared_ptr<BlockSender> sender;
  EnginePtr engine;
  std::shared_ptr<Recorder> recorder;
  int64_t ordinal = -1;
};

// The storage of the first tensor is held by the forward, beside its send, until mark `let_go_at`.
class Sends : public Records, public ::testing::WithParamInterface<int32_t> {};

TEST_P(Sends, OneThatHasLetGoAndNotSaidSoIsNotTakenForTheForward) {
  direct(lane);
  at::Tensor held = bytes();
  std::vector<EntryPtr> entries{save(held)};
  for (int32_t mark = 1; mark < 5; ++mark) {
    if (mark == 1) {
      lane->sends[0]->storage.reset();  // the worker is between the two
    } else if (mark == 2) {
      lane->sends[0]->said_done = true;
    }
    if (mark == GetParam()) {
      held.reset();
    }
    entries.push_back(save(bytes()));
  }
  EXPECT_EQ(taken()->held_until[0], GetParam());
}

INSTANTIATE_TEST_SUITE_P(HeldUntil, Sends, ::testing::Values(kNever, 3));

TEST_F(Records, WhatTheForwardLetGoOfDuringItsSendIsKnownFromThenOn) {
  direct(lane);
  at::Tensor held = bytes();
  std::vector<EntryPtr> entries{save(held)};
  for (int32_t mark = 1; mark < 4; ++mark) {
    if (mark == 2) {
      held.reset();
    }
    entries.push_back(save(bytes()));  // all sends are under way all the time
  }
  EXPECT_EQ(taken()->held_until[0], 2);
}

// It used to leave a key and an action behind, and each later storage had the one's before.
TEST_F(Records, ASaveThatFailsIsInNoRecord) {
  direct(lane);
  const EntryPtr first = save(bytes());
  save(bytes(), /*fails=*/true);
  EXPECT_EQ(taken()->ordinals, std::vector<int64_t>{0});
  begin_iteration();
  const EntryPtr before = save(bytes());
  save(bytes(), /*fails=*/true);
  const EntryPtr last = save(bytes());  // its number in the iteration is 2
  engine->demand(last);
  EXPECT_FALSE(taken().has_value());
}

TEST_F(Records, AnIterationIsARowOfMarks) {
  direct(std::make_shared<WorkerLane>(1, kBudget));
  std::vector<EntryPtr> entries;
  for (const int64_t nbytes : {1000, 2000, 3000}) {
    entries.push_back(save(bytes(nbytes)));
    entries.back()->departure()->wait();
  }
  {
    const Locked locked(engine->lock);
    recorder->window(0.5);
    recorder->again(*entries[1], "unit");
    recorder->again(*entries[1], "other");
    recorder->again(*entries[1], "other");
  }
  engine->demand(entries[2]);
  engine->demand(entries[0]);
  entries[2].reset();  // its graph lets go of it
  engine->demand(entries[1]);
  engine->demand(entries[0]);  // a graph that is retained
  const IterationRecord record = *taken();
  EXPECT_EQ(record.nbytes, (std::vector<int64_t>{1000, 2000, 3000}));
  EXPECT_EQ(record.ordinals, (std::vector<int64_t>{0, 1, 2}));
  EXPECT_EQ(record.moved, (std::vector<uint8_t>{1, 1, 1}));
  EXPECT_EQ(record.held_until, (std::vector<int32_t>{1, 2, 3})) << "each was free when saved";
  EXPECT_EQ(record.order, (std::vector<size_t>{2, 0, 1}));
  EXPECT_EQ(record.kept_until, (std::vector<int32_t>{5, 5, 4}));
  ASSERT_EQ(record.others.size(), 3u);
  EXPECT_EQ(record.others[0], std::vector<size_t>{});
  ASSERT_EQ(record.others[1].size(), 1u) << "the unit that saved it first, or one of them twice";
  EXPECT_EQ(record.unit_names[record.others[1][0]], "other");
  EXPECT_EQ(record.gaps_s.size(), 6u);
  EXPECT_EQ(record.costs_s.size(), 6u);
  EXPECT_EQ(record.windows_s, (std::vector<double>{0, 0, 0, 0.5, 0, 0}));
  EXPECT_TRUE(record.extra_nbytes.empty());
  EXPECT_GE(record.peak_bytes, 3000);
}

TEST_F(Records, WhatRegionsSaveAgainCountsFromItsMarkOn) {
  direct(lane);
  const EntryPtr first = save(bytes()), second = save(bytes());
  engine->demand(second);
  const int64_t before = engine->ledger.counters.resident_bytes;
  at::Tensor recomputed = bytes(500);
  {
    const Locked locked(engine->lock);
    engine->planning.count_recomputed(StorageRef(recomputed.storage()));
    engine->planning.count_recomputed(StorageRef(recomputed.storage()));
  }
  EXPECT_EQ(engine->ledger.counters.resident_bytes, before + 500) << "it counts twice";
  recomputed.reset();
  engine->demand(first);
  EXPECT_EQ(engine->ledger.counters.in_use_bytes, 0) << "it is gone, and on the books";
  EXPECT_EQ(taken()->extra_nbytes, (std::vector<int64_t>{0, 0, 500, 0}));
}

TEST_F(Records, WhatRegionsSaveOfEntriesIsCountedAlready) {
  direct(lane);
  const EntryPtr entry = save(bytes());
  entry->add_handle();  // another save, which has not been read then
  lane->sends[0]->storage.reset();
  lane->sends[0]->said_done = true;
  const StorageRefPtr back = engine->demand(entry);
  const int64_t before = engine->ledger.counters.resident_bytes;
  const Locked locked(engine->lock);
  ASSERT_TRUE(entry->fetched() && entry->storage());
  engine->planning.count_recomputed(*back);
  EXPECT_EQ(engine->ledger.counters.resident_bytes, before);
}

// What operators hold of storages that came back.
class StoragesInUse : public Records {
 protected:
  // So many storages that are gone.
  std::vector<EntryPtr> away(int count) {
    direct(lane);
    std::vector<EntryPtr> entries;
    for (int times = 0; times < count; ++times) {
      entries.push_back(save(bytes()));
      lane->sends.back()->storage.reset();
      lane->sends.back()->said_done = true;
    }
    const Locked locked(engine->lock);
    engine->departing.notice_gone();
    return entries;
  }
  int64_t resident() const { return engine->ledger.counters.resident_bytes; }
};

TEST_F(StoragesInUse, CountsUntilItIsGone) {
  const std::vector<EntryPtr> entries = away(3);
  ASSERT_EQ(resident(), 0);
  StorageRefPtr first = engine->demand(entries[0]);
  ASSERT_EQ(entries[0]->state(), State::kAway);
  EXPECT_EQ(resident(), kBytes) << "an operator holds it";
  const StorageRefPtr second = engine->demand(entries[1]);
  EXPECT_EQ(resident(), 2 * kBytes);
  first.reset();
  engine->demand(entries[2]);
  EXPECT_EQ(resident(), 2 * kBytes) << "the first one is gone, the last one has come";
  EXPECT_TRUE(taken()->extra_nbytes.empty()) << "a plan has storages of entries already";
}

TEST_F(StoragesInUse, CountsOnceThoughItIsAskedForAgainAndSavedAgain) {
  const std::vector<EntryPtr> entries = away(1);
  const StorageRefPtr held = engine->demand(entries[0]);
  engine->demand(entries[0]);
  EXPECT_EQ(resident(), kBytes);
  const Locked locked(engine->lock);
  engine->planning.count_recomputed(*held);
  EXPECT_EQ(resident(), kBytes);
  EXPECT_EQ(engine->ledger.counters.peak_resident_bytes, kBytes);
}

TEST_F(StoragesInUse, CountsNoMoreOnceItsGraphHasGone) {
  std::vector<EntryPtr> entries = away(2);
  const StorageRefPtr somebodys = engine->demand(entries[0]);
  entries[0].reset();
  engine->demand(entries[1]);
  EXPECT_EQ(resident(), kBytes);
}

TEST_F(StoragesInUse, CountsNoMoreWhereNobodyDirects) {
  const std::vector<EntryPtr> entries = away(1);
  const StorageRefPtr held = engine->demand(entries[0]);
  engine->planning.set_directed(false);
  EXPECT_EQ(resident(), 0);
}

TEST_F(StoragesInUse, ARecordFollowsItForAsLongAsItIsHeld) {
  constexpr int kMany = 16, kHeldFor = 14;
  const std::vector<EntryPtr> entries = away(kMany);
  StorageRefPtr held = engine->demand(entries[0]);
  for (int mark = 1; mark < kMany; ++mark) {
    if (mark == kHeldFor) {
      held.reset();
    }
    engine->demand(entries[mark]);
  }
  EXPECT_EQ(taken()->last_demand[0], kMany + kHeldFor - 1);
}

TEST_F(Records, ARegionIsKnownByWhatItIsCalledWith) {
  direct(lane);
  const at::Tensor saved = bytes(), later = bytes(), never = bytes(700), small = bytes(10);
  std::vector<EntryPtr> entries{save(saved)};
  const std::vector<at::Tensor> inputs{saved, later, never, small, saved};
  {
    const Locked locked(engine->lock);
    recorder->region("region", inputs, *engine->iteration(), /*least_bytes=*/100);
  }
  entries.push_back(save(later));
  const IterationRecord record = *taken();
  ASSERT_EQ(record.regions.size(), 1u);
  EXPECT_EQ(record.regions[0].unit, "region");
  EXPECT_EQ(record.regions[0].inputs, (std::vector<size_t>{0, 1}));
  EXPECT_EQ(record.regions[0].other_nbytes, 700);
}

TEST_F(Records, UnderAPlanAnIterationIsTakenDownToo) {
  direct(lane);
  auto plan = std::make_shared<Plan>(Plan{.device = c10::Device(c10::kCPU)});
  for (int64_t place = 0; place < 2; ++place) {
    plan->places.push_back({.unit = "unit",
                            .ordinal = place,
                            .nbytes = kBytes,
                            .dtype = c10::ScalarType::Byte,
                            .action = place == 0 ? Action::kSwap : Action::kKeep});
  }
  engine->iteration()->course.set_terms({.plan = plan});
  std::vector<KnownPtr> entries;
  HookScope scope{.unit = "unit", .covered = true};
  for (int64_t place = 0; place < 2; ++place) {
    const at::Tensor tensor = bytes();
    const SavedView view = *SavedView::capture(tensor);
    const Locked locked(engine->lock);
    entries.push_back(
        engine->save({.tensor = tensor, .view = view, .scope = scope, .number = place}).known);
    ASSERT_TRUE(entries.back());
  }
  engine->demand(std::static_pointer_cast<Entry>(entries[0]));
  const IterationRecord record = *taken();
  EXPECT_EQ(record.actions, (std::vector{PlannedAction::kSwap, PlannedAction::kKeep}));
  EXPECT_EQ(record.moved, (std::vector<uint8_t>{1, 0}));
  EXPECT_EQ(record.order, std::vector<size_t>{0});
}

TEST_F(Records, ABackwardOfAnotherForwardThanPlannedFollowsNoPlan) {
  direct(lane);
  const EntryPtr entry = save(bytes());
  auto plan = std::make_shared<Plan>(Plan{.device = c10::Device(c10::kCPU)});
  plan->places.resize(2);
  engine->iteration()->course.set_terms({.plan = plan});
  engine->demand(entry);
  EXPECT_FALSE(engine->iteration()->course.follows_plan());
}

// Threads demand while others save: the marks are those of one iteration after another.
TEST_F(Records, ThreadsSaveAndDemandWhatIsTakenDown) {
  direct(std::make_shared<WorkerLane>(2, kBudget));
  std::vector<EntryPtr> entries;
  for (int times = 0; times < 64; ++times) {
    entries.push_back(save(bytes()));
  }
  std::vector<std::thread> threads;
  for (size_t number = 0; number < 4; ++number) {
    threads.emplace_back([&, number] {
      for (size_t index = number; index < entries.size(); index += 4) {
        engine->demand(entries[index]);
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  const IterationRecord record = *taken();
  EXPECT_EQ(record.order.size(), entries.size());
  EXPECT_EQ(record.gaps_s.size(), 2 * entries.size());
}

// Fetches whose tickets wait for each other, or fail.
class MeetingLane final : public TestLane {
 public:
  explicit MeetingLane(std::ptrdiff_t threads) : together(threads) {}
  std::pair<StorageRefPtr, TicketPtr> fetch(BlockPtr block, Tickets) override {
    const at::Tensor fetched = bytes(static_cast<int64_t>(block->nbytes()));
    return {std::make_shared<StorageRef>(fetched.storage()), std::make_shared<Meeting>(together)};
  }
  void end_sends() {
    for (const auto& send : sends) {
      send->storage.reset();
      send->said_done = true;
    }
  }

 private:
  struct Meeting final : Ticket {
    explicit Meeting(std::barrier<>& met) : together(met) {}
    void wait() override { together.arrive_and_wait(); }
    bool done() override { return false; }
    void synchronize() override {}

    std::barrier<>& together;
  };

  std::barrier<> together;
};

TEST_F(Records, ThreadsThatAskSideBySideAreAllTakenDown) {
  const auto meeting = std::make_shared<MeetingLane>(4);
  direct(meeting);
  std::vector<EntryPtr> entries;
  for (int times = 0; times < 4; ++times) {
    entries.push_back(save(bytes()));
  }
  meeting->end_sends();
  std::vector<std::thread> threads;
  for (const EntryPtr& entry : entries) {
    threads.emplace_back([&, entry] { engine->demand(entry); });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  std::vector<size_t> order = taken()->order;
  std::ranges::sort(order);
  EXPECT_EQ(order, (std::vector<size_t>{0, 1, 2, 3}));
}

// Fetches that find no memory.
class FullLane final : public TestLane {
 public:
  std::pair<StorageRefPtr, TicketPtr> fetch(BlockPtr, Tickets) override {
    throw c10::OutOfMemoryError({__func__, __FILE__, __LINE__}, "no memory");
  }
};

TEST_F(Records, ADemandThatBrokeOffLeavesNoRecord) {
  const auto full = std::make_shared<FullLane>();
  direct(full);
  const EntryPtr entry = save(bytes());
  full->sends[0]->storage.reset();
  full->sends[0]->said_done = true;
  EXPECT_THROW(engine->demand(entry), c10::OutOfMemoryError);
  EXPECT_FALSE(taken());
}

// Sends end at once, and what is fetched is written when somebody waits for it, as by a slow disk.
class SlowDisk final : public TestLane {
 public:
  TicketPtr send(StorageRefPtr, BlockPtr, ByteRange, Tickets) override {
    auto ended = std::make_shared<Send>(nullptr);
    ended->said_done = true;
    return ended;
  }
  std::pair<StorageRefPtr, TicketPtr> fetch(BlockPtr block, Tickets) override {
    const at::Tensor fetched = bytes(static_cast<int64_t>(block->nbytes()));
    return {std::make_shared<StorageRef>(fetched.storage()), std::make_shared<Fetch>(fetched)};
  }

 private:
  struct Fetch final : Ticket {
    explicit Fetch(at::Tensor fetched) : to(std::move(fetched)) {}
    void wait() override { std::exchange(to, {}).fill_(1); }
    bool done() override { return !to.defined(); }
    void synchronize() override {}

    at::Tensor to;
  };
};

// Resident memory counts pages that were written. What is on its way back has none yet, and would
// hide as much of what an operator takes meanwhile.
TEST_F(Records, WhatIsOnItsWayBackHidesNothingOfWhatOperatorsTake) {
  constexpr int64_t kLong = 16 << 20, kSlack = 4 << 20;
  pool = std::make_shared<Pool>(std::make_shared<OrdinarySlabs>(), PoolOptions{});
  direct(std::make_shared<SlowDisk>(), /*prefetch_bytes=*/2 * kLong);
  const std::shared_ptr<MemoryGauge> gauge = MemoryGauge::of(c10::Device(c10::kCPU));
  const int64_t before = gauge->now();
  const auto workspace =
      std::make_shared<Workspace>(gauge, std::vector<at::Tensor>{}, 1, 0, before);
  workspace->watch(engine->iteration());
  recorder->workspace = workspace;
  const EntryPtr first = save(at::ones({kLong}, at::kByte));
  const EntryPtr last = save(at::ones({kLong}, at::kByte));
  engine->demand(last);  // the first one starts back with it
  ASSERT_EQ(first->state(), State::kReturning);
  (void)at::ones({kLong}, at::kByte);  // an operator's own
  engine->demand(first);
  workspace->end();
  const std::vector<int64_t> extra = workspace->record(4).extra_nbytes;
  EXPECT_GE(extra[2], before + kLong - kSlack);
  EXPECT_LE(extra[2], before + kLong + kSlack);
}

TEST(Moments, OnADeviceAreEventsThatNobodyWaitsFor) {
  testing::events_have_ended = false;
  const Recorder unread{Clock(testing::kFakeDevice)};
  EXPECT_FALSE(unread.ready());
  Recorder recorder{Clock(testing::kFakeDevice)};
  recorder.close();
  EXPECT_FALSE(recorder.ready()) << "the device has not come to its end";
  testing::events_have_ended = true;
  EXPECT_TRUE(recorder.ready());
  testing::events_have_ended = false;
}

TEST(Moments, InACaptureThereAreNone) {
  if (!kEveryDeviceIsAsked) {
    GTEST_SKIP() << "this torch asks no device of ours whether it captures a graph";
  }
  Recorder recorder{Clock(testing::kFakeDevice)};
  testing::graph_is_captured = true;
  recorder.close();
  testing::graph_is_captured = false;
  EXPECT_TRUE(recorder.ready()) << "somebody waits for an event of a graph";
  EXPECT_FALSE(recorder.take().has_value());
}

}  // namespace
}  // namespace memswap
