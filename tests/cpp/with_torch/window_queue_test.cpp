// WindowQueue: which encodes and decodes start in which window, and what becomes of the others.
#include "engine/window_queue.h"

#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "engine/iteration.h"

namespace memswap {
namespace {

constexpr double kRate = 1e9;  // bytes per second: a megabyte takes a millisecond
constexpr int64_t kMb = 1'000'000;
using Log = std::vector<std::string>;

c10::Stream stream(int64_t number) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kCPU), number);
}

class NamedTicket final : public Ticket {
 public:
  NamedTicket(std::string name, Log& log) : name_(std::move(name)), log_(log) {}
  void wait() override { log_.push_back("join " + name_); }
  bool done() override { return true; }
  void synchronize() override {}

 private:
  const std::string name_;
  Log& log_;
};

class FakeEngine final : public WindowQueue::Work {
 public:
  TicketPtr start(const PendingEncode& pending) override {
    if (broken) {
      throw std::runtime_error("the driver is gone");
    }
    if (full) {
      return nullptr;
    }
    log.push_back(pending.order.key.unit);
    return std::make_shared<NamedTicket>(pending.order.key.unit, log);
  }
  Ahead fetch(const EntryPtr& entry) override {
    log.push_back("fetch " + std::to_string(entry->nbytes() / kMb));
    if (!memory) {
      return Ahead::kNoMemory;
    }
    return away.contains(entry.get()) ? Ahead::kFetches : Ahead::kNothing;
  }
  bool on_stream(const c10::Stream& one) override { return one == stream(current); }

  int64_t current = 0;
  bool full = false, broken = false, memory = true;
  Log log;
  std::set<const Entry*> away;
};

class WindowQueues : public ::testing::Test {
 protected:
  WindowQueues() { queue.encode_rate = queue.decode_rate = kRate; }

  EntryPtr entry(int64_t megabytes) {
    const at::Tensor tensor = at::empty({megabytes * kMb}, at::kByte);
    const SavedView view = *SavedView::capture(tensor);
    engine->iteration()->admit(megabytes * kMb, true, Iteration::kNoGroup);
    return engine->make_entry(view, StorageRef(tensor.storage()));
  }

  void defer(const std::string& name, int64_t megabytes, double gain = 0.5, int64_t on = 0) {
    entries[name] = entry(megabytes);
    queue.defer({.entry = entries[name],
                 .nbytes = megabytes * kMb,
                 .gain = gain,
                 .stream = stream(on),
                 .order = {.key = {.unit = name}},
                 .expectation = {}});
  }

  std::vector<EntryPtr> wanted(const std::vector<int64_t>& megabytes) {
    std::vector<EntryPtr> made;
    for (const int64_t each : megabytes) {
      made.push_back(entry(each));
      work.away.insert(made.back().get());
    }
    return made;
  }

  // What a window starts and joins.
  Log open(double milliseconds) {
    work.log.clear();
    queue.open(milliseconds * 1e-3);
    return work.log;
  }

  EnginePtr engine = std::make_shared<Engine>(0);
  FakeEngine work;
  WindowQueue queue{work};
  std::map<std::string, EntryPtr> entries;
};

TEST_F(WindowQueues, AWindowTakesWhatFitsItsOperatorAndLaterOnesTakeTheRest) {
  for (const char* const name : {"a", "b", "c", "d"}) {
    defer(name, 1);
  }
  EXPECT_EQ(open(2.5), (Log{"a", "b"}));
  EXPECT_EQ(open(1), (Log{"join a", "join b", "c"}));
  EXPECT_EQ(open(5), (Log{"join c", "d"}));
  EXPECT_EQ(queue.counts.encoded_in_windows, 4);
  EXPECT_EQ(queue.pending_bytes(), 0);
}

TEST_F(WindowQueues, WhatDoesNotFitLeavesTheRoomToWhatDoes) {
  defer("large", 3);
  defer("small", 1);
  EXPECT_EQ(open(2), Log{"small"});
}

TEST_F(WindowQueues, WhatIsLongerThanEveryWindowStartsOnceItHasWaitedSoLong) {
  defer("large", 3);
  EXPECT_EQ(open(2), Log{});
  EXPECT_EQ(open(2), Log{});
  EXPECT_EQ(open(2), Log{"large"});
  EXPECT_EQ(open(2), Log{});
  EXPECT_EQ(open(2), Log{"join large"}) << "two windows later it has ended";
}

TEST_F(WindowQueues, WhatFreesMostForItsTimeGoesFirstAndTiesInTheOrderOfSaving) {
  defer("activation", 1, 0.3);
  defer("another", 1, 0.3);
  defer("mask", 1, 0.9);
  defer("indices", 1, 0.7);
  EXPECT_EQ(open(3), (Log{"mask", "indices", "activation"}));
  EXPECT_EQ(open(1).back(), "another");
}

TEST_F(WindowQueues, TheLaneIsNotGivenMoreThanItCanEnd) {
  defer("a", 2);
  defer("b", 2);
  EXPECT_EQ(open(3), Log{"a"});
  EXPECT_EQ(open(1), (Log{"join a", "b"})) << "it has waited long enough to outlast a window";
  EXPECT_EQ(open(0.5), Log{});
  EXPECT_EQ(open(0.5), Log{}) << "it should end with this window";
  EXPECT_EQ(open(1), Log{"join b"});
}

TEST_F(WindowQueues, AnEncodeIsJoinedOnlyWhenItShouldHaveEnded) {
  defer("a", 2);
  open(2);
  queue.close();
  EXPECT_EQ(work.log, (Log{"a", "join a"}));
}

TEST_F(WindowQueues, AWindowWithoutAKnownDurationStartsNothing) {
  defer("a", 1);
  EXPECT_EQ(open(0), Log{});
  EXPECT_EQ(queue.counts.windows, 1);
}

TEST_F(WindowQueues, AnEncodeStartsOnlyOnTheStreamOfItsTensor) {
  defer("here", 1);
  defer("there", 1, 0.5, /*on=*/1);
  EXPECT_EQ(open(5), Log{"here"});
  work.current = 1;
  EXPECT_EQ(open(5), Log{"there"}) << "nor is `here` joined from another stream";
  work.current = 0;
  EXPECT_EQ(open(5), Log{"join here"});
}

TEST_F(WindowQueues, WhatIsStartedNowIsWhatWasAskedFor) {
  defer("another", 1);
  defer("there", 1, 0.5, /*on=*/1);
  defer("here", 1);
  queue.start_now({entries["there"]});
  EXPECT_EQ(work.log, Log{}) << "it belongs on another stream, and nothing takes its place";
  queue.start_now({entries["here"]});
  EXPECT_EQ(work.log, Log{"here"});
  EXPECT_EQ(queue.pending(), (std::vector{entries["another"], entries["there"]}));
  EXPECT_EQ(queue.pending_bytes(), 2 * kMb);
}

TEST_F(WindowQueues, ADecodeWithoutMemoryIsTriedAgain) {
  work.memory = false;
  const std::vector<EntryPtr> both = wanted({1, 2});
  queue.want(both, /*prefetch_bytes=*/0);
  EXPECT_EQ(work.log, Log{"fetch 1"}) << "what comes after it has to wait as well";
  EXPECT_EQ(open(5), Log{"fetch 1"});
  work.memory = true;
  EXPECT_EQ(open(5), (Log{"fetch 1", "fetch 2"}));
  EXPECT_EQ(queue.counts.decoded_in_windows, 2);
}

TEST_F(WindowQueues, NothingStartsOnceItsBackwardHasBegun) {
  defer("a", 1);
  engine->iteration()->demand(0);
  queue.begin_backward();
  EXPECT_EQ(open(5), Log{});
  EXPECT_EQ(queue.counts.kept_storages, 1);
  EXPECT_EQ(queue.counts.kept_bytes, kMb);
  EXPECT_EQ(queue.pending_bytes(), 0);
}

TEST_F(WindowQueues, WhatIsUnderWayIsJoinedWhenBackwardBegins) {
  defer("a", 1);
  open(1);
  queue.begin_backward();
  EXPECT_EQ(work.log, (Log{"a", "join a"}));
}

TEST_F(WindowQueues, AnEntryThatDiedIsForgotten) {
  defer("a", 1);
  entries.clear();
  EXPECT_EQ(open(5), Log{});
  EXPECT_EQ(queue.pending_bytes(), 0);
  EXPECT_EQ(queue.counts.kept_storages, 0);
}

TEST_F(WindowQueues, NoRoomWhenAnEncodeStartsKeepsTheStorage) {
  defer("a", 1);
  work.full = true;
  EXPECT_EQ(open(5), Log{});
  EXPECT_EQ(queue.counts.kept_storages, 1);
}

TEST_F(WindowQueues, BeyondTheBoundEncodesStartWithoutAWindow) {
  queue.max_pending_bytes = 2 * kMb;
  for (const char* const name : {"a", "b", "c"}) {
    defer(name, 1);
  }
  EXPECT_EQ(work.log, Log{"a"});
  EXPECT_EQ(queue.counts.started_at_bound, 1);
  EXPECT_EQ(queue.pending_bytes(), 2 * kMb);
}

TEST_F(WindowQueues, AnAutomaticBoundIsAnEighthOfAForward) {
  constexpr int64_t kMost = WindowQueue::kLeastPendingBytes / kMb;
  for (int i = 0; i < 16; ++i) {
    defer("first " + std::to_string(i), kMost);
  }
  queue.begin_iteration();
  queue.end_forward();
  work.log.clear();
  for (int i = 0; i < 4; ++i) {
    defer("second " + std::to_string(i), kMost);
  }
  EXPECT_EQ(work.log, (Log{"second 0", "second 1"})) << "two of sixteen may wait";
}

TEST_F(WindowQueues, WhatWaitsAtTheEndOfAForwardStarts) {
  defer("a", 1);
  queue.end_forward();
  EXPECT_EQ(work.log, Log{"a"});
  EXPECT_EQ(queue.counts.started_at_end, 1);
}

TEST_F(WindowQueues, WhatWaitsAtTheEndOfAForwardMayGoOnWaiting) {
  queue.leftovers_start = false;
  defer("a", 1);
  queue.end_forward();
  EXPECT_EQ(work.log, Log{});
  EXPECT_EQ(queue.counts.started_at_end, 0);
  EXPECT_EQ(open(5), Log{"a"});
}

TEST_F(WindowQueues, AnEncodeThatRaisesLosesNoOther) {
  for (const char* const name : {"a", "b", "c"}) {
    defer(name, 1);
  }
  work.broken = true;
  EXPECT_THROW(open(5), std::runtime_error);
  work.broken = false;
  EXPECT_EQ(open(5), (Log{"b", "c"}));
}

TEST_F(WindowQueues, WhatIsAskedForStartsInNoWindowAndTheOthersKeepTheirOrder) {
  for (const char* const name : {"a", "b", "c"}) {
    defer(name, 1);
  }
  queue.start_now({entries["c"]});
  EXPECT_EQ(work.log, Log{"c"});
  EXPECT_EQ(queue.pending(), (std::vector<EntryPtr>{entries["a"], entries["b"]}));
}

TEST_F(WindowQueues, DecodesRunInWindowsInTheOrderOfDemand) {
  const auto soon = wanted({1, 2, 3});
  queue.want(soon, 100 * kMb);
  EXPECT_EQ(open(3), (Log{"fetch 1", "fetch 2"}));
  EXPECT_EQ(open(3), Log{"fetch 3"});
  EXPECT_EQ(queue.counts.decoded_in_windows, 3);
}

TEST_F(WindowQueues, DecodesComeBeforeEncodes) {
  defer("a", 1);
  const auto soon = wanted({1});
  queue.want(soon, 100 * kMb);
  EXPECT_EQ(open(1), Log{"fetch 1"});
}

TEST_F(WindowQueues, HalfOfThePrefetchWindowMayWaitAndTheRestStartsAtOnce) {
  const auto soon = wanted({2, 3});
  queue.want(soon, 8 * kMb);
  EXPECT_EQ(work.log, Log{"fetch 2"});
  EXPECT_EQ(queue.counts.decoded_ahead, 1);
}

TEST_F(WindowQueues, WhatCameBackByItselfCostsNoTime) {
  const auto soon = wanted({2, 2});
  work.away.erase(soon[0].get());
  queue.want(soon, 100 * kMb);
  EXPECT_EQ(open(2), (Log{"fetch 2", "fetch 2"}));
  EXPECT_EQ(queue.counts.decoded_in_windows, 1);
}

TEST_F(WindowQueues, WhatWasDemandedBeforeItsWindowIsNotBroughtBackAgain) {
  const auto soon = wanted({1, 2});
  queue.want(soon, 100 * kMb);
  engine->iteration()->demand(soon[0]->index());
  EXPECT_EQ(open(5), Log{"fetch 2"});
}

}  // namespace
}  // namespace memswap
