// RegionCalls: which of a region's inputs the iteration has saved, before the call or after it.
#include "engine/region_calls.h"

#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include <memory>
#include <utility>
#include <vector>

#include "engine/engine.h"

namespace memswap {
namespace {

constexpr int64_t kLeast = 100;  // bytes

at::Tensor input_of(int64_t nbytes) { return at::empty({nbytes}, at::kByte); }

class Regions : public ::testing::Test {
 protected:
  EntryPtr save(const at::Tensor& tensor) {
    const Locked locked(engine->lock);
    engine->iteration()->admit(tensor.numel(), false, Iteration::kNoGroup);
    EntryPtr entry = engine->make_entry(*SavedView::capture(tensor), StorageRef(tensor.storage()));
    calls.saved(*entry);
    return entry;
  }
  void call(const std::string& unit, const std::vector<at::Tensor>& inputs) {
    const Locked locked(engine->lock);
    calls.add(unit, inputs, *engine->iteration(), kLeast);
  }

  const EnginePtr engine = std::make_shared<Engine>(0);
  RegionCalls calls;
};

TEST_F(Regions, AnInputIsKnownByItsPlaceWhetherItIsSavedBeforeTheCallOrAfterIt) {
  const at::Tensor earlier = input_of(kLeast), later = input_of(kLeast), never = input_of(300);
  std::vector<EntryPtr> entries = {save(earlier)};
  call("region", {never, later, earlier});
  entries.push_back(save(input_of(kLeast)));  // somebody else's
  entries.push_back(save(later));
  const auto found = calls.found();
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].inputs, (std::vector<size_t>{2, 0})) << "in the order of the arguments";
  EXPECT_EQ(found[0].other_nbytes, 300);
}

TEST_F(Regions, SmallStoragesAndThoseThatWereCountedDoNotCount) {
  const at::Tensor input = input_of(4 * kLeast);
  call("region",
       {input_of(kLeast - 1), input_of(kLeast), input, input.slice(0, kLeast), at::Tensor()});
  EXPECT_EQ(calls.found().at(0).other_nbytes, 5 * kLeast) << "two views are one storage";
}

TEST_F(Regions, CallsOfOneRegionAreToldTogetherInTheOrderOfTheirFirstOnes) {
  call("second", {input_of(200)});
  call("first", {input_of(300)});
  call("second", {input_of(400)});
  const auto found = calls.found();
  ASSERT_EQ(found.size(), 2u);
  EXPECT_EQ(found[0].unit, "second");
  EXPECT_EQ(found[0].other_nbytes, 600);
  EXPECT_EQ(found[1].unit, "first");
}

TEST_F(Regions, WhatHasTheAddressOfAnInputThatIsGoneIsNotTakenForIt) {
  call("region", {input_of(kLeast)});
  std::vector<std::pair<at::Tensor, EntryPtr>> alive;
  for (int tries = 0; tries < 50; ++tries) {
    const at::Tensor tensor = input_of(kLeast);
    alive.emplace_back(tensor, save(tensor));
  }
  EXPECT_TRUE(calls.found().at(0).inputs.empty());
}

TEST_F(Regions, AnEntryOfAnInputThatDiedIsNotOfTheNextOneThere) {
  EntryPtr entry = save(input_of(kLeast));
  const at::Tensor input = input_of(kLeast);
  call("region", {input});
  EXPECT_TRUE(calls.found().at(0).inputs.empty());
  entry.reset();
  call("again", {input});  // places of entries that are gone are passed over
  EXPECT_EQ(calls.found().at(1).other_nbytes, kLeast);
}

}  // namespace
}  // namespace memswap
