// Engine without Python: what becomes of saved tensors, and what comes back of them.
#include "engine/engine.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fake_device.h"
#include "lane/graph_capture.h"
#include "lane/lane_around.h"
#include "lane/worker_lane.h"
#include "pool/host_slabs.h"
#include "pool/pool.h"
#include "with_host.h"

namespace memswap {
namespace {

constexpr int64_t kSavedBytes = 1000;
constexpr size_t kHostBytes = 1 << 20;

at::Tensor saved_bytes(uint8_t value, int64_t nbytes = kSavedBytes) {
  at::Tensor tensor = at::empty({nbytes}, at::kByte);
  std::memset(tensor.mutable_data_ptr(), value, static_cast<size_t>(nbytes));
  return tensor;
}

// What a handle of autograd's holds.
struct Handle {
  SaveResult saved;
  SavedView view;
  at::Tensor kept;  // where the tensor stays

  EntryPtr entry() const { return std::static_pointer_cast<Entry>(saved.known); }
};

const PolicyTable kSwaps{.min_bytes = 1, .action = Action::kSwap};

class Engines : public ::testing::Test {
 protected:
  Engines() { engine->set_policy(kSwaps); }

  Handle save(const at::Tensor& tensor) {
    Handle handle = save_locked(tensor);
    engine->tell();
    return handle;
  }
  Handle save_locked(const at::Tensor& tensor) {
    const Locked locked(engine->lock);
    return save_under_lock(tensor);
  }
  Handle save_under_lock(const at::Tensor& tensor) {
    SavedView view = *SavedView::capture(tensor);
    SaveResult saved =
        engine->save({.tensor = tensor, .view = view, .scope = scope, .number = ++scope.packs});
    if (saved.moves) {
      static_cast<Entry&>(*saved.known).add_handle();
      return {saved, view, {}};
    }
    return {saved, view, tensor};
  }

  // Whether backward finds these bytes.
  bool demands(const Handle& handle, uint8_t value) {
    const StorageRefPtr storage = engine->demand(handle.entry());
    const auto* const bytes = static_cast<const uint8_t*>(storage->storage.data());
    return bytes[0] == value && bytes[kSavedBytes - 1] == value;
  }

  void begin_iteration() { engine->next_iteration(); }

  std::shared_ptr<Pool> pool = std::make_shared<Pool>(
      std::make_shared<BudgetedSlabs>(std::make_shared<OrdinarySlabs>(), kHostBytes),
      PoolOptions{.slab_bytes = kHostBytes, .alignment = 512});
  std::shared_ptr<WorkerLane> lane = std::make_shared<WorkerLane>(2, kHostBytes);
  std::shared_ptr<BlockSender> sender = std::make_shared<BlockSender>(lane, pool);
  testing::HostedEngine hosted = testing::hosted_engine(testing::transfers_by(sender));
  EnginePtr& engine = hosted.engine;
  testing::Host& host = hosted.host;
  std::vector<std::string>& told = host.told;
  HookScope scope{.unit = "unit", .covered = true};
};

TEST_F(Engines, WhatIsSavedLeavesAndComesBack) {
  std::vector<Handle> handles;
  for (uint8_t value = 1; value <= 5; ++value) {
    handles.push_back(save(saved_bytes(value)));
    ASSERT_TRUE(handles.back().saved.moves);
    handles.back().entry()->departure()->wait();
  }
  for (uint8_t value = 5; value >= 1; --value) {
    EXPECT_TRUE(demands(handles[value - 1], value));
  }
  EXPECT_EQ(engine->ledger.counters.returned_storages, 5);
  handles.clear();
  EXPECT_EQ(engine->ledger.known_storages(), 0u);
  EXPECT_EQ(engine->ledger.counters.resident_bytes, 0);
  EXPECT_EQ(engine->ledger.counters.away_bytes, 0);
  EXPECT_EQ(engine->departing.size(), 0u);
}

TEST_F(Engines, AStorageMovesOnceHoweverOftenItIsSaved) {
  at::Tensor tensor = saved_bytes(3);
  const Handle first = save(tensor), second = save(tensor);
  EXPECT_EQ(first.entry(), second.entry());
  EXPECT_EQ(engine->ledger.counters.moved_storages, 1);
  EXPECT_EQ(engine->ledger.counters.deduplicated_tensors, 1);
  tensor.reset();
  EXPECT_TRUE(demands(first, 3));
  EXPECT_TRUE(demands(second, 3));
}

TEST_F(Engines, WhatIsSmallOrNotCoveredStays) {
  engine->set_policy({.min_bytes = kSavedBytes + 1, .action = Action::kSwap});
  EXPECT_FALSE(save(saved_bytes(1)).saved.moves);
  EXPECT_EQ(engine->ledger.kept().at("small").nbytes, kSavedBytes);
  engine->set_policy({.min_bytes = 1, .action = Action::kKeep});
  const Handle stays = save(saved_bytes(1));
  EXPECT_FALSE(stays.saved.moves);
  EXPECT_FALSE(stays.saved.known->is_entry());
  EXPECT_EQ(engine->ledger.counters.resident_bytes, kSavedBytes);
}

TEST_F(Engines, WithoutRoomATensorStaysAndThatIsToldOnce) {
  std::vector<Handle> handles;
  for (int times = 0; times < 3; ++times) {
    handles.push_back(save(saved_bytes(1, 2 * kHostBytes)));
    EXPECT_FALSE(handles.back().saved.moves);
    const auto entry = std::static_pointer_cast<Entry>(handles.back().saved.known);
    EXPECT_EQ(entry->state(), State::kResident);
    EXPECT_EQ(entry->away(), nullptr);
  }
  EXPECT_EQ(engine->ledger.counters.moved_storages, 0);
  EXPECT_EQ(engine->ledger.kept().at("pool").tensors, 3);
  ASSERT_EQ(told.size(), 1u);
  EXPECT_NE(told[0].find("stays on cpu"), std::string::npos) << told[0];
}

// A lane to a file, without host memory on the way there or back.
class NoStaging final : public LaneAround {
 public:
  using LaneAround::LaneAround;
  TicketPtr send(StorageRefPtr storage, BlockPtr block, ByteRange range, Tickets after) override {
    return sends ? LaneAround::send(std::move(storage), std::move(block), range, std::move(after))
                 : throw TransferError("no host memory for a send");
  }
  std::pair<StorageRefPtr, TicketPtr> fetch(BlockPtr block, Tickets after) override {
    return fetches > 0 && fetches-- > 0 ? LaneAround::fetch(std::move(block), std::move(after))
                                        : throw TransferError("no host memory for a fetch");
  }

  bool sends = true;
  int fetches = 0;
};

TEST_F(Engines, WithoutMemoryOnTheWayToAFileATensorStays) {
  const auto lane = std::make_shared<NoStaging>(this->lane);
  lane->sends = false;
  host.transfers = testing::transfers_by(std::make_shared<BlockSender>(lane, pool));
  EXPECT_FALSE(save(saved_bytes(1)).saved.moves);
  EXPECT_EQ(engine->ledger.kept().at("pool").tensors, 1);
  ASSERT_EQ(told.size(), 1u);
  EXPECT_NE(told[0].find("no host memory for a send"), std::string::npos) << told[0];
}

TEST_F(Engines, WithoutMemoryOnTheWayBackOnlyWhatIsDemandedIsLost) {
  const auto lane = std::make_shared<NoStaging>(this->lane);
  engine->timeline.prefetch_bytes = 8 * kSavedBytes;
  begin_iteration();
  host.transfers = testing::transfers_by(std::make_shared<BlockSender>(lane, pool));
  const Handle first = save(saved_bytes(1)), last = save(saved_bytes(2));
  for (const Handle& handle : {first, last}) {
    while (!handle.entry()->notice_gone(/*wait=*/true)) {
    }
  }
  lane->fetches = 1;
  EXPECT_TRUE(demands(last, 2)) << "what comes next did not find room, and is asked for again";
  EXPECT_THROW(demands(first, 1), LostBytes);
  lane->fetches = 1;
  EXPECT_TRUE(demands(first, 1));
}

// What there is no memory for ahead of its demand is asked for again by the next demand, before
// what comes after it.
TEST_F(Engines, WhatLackedMemoryAheadIsBroughtByALaterDemand) {
  struct Short final : LaneAround {
    using LaneAround::LaneAround;
    std::pair<StorageRefPtr, TicketPtr> fetch(BlockPtr block, Tickets after) override {
      if (room-- <= 0) {
        throw c10::OutOfMemoryError({__func__, __FILE__, __LINE__}, "no memory");
      }
      return LaneAround::fetch(std::move(block), std::move(after));
    }
    int room = 2;
  };
  const auto short_lane = std::make_shared<Short>(lane);
  auto hosted =
      testing::hosted_engine(testing::transfers_by(std::make_shared<BlockSender>(short_lane, pool)),
                             /*prefetch_bytes=*/3 * kSavedBytes);
  engine = hosted.engine;
  engine->set_policy(kSwaps);
  std::vector<Handle> handles;
  for (uint8_t value = 1; value <= 5; ++value) {
    handles.push_back(save(saved_bytes(value)));
    handles.back().entry()->departure()->wait();
  }
  const auto returning = [&](size_t which) {
    return handles[which].entry()->state() == State::kReturning;
  };
  EXPECT_TRUE(demands(handles[4], 5));
  EXPECT_TRUE(returning(3));
  EXPECT_FALSE(returning(2)) << "there was no memory for it";
  short_lane->room = 2;
  EXPECT_TRUE(demands(handles[3], 4));
  EXPECT_TRUE(returning(2));
  EXPECT_TRUE(returning(1));
  EXPECT_FALSE(returning(0)) << "what is newly near comes after what was near before";
  short_lane->room = 1;
  EXPECT_TRUE(demands(handles[2], 3));
  EXPECT_TRUE(returning(0));
  EXPECT_EQ(engine->ledger.counters.stalls, 1);
}

TEST_F(Engines, AFunctionOfTheUsersIsAskedUnlessWhoSavesHasAnAction) {
  engine->set_policy({.min_bytes = 1, .action = std::nullopt, .asks = true});
  host.says = Action::kKeep;
  EXPECT_FALSE(save(saved_bytes(1)).saved.moves);
  host.says = std::nullopt;
  EXPECT_TRUE(save(saved_bytes(1)).saved.moves) << "as suits the device";
  EXPECT_EQ(host.asked, 2);
  scope.action = Action::kSwap;
  host.says = Action::kKeep;
  EXPECT_TRUE(save(saved_bytes(1)).saved.moves);
  scope.action = Action::kKeep;
  EXPECT_FALSE(save(saved_bytes(1)).saved.moves);
  EXPECT_EQ(host.asked, 2);
}

TEST_F(Engines, ParametersAndBuffersAreKnownByTheirStorages) {
  const at::Tensor plain = saved_bytes(1), buffer = saved_bytes(2);
  const at::Tensor leaf = at::empty({8}, at::kFloat).requires_grad_();
  engine->set_persistent({buffer});
  EXPECT_FALSE(engine->persists(*SavedView::capture(plain)));
  EXPECT_TRUE(engine->persists(*SavedView::capture(buffer.slice(0, 5, 10))));
  EXPECT_TRUE(engine->persists(*SavedView::capture(leaf)));
  EXPECT_EQ(why_fixed(*SavedView::capture(plain)), nullptr);
}

TEST_F(Engines, ATableIsFollowedWithoutAskingAnybody) {
  std::vector<Handle> handles;
  for (int times = 0; times < 4; ++times) {
    handles.push_back(save(saved_bytes(1)));
    EXPECT_TRUE(handles.back().saved.moves);
  }
  EXPECT_EQ(host.asked, 0);
  EXPECT_EQ(host.opened, 1) << "what a device's storages leave by is opened once";
  engine->set_policy({.min_bytes = 1});
  EXPECT_TRUE(save(saved_bytes(1)).saved.moves) << "what suits the device";
  EXPECT_EQ(host.asked, 0);
}

TEST_F(Engines, WhatIsSavedAfterBackwardBeganBelongsToANewIteration) {
  const Handle handle = save(saved_bytes(1));
  const IterationPtr before = engine->iteration();
  demands(handle, 1);
  const Handle other = save(saved_bytes(2));
  EXPECT_TRUE(other.saved.moves);
  EXPECT_NE(engine->iteration(), before);
  EXPECT_EQ(engine->iteration()->size(), 1u);
}

TEST_F(Engines, AStorageOfADeviceWithoutTransfersStays) {
  host.transfers = nullptr;
  EXPECT_FALSE(save(saved_bytes(1)).saved.moves);
  EXPECT_EQ(engine->ledger.kept().at("host memory beside an accelerator").tensors, 1);
  EXPECT_EQ(engine->ledger.counters.peak_resident_bytes, 0) << "none of the device's bytes";
}

TEST_F(Engines, NothingLeavesWhileAStreamCapturesAGraph) {
  if (!kEveryDeviceIsAsked) {
    GTEST_SKIP() << "this torch asks no device of ours whether it captures a graph";
  }
  host.transfers = testing::transfers_by(sender, {}, testing::kFakeDevice);
  testing::graph_is_captured = true;
  EXPECT_FALSE(save(saved_bytes(1)).saved.moves);
  testing::graph_is_captured = false;
  EXPECT_EQ(engine->ledger.kept().at("stream capture").tensors, 1);
  EXPECT_TRUE(save(saved_bytes(1)).saved.moves);
}

TEST_F(Engines, WithoutARecipeARecomputedStorageLeavesAsSuitsTheDevice) {
  engine->set_policy({.min_bytes = 1, .action = Action::kRecompute});
  EXPECT_TRUE(save(saved_bytes(1)).saved.moves);
  EXPECT_EQ(engine->recipes(), nullptr) << "nobody asked for recipes of a device";
  host.transfers = testing::transfers_by(sender, {.action = Action::kRecompute});
  const EnginePtr other = testing::hosted_engine(host.transfers).engine;
  other->set_policy({.min_bytes = 1});
  const at::Tensor tensor = saved_bytes(1);
  const Locked locked(other->lock);
  const SavedView view = *SavedView::capture(tensor);
  EXPECT_TRUE(other->save({.tensor = tensor, .view = view, .scope = scope, .number = 1}).moves);
  EXPECT_NE(other->recipes(), nullptr);
}

TEST_F(Engines, AFunctionOfTheUsersMayDoWhateverTakesTheLock) {
  engine->set_policy({.min_bytes = 1, .asks = true});
  host.says = Action::kSwap;
  const Handle first = save(saved_bytes(1));
  host.meanwhile = [&] {
    EXPECT_TRUE(demands(first, 1));
    EXPECT_TRUE(save(saved_bytes(2)).saved.moves);
  };
  EXPECT_TRUE(save(saved_bytes(3)).saved.moves);
  EXPECT_EQ(host.asked, 3);
}

TEST_F(Engines, WhatIsSavedWhileTheUsersFunctionIsAskedIsSavedOnce) {
  engine->set_policy({.min_bytes = 1, .asks = true});
  host.says = Action::kSwap;
  const at::Tensor tensor = saved_bytes(1);
  std::optional<Handle> inner;
  host.meanwhile = [&] { inner = save(tensor); };
  const Handle outer = save(tensor);
  EXPECT_TRUE(outer.saved.moves);
  ASSERT_TRUE(inner.has_value());
  EXPECT_EQ(outer.entry(), inner->entry()) << "one storage has two entries";
  EXPECT_EQ(engine->ledger.counters.moved_storages, 1);
  EXPECT_EQ(engine->ledger.counters.deduplicated_tensors, 1);
}

TEST_F(Engines, WhoDirectsSaysWhatBecomesOfEachStorage) {
  engine->planning.set_directed(true);
  host.directs = Action::kKeep;
  EXPECT_FALSE(save(saved_bytes(1)).saved.moves);
  EXPECT_EQ(engine->ledger.kept().at("planned").tensors, 1);
  host.directs = Action::kSwap;
  EXPECT_TRUE(save(saved_bytes(1)).saved.moves);
  host.directs = std::nullopt;
  engine->set_policy({.min_bytes = 1, .action = Action::kKeep});
  EXPECT_FALSE(save(saved_bytes(1)).saved.moves) << "as the policy has it";
  EXPECT_EQ(engine->ledger.kept().at("policy").tensors, 1);
  EXPECT_EQ(host.asked, 3);
}

TEST_F(Engines, ThePlanOfAnIterationIsFollowedForAsLongAsItFits) {
  auto plan = std::make_shared<Plan>(Plan{.device = c10::Device(c10::kCPU)});
  for (int64_t place = 0; place < 3; ++place) {
    plan->places.push_back({.unit = "unit",
                            .ordinal = place,
                            .nbytes = kSavedBytes,
                            .dtype = c10::ScalarType::Byte,
                            .action = place == 1 ? Action::kKeep : Action::kSwap});
  }
  plan->places[2].releases = {0};
  plan->places[2].fetches = {0};
  plan->check();
  engine->planning.set_directed(true);
  engine->iteration()->course.set_terms({.plan = plan});
  std::vector<Handle> handles;
  for (uint8_t value = 1; value <= 3; ++value) {
    handles.push_back(save(saved_bytes(value)));
  }
  EXPECT_TRUE(handles[0].saved.moves);
  EXPECT_FALSE(handles[1].saved.moves);
  EXPECT_TRUE(handles[2].saved.moves);
  EXPECT_EQ(handles[0].entry()->state(), State::kAway) << "its room was released";
  EXPECT_EQ(engine->ledger.kept().at("planned").tensors, 1);
  EXPECT_TRUE(demands(handles[2], 3));
  EXPECT_EQ(handles[0].entry()->state(), State::kReturning) << "it starts back as planned";
  EXPECT_TRUE(demands(handles[0], 1));
  EXPECT_EQ(engine->iteration()->course.peak_bytes(), 3 * kSavedBytes);
  EXPECT_EQ(host.asked, 0);
  save(saved_bytes(4));
  EXPECT_EQ(host.asked, 1) << "the plan does not know it";
}

// What comes first tells one input shape from another, and each may have a plan of its own.
TEST_F(Engines, WhatBeginsSmallerThanPlannedIsAskedAbout) {
  const auto asked = [this](int64_t more_bytes) {
    auto plan = std::make_shared<Plan>(Plan{.device = c10::Device(c10::kCPU)});
    for (int64_t place = 0; place < 2; ++place) {
      plan->places.push_back({.unit = "unit",
                              .ordinal = place,
                              .nbytes = kSavedBytes + (place == 0 ? more_bytes : 1),
                              .dtype = c10::ScalarType::Byte,
                              .action = Action::kSwap});
    }
    begin_iteration();
    scope.ordinal = -1;
    engine->iteration()->course.set_terms({.plan = plan});
    host.asked = 0;
    const Handle first = save(saved_bytes(1)), second = save(saved_bytes(2));
    return host.asked;
  };
  engine->planning.set_directed(true);
  host.directs = Action::kSwap;
  EXPECT_EQ(asked(0), 0) << "a later storage may be smaller";
  EXPECT_EQ(asked(1), 1);
}

TEST_F(Engines, AnEntryOutlivesTheEngineOfWhoeverMadeIt) {
  const Handle handle = save(saved_bytes(9));
  const std::weak_ptr<Engine> alive = engine;
  const EntryPtr entry = handle.entry();
  engine.reset();
  ASSERT_FALSE(alive.expired()) << "an entry counts in its engine";
  engine = alive.lock();
  EXPECT_TRUE(demands(handle, 9));
}

TEST_F(Engines, IterationsAreForgottenAfterAFew) {
  Handle handle = save(saved_bytes(1));
  const std::weak_ptr<Iteration> first = engine->iteration();
  demands(handle, 1);
  handle.saved = {};
  for (int times = 0; times < 30; ++times) {
    begin_iteration();
    const Handle other = save(saved_bytes(2));
    demands(other, 2);
  }
  EXPECT_TRUE(first.expired()) << "iterations are kept for ever";
}

TEST_F(Engines, ThreadsSaveAndDemandThroughOneEngine) {
  engine->timeline.prefetch_bytes = 1 << 30;
  begin_iteration();
  std::vector<std::thread> threads;
  for (uint8_t number = 1; number <= 4; ++number) {
    threads.emplace_back([&, number] {
      for (int times = 0; times < 50; ++times) {
        Handle handle = [&] {
          const Locked locked(engine->lock);  // as hooks do, whose lives Python serialises
          if (engine->iteration()->began_backward()) {
            begin_iteration();
          }
          return save_under_lock(saved_bytes(number));
        }();
        EXPECT_TRUE(demands(handle, number));
        const Locked locked(engine->lock);
        handle = Handle{{}, handle.view, {}};
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
