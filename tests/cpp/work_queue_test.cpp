#include "work/work_queue.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <fstream>
#include <functional>
#include <future>
#include <random>
#include <thread>
#include <vector>

namespace memswap {
namespace {

class Task final : public Work {
 public:
  explicit Task(std::function<void()> what) : what_(std::move(what)) {}

 private:
  void run() noexcept override { what_(); }
  std::function<void()> what_;
};

std::shared_ptr<Task> submit(WorkQueue& queue, std::function<void()> what) {
  auto task = std::make_shared<Task>(std::move(what));
  queue.submit(task);
  return task;
}

TEST(WorkQueue, OneWorkerKeepsTheOrder) {
  WorkQueue queue(1);
  std::vector<int> order;
  std::promise<void> last;  // nobody waits for the work itself: that would help the worker
  for (int i = 0; i < 100; ++i) {
    submit(queue, [&order, i] { order.push_back(i); });
  }
  submit(queue, [&last] { last.set_value(); });
  last.get_future().wait();
  ASSERT_EQ(order.size(), 100U);
  EXPECT_TRUE(std::ranges::is_sorted(order));
}

TEST(WorkQueue, WhoWaitsWorksAndPassesTheQueue) {
  WorkQueue queue(0);
  bool first = false;
  const auto one = submit(queue, [&] { first = true; });
  bool second = false;
  const auto two = submit(queue, [&] { second = true; });
  queue.finish(*two);
  EXPECT_TRUE(second);
  EXPECT_TRUE(two->ended());
  EXPECT_FALSE(first) << "what nobody waits for went before what somebody waits for";
  queue.drain();
  EXPECT_TRUE(one->ended());
}

TEST(WorkQueue, WhatIsQueuedIsFinishedAndWhatRunsIsNotWaitedFor) {
  std::promise<void> begun, go_on;  // outlive the queue, which waits for who uses them
  WorkQueue queue(1);
  const auto running = submit(queue, [&] {
    begun.set_value();
    go_on.get_future().wait();
  });
  bool ran = false;
  const auto queued = submit(queue, [&] { ran = true; });
  begun.get_future().wait();
  queue.finish_if_queued(*running);  // or nobody would go on
  EXPECT_FALSE(running->ended());
  queue.finish_if_queued(*queued);
  EXPECT_TRUE(ran && queued->ended());
  go_on.set_value();
}

TEST(WorkQueue, WorkWaitsForEarlierWorkWithoutDeadlock) {
  for (const size_t workers : {0U, 1U, 2U, 4U}) {
    WorkQueue queue(workers);
    std::mt19937 random(static_cast<unsigned>(workers));
    std::vector<std::shared_ptr<Task>> tasks;
    std::vector<std::unique_ptr<std::atomic<int>>> runs;
    std::atomic<int> out_of_order = 0;
    for (int i = 0; i < 500; ++i) {
      auto earlier = tasks.empty() ? nullptr : tasks[random() % tasks.size()];
      runs.push_back(std::make_unique<std::atomic<int>>(0));
      tasks.push_back(submit(queue, [&, earlier, counter = runs.back().get()] {
        if (earlier) {
          queue.finish(*earlier);
          out_of_order += !earlier->ended();
        }
        ++*counter;
      }));
    }
    std::vector<std::thread> waiters;
    for (unsigned seed = 0; seed < 3; ++seed) {
      waiters.emplace_back([&, seed] {
        std::mt19937 pick(seed);
        for (int i = 0; i < 300; ++i) {
          queue.finish(*tasks[pick() % tasks.size()]);
        }
      });
    }
    for (auto& waiter : waiters) {
      waiter.join();
    }
    queue.stop();
    EXPECT_EQ(out_of_order, 0);
    for (const auto& counter : runs) {
      ASSERT_EQ(*counter, 1) << "work ran twice or never, " << workers << " workers";
    }
  }
}

TEST(WorkQueue, DropsWorkOnceItHasEnded) {
  WorkQueue queue(1);
  auto owned = std::make_shared<int>(1);
  const std::weak_ptr<int> seen = owned;
  submit(queue, [owned = std::move(owned)] { (void)*owned; });
  queue.stop();
  EXPECT_TRUE(seen.expired()) << "the queue kept work that had ended";
}

TEST(WorkQueue, TheDestructorDrains) {
  std::atomic<int> ran = 0;
  {
    WorkQueue queue(2);
    for (int i = 0; i < 50; ++i) {
      submit(queue, [&] { ++ran; });
    }
  }
  EXPECT_EQ(ran, 50);
}

TEST(WorkQueue, AfterStopWaitersDoTheWork) {
  WorkQueue queue(2);
  queue.stop();
  bool ran = false;
  const auto task = submit(queue, [&] { ran = true; });
  queue.finish(*task);
  EXPECT_TRUE(ran);
  queue.stop();
}

// A limit under which the system gives some threads and then no more.
class FewThreads {
 public:
  FewThreads() {
    pthread_attr_init(&before_);
    pthread_getattr_default_np(&before_);
    pthread_attr_t large;
    pthread_attr_init(&large);
    pthread_attr_setstacksize(&large, kStackBytes);
    pthread_setattr_default_np(&large);
    pthread_attr_destroy(&large);
    getrlimit(RLIMIT_AS, &limit_);
    size_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    const rlimit low = {pages * static_cast<size_t>(sysconf(_SC_PAGESIZE)) + 5 * kStackBytes / 2,
                        limit_.rlim_max};
    setrlimit(RLIMIT_AS, &low);
  }
  ~FewThreads() {
    setrlimit(RLIMIT_AS, &limit_);
    pthread_setattr_default_np(&before_);
    pthread_attr_destroy(&before_);
  }

 private:
  static constexpr size_t kStackBytes = size_t{1} << 32;
  pthread_attr_t before_{};
  rlimit limit_{};
};

TEST(WorkQueue, SystemThatGivesFewerThreadsEndsNothing) {
  const FewThreads few;
  std::atomic<int> done = 0;
  {
    WorkQueue queue(16);  // the process would end here
    const auto waited = submit(queue, [&] { ++done; });
    queue.finish(*waited);
    for (int i = 0; i < 10; ++i) {
      submit(queue, [&] { ++done; });
    }
  }
  EXPECT_EQ(done, 11) << "work was lost with the threads that the system did not give";
}

// What a storage's finalizer may do: drop what owns the queue, on a worker.
void drop_in_work(size_t workers) {
  auto* const owner = new std::shared_ptr<WorkQueue>(std::make_shared<WorkQueue>(workers));
  const std::weak_ptr<WorkQueue> alive = *owner;
  // The workers outlive this, so they share what they use.
  const auto submitted = std::make_shared<std::promise<void>>();
  const auto dropped = std::make_shared<std::promise<void>>();
  const auto last = std::make_shared<std::promise<void>>();
  submit(**owner, [owner, submitted, dropped] {
    submitted->get_future().wait();
    delete owner;
    dropped->set_value();
  });
  submit(**owner, [last] { last->set_value(); });
  submitted->set_value();
  const auto soon = std::chrono::seconds(10);
  ASSERT_EQ(dropped->get_future().wait_for(soon), std::future_status::ready)
      << "work that drops its own queue waits for itself";
  EXPECT_TRUE(alive.expired());
  EXPECT_EQ(last->get_future().wait_for(soon), std::future_status::ready)
      << "what was queued behind it is lost";
}

TEST(WorkQueue, DroppedByItsOwnWorkOnAWorker) {
  drop_in_work(1);
  drop_in_work(3);
}

TEST(WorkQueue, DroppedByWorkThatAWaitingThreadDoes) {
  auto* const owner = new std::shared_ptr<WorkQueue>(std::make_shared<WorkQueue>(0));
  WorkQueue* const queue = owner->get();
  const auto first = submit(*queue, [owner] { delete owner; });
  queue->finish(*first);
  EXPECT_TRUE(first->ended());
}

}  // namespace
}  // namespace memswap
