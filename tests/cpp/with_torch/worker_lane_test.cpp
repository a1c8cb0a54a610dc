// WorkerLane under many threads at once. Worth most under -fsanitize=thread; torch itself is not
// instrumented, but all that a transfer shares between threads is in csrc and in inline headers.
#include "lane/worker_lane.h"

#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "pool/host_slabs.h"
#include "pool/pool.h"

namespace memswap {
namespace {

constexpr size_t kLong = 10'007;
constexpr int kThreads = 4;
constexpr int kRounds = 100;

StorageRefPtr new_storage(std::byte value) {
  auto storage = std::make_shared<StorageRef>(c10::Storage(
      c10::Storage::use_byte_size_t(), kLong, c10::GetCPUAllocator(), /*resizable=*/false));
  std::fill_n(static_cast<std::byte*>(storage->storage.mutable_data()), kLong, value);
  return storage;
}

bool is_filled(const StorageRef& storage, size_t begin, size_t end, std::byte value) {
  const auto* bytes = static_cast<const std::byte*>(storage.storage.data());
  return std::all_of(bytes + begin, bytes + end, [&](std::byte byte) { return byte == value; });
}

class WorkerLanes : public ::testing::TestWithParam<size_t> {
 protected:
  std::shared_ptr<Pool> pool = std::make_shared<Pool>(
      std::make_shared<OrdinarySlabs>(), PoolOptions{.slab_bytes = 1 << 20, .alignment = 512});
  WorkerLane lane{GetParam(), /*max_leaving_bytes=*/5 * kLong};
};

// Each thread has blocks of its own, from one pool, and storages that others read at the same time.
TEST_P(WorkerLanes, ManyThreadsSendAndFetchThroughOneLane) {
  const StorageRefPtr shared = new_storage(std::byte{7});
  std::atomic<int> wrong{0};
  const auto work = [&](unsigned seed) {
    std::mt19937 random(seed);
    for (int round = 0; round < kRounds; ++round) {
      const auto value = static_cast<std::byte>(random() % 200 + 10);
      const size_t begin = random() % kLong;
      const size_t nbytes = random() % (kLong - begin) + 1;
      const auto own = new_storage(value);
      const auto target = new_storage(std::byte{1});
      BlockPtr mine = pool->allocate(nbytes);
      BlockPtr common = pool->allocate(nbytes);
      TicketPtr away = lane.send(own, mine, {begin, nbytes});
      TicketPtr read = lane.send(shared, common, {begin, nbytes}, {away});
      TicketPtr first = lane.fetch_into(common, target, begin, {read});
      TicketPtr second = lane.fetch_into(mine, target, begin, {first});
      auto [copy, third] = lane.fetch(mine);
      if (random() % 2) {
        away.reset();
        mine.reset();
      }
      if (random() % 3 == 0) {
        first->wait();
        (void)second->done();
      }
      second->wait();
      third->synchronize();
      wrong += !is_filled(*target, 0, begin, std::byte{1});
      wrong += !is_filled(*target, begin, begin + nbytes, value);
      wrong += !is_filled(*target, begin + nbytes, kLong, std::byte{1});
      wrong += !is_filled(*copy, 0, nbytes, value);
    }
  };
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < kThreads; ++seed) {
    threads.emplace_back(work, seed);
  }
  std::atomic<bool> over{false};
  std::thread watcher([&] {
    while (!over) {
      (void)lane.leaving_bytes();
      lane.set_max_leaving_bytes(4 * kLong);
      lane.settle();
      std::this_thread::yield();
    }
  });
  for (std::thread& thread : threads) {
    thread.join();
  }
  over = true;
  watcher.join();
  lane.settle();
  EXPECT_EQ(wrong, 0) << "bytes came back wrong, or in the wrong place";
  EXPECT_EQ(lane.leaving_bytes(), 0U);
  EXPECT_EQ(shared.use_count(), 1) << "a send that has ended still owns its storage";
}

TEST_P(WorkerLanes, AnyThreadMayWaitForAnyTicketAndReadWhatItBrought) {
  for (int round = 0; round < kRounds; ++round) {
    const BlockPtr block = pool->allocate(kLong);
    const TicketPtr away = lane.send(new_storage(std::byte{3}), block);
    const auto [storage, back] = lane.fetch(block);
    std::atomic<int> wrong{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([&, i, &storage = storage, &back = back] {
        if (i % 2 && GetParam() > 0) {
          while (!back->done()) {  // which promises the bytes as well
            std::this_thread::yield();
          }
        } else {
          back->wait();
          away->wait();
        }
        wrong += !is_filled(*storage, 0, kLong, std::byte{3});
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    ASSERT_EQ(wrong, 0);
  }
}

TEST_P(WorkerLanes, ALaneMayEndWhileOthersStillWaitForItsTickets) {
  for (int round = 0; round < kRounds; ++round) {
    auto ending = std::make_unique<WorkerLane>(GetParam());
    const BlockPtr block = pool->allocate(kLong);
    const TicketPtr away = ending->send(new_storage(std::byte{5}), block);
    const auto [storage, back] = ending->fetch(block, {away});
    std::thread waiter([&, &back = back] { back->wait(); });
    ending.reset();
    waiter.join();
    ASSERT_TRUE(is_filled(*storage, 0, kLong, std::byte{5}));
  }
}

INSTANTIATE_TEST_SUITE_P(Workers, WorkerLanes, ::testing::Values(0, 1, 3));

}  // namespace
}  // namespace memswap
