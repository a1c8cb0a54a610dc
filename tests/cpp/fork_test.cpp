// A child that was forked has none of its parent's threads, and may have threads of its own.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <memory>

#include "fakes.h"
#include "pool/pool.h"
#include "work/work_queue.h"

namespace memswap {
namespace {

#if defined(__SANITIZE_THREAD__)
constexpr bool kForks = false;  // ThreadSanitizer ends a forked child that starts a thread
#else
constexpr bool kForks = true;
#endif

// The exit status of a child that does this; a hang is ended by a signal.
int in_a_child(const std::function<void()>& what) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    what();
    _exit(0);
  }
  int status = -1;
  waitpid(child, &status, 0);
  return status;
}

// The C library gives a child's threads the memory, and so the names, of those it did not inherit.
TEST(Fork, AnInheritedQueueIsDroppedWithoutHarmToTheChildsOwn) {
  if (!kForks) {
    GTEST_SKIP() << "not under ThreadSanitizer";
  }
  auto inherited = std::make_unique<WorkQueue>(2);
  EXPECT_EQ(in_a_child([&] {
              const WorkQueue own(2);
              inherited.reset();
            }),
            0);
}

TEST(Fork, AnInheritedPoolIsDroppedWithoutHarmToTheChildsThreads) {
  if (!kForks) {
    GTEST_SKIP() << "not under ThreadSanitizer";
  }
  PoolOptions options;
  options.grow_ahead_bytes = 1;
  auto inherited = std::make_unique<Pool>(std::make_shared<testing::FakeSlabs>(), options);
  EXPECT_EQ(in_a_child([&] {
              const WorkQueue own(1);
              inherited.reset();
            }),
            0);
}

}  // namespace
}  // namespace memswap
