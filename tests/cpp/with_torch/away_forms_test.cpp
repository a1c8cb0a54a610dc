// Away forms in host memory: what a storage becomes, and what comes back of it.
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "engine/block_form.h"
#include "engine/bucket.h"
#include "lane/worker_lane.h"
#include "pool/host_slabs.h"
#include "pool/pool.h"

namespace memswap {
namespace {

constexpr size_t kLong = 1000;
constexpr size_t kBudget = 1 << 20;

StorageRefPtr new_storage(std::byte value, size_t nbytes = kLong) {
  auto storage = std::make_shared<StorageRef>(c10::Storage(
      c10::Storage::use_byte_size_t(), nbytes, c10::GetCPUAllocator(), /*resizable=*/false));
  std::fill_n(static_cast<std::byte*>(storage->storage.mutable_data()), nbytes, value);
  return storage;
}

bool is_filled(const StorageRef& storage, std::byte value) {
  const auto* bytes = static_cast<const std::byte*>(storage.storage.data());
  return std::all_of(bytes, bytes + storage.storage.nbytes(),
                     [&](std::byte byte) { return byte == value; });
}

// Brings a form back, and fills what came back: nobody else may see that.
bool comes_back(AwayForm& form, std::byte value) {
  const auto [storage, arrival] = form.bring();
  arrival->wait();
  const bool right = is_filled(*storage, value);
  std::fill_n(static_cast<std::byte*>(storage->storage.mutable_data()), storage->storage.nbytes(),
              std::byte{255});
  return right;
}

class AwayForms : public ::testing::TestWithParam<size_t> {
 protected:
  std::shared_ptr<Pool> pool = std::make_shared<Pool>(
      std::make_shared<BudgetedSlabs>(std::make_shared<OrdinarySlabs>(), kBudget),
      PoolOptions{.slab_bytes = kBudget, .alignment = 512});
  std::shared_ptr<WorkerLane> lane = std::make_shared<WorkerLane>(GetParam(), kBudget);
  BlockSender sender{lane, pool};
};

TEST_P(AwayForms, ABlockComesBackAsOftenAsItIsAskedFor) {
  const auto sent = sender.send(new_storage(std::byte{7}));
  ASSERT_TRUE(sent);
  sent->departure->wait();
  EXPECT_EQ(sent->away->device_nbytes(), 0u);
  EXPECT_EQ(sent->away->pool_nbytes(), kLong);
  EXPECT_FALSE(sent->away->frees_first());
  for (int times = 0; times < 3; ++times) {
    EXPECT_TRUE(comes_back(*sent->away, std::byte{7}));
  }
}

TEST_P(AwayForms, PartsOfABucketComeBackApartAndNeverTwiceInTheSameMemory) {
  std::vector<StorageRefPtr> storages;
  for (int value = 1; value <= 5; ++value) {
    storages.push_back(new_storage(static_cast<std::byte>(value), kLong + 100 * value));
  }
  auto sent = send_together(sender, storages);
  storages.clear();
  ASSERT_TRUE(sent);
  for (int times = 0; times < 3; ++times) {
    for (int value = 1; value <= 5; ++value) {
      const Leaving& part = (*sent)[value - 1];
      part.departure->wait();
      EXPECT_TRUE(part.away->frees_first());
      EXPECT_EQ(part.away->pool_nbytes(), kLong + 100 * value);
      EXPECT_TRUE(comes_back(*part.away, static_cast<std::byte>(value)));
    }
  }
  // The last part has the whole block.
  sent->erase(sent->begin(), sent->end() - 1);
  EXPECT_TRUE(comes_back(*sent->front().away, std::byte{5}));
}

TEST_P(AwayForms, WithoutRoomNothingIsStarted) {
  EXPECT_FALSE(sender.send(new_storage(std::byte{1}, 2 * kBudget)));
  EXPECT_NE(sender.why_refused().find("budget"), std::string::npos) << sender.why_refused();
  EXPECT_FALSE(send_together(
      sender, {new_storage(std::byte{1}, kBudget), new_storage(std::byte{1}, kBudget)}));
  EXPECT_EQ(lane->leaving_bytes(), 0u);
}

INSTANTIATE_TEST_SUITE_P(Workers, AwayForms, ::testing::Values(0, 2));

}  // namespace
}  // namespace memswap
