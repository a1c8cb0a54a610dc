// Entry, Ledger, Departing and SavedTensor: which storage an entry stands for, its steps, what is
// counted, and what is left of it.
#include "engine/entry.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "failing_lane.h"
#include "lane/worker_lane.h"
#include "pool/host_slabs.h"
#include "pool/pool.h"

namespace memswap {
namespace {

constexpr int64_t kStorageBytes = 100;
constexpr size_t kPoolBytes = 1 << 20;

at::Tensor full_of(uint8_t value) {
  at::Tensor tensor = at::empty({kStorageBytes}, at::kByte);
  std::memset(tensor.mutable_data_ptr(), value, static_cast<size_t>(kStorageBytes));
  return tensor;
}

SavedView look_at(const at::Tensor& tensor) { return *SavedView::capture(tensor); }

StorageRefPtr storage_of(const at::Tensor& tensor) {
  return std::make_shared<StorageRef>(tensor.storage());
}

class Entries : public ::testing::Test {
 protected:
  Entries() {
    engine->ledger.warn = [this](const std::string& message) { told.push_back(message); };
  }

  EntryPtr entry_of(const at::Tensor& tensor) {
    return Entry::make(engine, look_at(tensor), *storage_of(tensor));
  }
  EntryPtr sent(const at::Tensor& tensor, BlockSender& by, bool wait = true) {
    EntryPtr entry = entry_of(tensor);
    entry->leave(by.send(storage_of(tensor)).value());
    if (wait) {
      entry->departure()->wait();
    }
    return entry;
  }

  std::shared_ptr<Pool> pool = std::make_shared<Pool>(
      std::make_shared<BudgetedSlabs>(std::make_shared<OrdinarySlabs>(), kPoolBytes),
      PoolOptions{.slab_bytes = kPoolBytes, .alignment = 512});
  // A send begins when somebody waits for it.
  BlockSender sender{std::make_shared<WorkerLane>(0, kPoolBytes), pool};
  EnginePtr engine = std::make_shared<Engine>(/*prefetch_bytes=*/0);
  Ledger& ledger = engine->ledger;
  std::vector<std::string> told;
};

TEST_F(Entries, AStepThatIsNotLegalSaysWhoTriedWhatAndChangesNothing) {
  const at::Tensor tensor = full_of(1);
  const EntryPtr entry = sent(tensor, sender);
  const TicketPtr departure = entry->departure();
  const AwayFormPtr away = entry->away();
  try {
    entry->leave(sender.send(storage_of(tensor)).value());
    FAIL() << "what is leaving was sent once more";
  } catch (const EntryStateError& error) {
    const std::string said = error.what();
    EXPECT_NE(said.find("100 bytes"), std::string::npos) << said;
    EXPECT_NE(said.find("from leaving to leaving"), std::string::npos) << said;
  }
  EXPECT_EQ(entry->state(), State::kLeaving);
  EXPECT_EQ(entry->departure(), departure);
  EXPECT_EQ(entry->away(), away);
  EXPECT_EQ(ledger.counters.moved_storages, 1);
  EXPECT_EQ(ledger.counters.resident_bytes, kStorageBytes);
}

TEST_F(Entries, AnEntryIsFoundByItsVeryStorageAndContent) {
  at::Tensor tensor = full_of(1);
  EntryPtr entry = entry_of(tensor);
  EXPECT_EQ(ledger.find(look_at(tensor)).known, entry);
  EXPECT_EQ(ledger.find(look_at(tensor.slice(0, 10))).known, entry);
  EXPECT_EQ(ledger.find(look_at(tensor.clone())).known, nullptr);
  tensor.add_(1);
  EXPECT_EQ(ledger.find(look_at(tensor)).known, nullptr) << "an edited storage is another one";
  EntryPtr again = entry_of(tensor);
  entry.reset();
  EXPECT_EQ(ledger.find(look_at(tensor)).known, again) << "the first one took it along";
  again.reset();
  EXPECT_EQ(ledger.known_storages(), 0u);
  EXPECT_EQ(ledger.counters.resident_bytes, 0);
}

TEST_F(Entries, AStorageThatCameBackIsNotTakenForWhatHasItsOldAddress) {
  at::Tensor tensor = full_of(7);
  const SavedView view = look_at(tensor);
  const EntryPtr entry = sent(tensor, sender);
  tensor.reset();
  EXPECT_FALSE(entry->lingers());
  entry->add_handle();
  const StorageRefPtr storage = entry->bring();
  entry->arrival()->wait();
  EXPECT_NE(storage->storage.unsafeGetStorageImpl(), view.storage_key());
  EXPECT_TRUE(view.rebuild(*storage, false).equal(full_of(7)));
  EXPECT_EQ(ledger.find(view).known, nullptr);
  EXPECT_EQ(ledger.counters.stalls, 1);
  EXPECT_EQ(ledger.counters.returned_bytes, kStorageBytes);
}

TEST_F(Entries, ASendThatFailedGivesTheStorageBack) {
  const at::Tensor tensor = full_of(3);
  BlockSender failing(
      std::make_shared<testing::FailingLane>(std::make_shared<WorkerLane>(0, kPoolBytes)), pool);
  const EntryPtr entry = sent(tensor, failing, /*wait=*/false);
  Departing departing;
  departing.add(entry.get());
  departing.notice_gone();
  EXPECT_EQ(departing.size(), 0u) << "it departs no more";
  EXPECT_EQ(entry->state(), State::kResident);
  EXPECT_EQ(entry->away(), nullptr);
  EXPECT_TRUE(entry->notice_sent()) << "asked again, it only says so";
  ASSERT_NE(entry->storage(), nullptr);
  EXPECT_EQ(entry->storage()->storage.unsafeGetStorageImpl(), look_at(tensor).storage_key());
  EXPECT_EQ(ledger.counters.away_bytes, 0);
  EXPECT_EQ(ledger.kept().at("pool").nbytes, kStorageBytes);
  EXPECT_TRUE(told.empty()) << "the user is warned when all is done";
  engine->tell();
  ASSERT_EQ(told.size(), 1u);
  EXPECT_NE(told[0].find("a storage stays where it is"), std::string::npos) << told[0];
}

// Its send may be under way while a reader has it: then it is leaving afterwards, and counted as
// there until it is gone.
TEST_F(Entries, WhatIsReadWhileItLeavesGoesOnLeaving) {
  at::Tensor tensor = full_of(4);
  const EntryPtr entry = sent(tensor, sender, /*wait=*/false);
  entry->add_handle();
  StorageRefPtr read = entry->bring();
  EXPECT_EQ(entry->state(), State::kLeaving);
  EXPECT_EQ(engine->departing.size(), 1u);
  EXPECT_EQ(ledger.counters.resident_bytes, kStorageBytes);
  read.reset();
  tensor.reset();
  EXPECT_FALSE(entry->notice_gone(/*wait=*/false)) << "its send holds it";
  entry->departure()->wait();
  engine->departing.notice_gone();
  EXPECT_EQ(entry->state(), State::kAway);
  EXPECT_EQ(ledger.counters.resident_bytes, 0);
  EXPECT_EQ(ledger.counters.freed_bytes, kStorageBytes);
}

// Every save has read it, and its last consumer holds it: it is away, and not gone.
TEST_F(Entries, WhatAConsumerHoldsIsNotGoneAndNotFetchedOnceMore) {
  at::Tensor tensor = full_of(6);
  const EntryPtr entry = sent(tensor, sender);
  tensor.reset();
  EXPECT_TRUE(entry->notice_gone(/*wait=*/false));
  entry->add_handle();
  StorageRefPtr consumed = entry->bring();
  entry->arrival()->wait();
  EXPECT_EQ(entry->state(), State::kAway);
  EXPECT_FALSE(entry->notice_gone(/*wait=*/false));
  EXPECT_EQ(entry->fetch_ahead(), Ahead::kNothing);
  EXPECT_EQ(entry->returning_nbytes(), 0);
  EXPECT_EQ(entry->bring()->storage.unsafeGetStorageImpl(),
            consumed->storage.unsafeGetStorageImpl());
  EXPECT_EQ(ledger.counters.returned_storages, 1);
  consumed.reset();
  EXPECT_TRUE(entry->notice_gone(/*wait=*/false));
  EXPECT_EQ(entry->fetch_ahead(), Ahead::kFetches);
}

TEST_F(Entries, TheLastHandleTakesTheEntryAlong) {
  at::Tensor tensor = full_of(5);
  EntryPtr entry = sent(tensor, sender);
  std::vector<SavedTensor> handles;
  for (int times = 0; times < 2; ++times) {
    handles.push_back(SavedTensor::moved(entry, look_at(tensor)));
  }
  EXPECT_EQ(entry->handles(), 2);
  tensor.reset();
  const std::weak_ptr<Entry> alive = entry;
  EXPECT_EQ(entry->fetch_ahead(), Ahead::kFetches) << "it is away, and has not been demanded";
  entry->arrival()->wait();
  entry.reset();
  handles.pop_back();
  EXPECT_FALSE(alive.expired());
  EXPECT_GT(pool->statistics().in_use_bytes, 0u);
  handles.pop_back();
  EXPECT_TRUE(alive.expired());
  EXPECT_EQ(pool->statistics().in_use_bytes, 0u);
  EXPECT_EQ(ledger.counters.resident_bytes, 0);
  EXPECT_EQ(ledger.counters.away_bytes, 0);
}

TEST_F(Entries, AnEntryThatIsGoneIsFoundByNobody) {
  const at::Tensor tensor = full_of(1);
  EntryPtr entry = entry_of(tensor);
  const auto iteration = std::make_shared<Iteration>(nullptr, 0);
  iteration->admit(kStorageBytes, false, Iteration::kNoGroup);
  iteration->place(entry);
  EXPECT_EQ(iteration->entry(0), entry);
  entry.reset();
  EXPECT_EQ(iteration->entry(0), nullptr);
  EXPECT_TRUE(iteration->over());
  EXPECT_EQ(ledger.find(look_at(tensor)).known, nullptr);
  EXPECT_EQ(ledger.counters.resident_bytes, 0);
}

TEST_F(Entries, WhatStaysIsCountedOnceForAsLongAsItIsKnown) {
  const at::Tensor tensor = full_of(1);
  std::shared_ptr<Stay> stay = Stay::make({engine, &ledger}, look_at(tensor));
  EXPECT_EQ(ledger.find(look_at(tensor.slice(0, 5))).known, stay);
  EXPECT_EQ(ledger.counters.resident_bytes, kStorageBytes);
  EXPECT_EQ(ledger.known_storages(), 1u);
  stay.reset();
  EXPECT_EQ(ledger.counters.resident_bytes, 0);
  EXPECT_EQ(ledger.known_storages(), 0u);
}

// --- what departs ---

TEST_F(Entries, WhatDepartsIsAccountedForOnceNobodyHoldsIt) {
  constexpr size_t kAll = Departing::kLately + 4;
  Departing departing;
  std::vector<at::Tensor> tensors;
  std::vector<EntryPtr> entries;
  for (size_t which = 0; which < kAll; ++which) {
    tensors.push_back(full_of(static_cast<uint8_t>(which)));
    entries.push_back(sent(tensors.back(), sender));
    departing.add(entries.back().get());
  }
  departing.notice_gone();
  EXPECT_EQ(departing.size(), kAll);
  EXPECT_EQ(ledger.counters.freed_bytes, 0);
  for (const size_t gone : {size_t{2}, size_t{3}, kAll - 1}) {
    tensors[gone].reset();
  }
  departing.notice_gone(/*looks=*/1);
  EXPECT_EQ(departing.size(), kAll - 1) << "what was sent last is gone, and was not looked at; or "
                                           "more were looked at than was asked for";
  departing.notice_gone();
  EXPECT_EQ(departing.size(), kAll - 3);
  EXPECT_EQ(ledger.counters.freed_bytes, 3 * kStorageBytes);
  EXPECT_EQ(entries[0]->state(), State::kLeaving);
}

TEST_F(Entries, SendsAreLookedAtInTheirOrderAndTheFirstThatRunsEndsTheLook) {
  Departing departing;
  BlockSender second(std::make_shared<WorkerLane>(0, kPoolBytes), pool);
  const at::Tensor one = full_of(1), other = full_of(2);
  EntryPtr running = sent(one, sender, /*wait=*/false), ended = sent(other, second);
  departing.add(running.get());
  departing.add(ended.get());
  departing.notice_gone(/*looks=*/0);
  EXPECT_EQ(departing.size(), 2u);
  running->departure()->wait();
  departing.notice_gone(/*looks=*/0);
  ended.reset();
  EXPECT_EQ(departing.size(), 1u) << "one that is dead still departs";
  running.reset();
  EXPECT_EQ(departing.size(), 0u);
}

TEST_F(Entries, EntriesDoNotNeedTheRowsThatTheyAreIn) {
  const at::Tensor tensor = full_of(1);
  EntryPtr entry = sent(tensor, sender, /*wait=*/false);
  {
    Departing departing;
    departing.add(entry.get());
  }
  EXPECT_EQ(entry->place_in_list().list, nullptr);
  entry.reset();
}

// --- what is counted ---

TEST(Counts, PeaksAreTheHighestNotTheLast) {
  Counters counters;
  for (const int64_t change : {100, 50, -120, 30}) {
    counters.resident(change);
    counters.away(2 * change);
  }
  EXPECT_EQ(counters.resident_bytes, 60);
  EXPECT_EQ(counters.peak_resident_bytes, 150);
  EXPECT_EQ(counters.away_bytes, 120);
  EXPECT_EQ(counters.peak_away_bytes, 300);
}

TEST(Counts, CountingAnewBeginsWithWhatIsAlive) {
  Ledger ledger;
  ledger.counters.resident(100);
  ledger.counters.resident(-60);
  ledger.counters.away(70);
  ledger.counters.stalls = 3;
  ledger.counters.exposed_wait_s = 5;
  ledger.keep("small", 10);
  ledger.reset();
  EXPECT_EQ(ledger.counters.resident_bytes, 40);
  EXPECT_EQ(ledger.counters.peak_resident_bytes, 40);
  EXPECT_EQ(ledger.counters.peak_away_bytes, 70);
  EXPECT_EQ(ledger.counters.stalls, 0);
  EXPECT_EQ(ledger.counters.exposed_wait_s, 0);
  EXPECT_TRUE(ledger.kept().empty());
}

// --- what handles and recipes hold ---

TEST_F(Entries, ASavedTensorIsTheSameTensorAgainWhereverItsBytesWere) {
  at::Tensor tensor = full_of(9);
  const SavedTensor moved = SavedTensor::moved(sent(tensor, sender), look_at(tensor));
  const SavedTensor kept = SavedTensor::kept(without_graph(tensor), 0, nullptr);
  EXPECT_TRUE(kept.unpack().is_alias_of(tensor));
  EXPECT_TRUE(moved.unpack().is_alias_of(tensor)) << "somebody held it: nothing has to come back";
  tensor.reset();
  EXPECT_TRUE(moved.unpack().equal(full_of(9)));
  EXPECT_EQ(moved.stays(), false);
  EXPECT_EQ(kept.stays(), true);
}

TEST_F(Entries, AnEditAfterTheSaveIsNoticedWhereverTheBytesAre) {
  at::Tensor tensor = full_of(1);
  const SavedTensor moved = SavedTensor::moved(sent(tensor, sender), look_at(tensor));
  const SavedTensor kept = SavedTensor::kept(without_graph(tensor), 0, nullptr);
  tensor.add_(1);
  for (const SavedTensor* saved : {&moved, &kept}) {
    try {
      saved->unpack();
      FAIL() << "an edited tensor was taken for what was saved";
    } catch (const EditedInPlace& edit) {
      EXPECT_EQ(edit.version, 1u);
      EXPECT_EQ(edit.expected_version, 0u);
      EXPECT_NE(std::string(edit.what()).find("[100] on cpu"), std::string::npos) << edit.what();
    }
  }
}

TEST(SavedTensors, ALeafIsKeptItselfAndOthersWithoutTheirGraph) {
  const at::Tensor leaf = at::ones({2}).requires_grad_();
  EXPECT_TRUE(without_graph(leaf).is_same(leaf));
  const at::Tensor made = leaf.exp();
  EXPECT_FALSE(without_graph(made).requires_grad());
  EXPECT_TRUE(without_graph(made).is_alias_of(made));
}

}  // namespace
}  // namespace memswap
