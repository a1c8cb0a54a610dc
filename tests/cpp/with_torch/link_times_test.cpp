// LinkTimes: which copies are timed, and from where to where.
#include "engine/link_times.h"

#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "engine/engine.h"
#include "fake_device.h"
#include "lane/stream_lane.h"
#include "lane/worker_lane.h"
#include "pool/host_slabs.h"
#include "pool/pool.h"
#include "with_host.h"

namespace memswap {
namespace {

class Links : public ::testing::Test {
 protected:
  void SetUp() override {
    testing::events_have_ended = false;
    testing::elapsed_ms = 4;
  }
  void TearDown() override {
    entries.clear();
    testing::events_have_ended = false;
    testing::elapsed_ms = 0;
  }

  // The place of a storage that leaves by a lane.
  size_t save(int64_t nbytes, const std::shared_ptr<Lane>& lane) {
    const at::Tensor tensor =
        lane == by_link ? testing::fake_bytes(nbytes) : at::empty({nbytes}, at::kByte);
    const Locked locked(engine->lock);
    auto storage = std::make_shared<StorageRef>(tensor.storage());
    engine->iteration()->admit(nbytes, false, Iteration::kNoGroup);
    const EntryPtr entry = engine->make_entry(*SavedView::capture(tensor), *storage);
    engine->depart(*entry, BlockSender(lane, pool).send(storage).value());
    entries.push_back(entry);
    return entry->index();
  }
  static bool is_gone(Entry& entry) {
    return entry.departure()->done() && entry.notice_gone(/*wait=*/false);
  }
  // Those of several copies of one direction that the device has passed.
  static void expect(const std::vector<IterationRecord::Copy>& copies,
                     const std::vector<int64_t>& nbytes) {
    ASSERT_EQ(copies.size(), nbytes.size());
    for (size_t index = 0; index < copies.size(); ++index) {
      EXPECT_EQ(copies[index].nbytes, nbytes[index]);
      EXPECT_DOUBLE_EQ(copies[index].seconds, 4e-3);
    }
  }

  const std::shared_ptr<Pool> pool =
      std::make_shared<Pool>(std::make_shared<OrdinarySlabs>(), PoolOptions{.slab_bytes = 1 << 20});
  const std::shared_ptr<Lane> by_link =
      std::make_shared<StreamLane>(testing::kFakeDevice, 0, 1 << 20);
  const EnginePtr engine = std::make_shared<Engine>(0);
  std::vector<EntryPtr> entries;
  LinkTimes times;
};

TEST_F(Links, ACopyIsTimedFromTheEndOfTheOneBeforeIt) {
  for (const int64_t nbytes : {100, 200, 300}) {
    times.sent(*entries.at(save(nbytes, by_link)));
  }
  expect(times.sends(), {});
  testing::events_have_ended = true;
  expect(times.sends(), {200, 300});  // nobody knows when the link began with the first one
  expect(times.fetches(), {});
}

TEST_F(Links, WhatWorkersCopyIsNoLinks) {
  const auto workers = std::make_shared<WorkerLane>(0, 1 << 20);
  testing::events_have_ended = true;
  times.sent(*entries.at(save(100, by_link)));
  times.sent(*entries.at(save(200, workers)));
  expect(times.sends(), {});
}

TEST_F(Links, WhatHasLeftByNowWasNotSentJustNow) {
  times.sent(*entries.at(save(100, by_link)));
  const size_t place = save(200, by_link);
  testing::events_have_ended = true;
  {
    const Locked locked(engine->lock);
    ASSERT_TRUE(is_gone(*entries[place]));
  }
  times.sent(*entries[place]);
  expect(times.sends(), {});
}

TEST_F(Links, WhatComesBackTogetherIsOneCopyAndEachStorageCountsOnce) {
  const std::vector<size_t> places = {save(100, by_link), save(200, by_link), save(400, by_link)};
  testing::events_have_ended = true;
  const Locked locked(engine->lock);
  for (const EntryPtr& entry : entries) {
    ASSERT_TRUE(is_gone(*entry));
  }
  const auto come_back = [&](std::vector<size_t> some) {
    for (const size_t place : some) {
      ASSERT_EQ(entries[place]->fetch_ahead(), Ahead::kFetches);
    }
  };
  const Iteration& of = *engine->iteration();
  times.returning(of, places);  // none of them is on its way
  come_back({places[0]});
  times.returning(of, places);
  times.returning(of, places);  // the demand of another one finds it there yet
  come_back({places[1], places[2]});
  times.returning(of, places);
  expect(times.fetches(), {600});
}

}  // namespace
}  // namespace memswap
