// Several tasks in a call, in any order: always the same bytes.
#include <thread>

#include "support.h"

namespace memswap::test {
namespace {

using Task = void (*)(void* context, size_t i);

void on_threads(void*, size_t count, Task task, void* context) {
  std::vector<std::thread> threads;
  for (size_t i = 0; i < count; ++i) {
    threads.emplace_back([=] { task(context, i); });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

void one_after_another(void*, size_t count, Task task, void* context) {
  for (size_t i = 0; i < count; ++i) {
    task(context, i);
  }
}

void last_one_first(void*, size_t count, Task task, void* context) {
  for (size_t i = count; i-- > 0;) {
    task(context, i);
  }
}

class Tasks : public CpuCodecTest {
 protected:
  static memswap_launch launch(memswap_parallel_for parallel_for, uint32_t tasks) {
    memswap_launch launch{};
    launch.parallel_for = parallel_for;
    launch.max_processors = tasks;
    return launch;
  }
};

TEST_P(Tasks, FramesAreOrderedHoweverTheTasksRun) {
  std::vector<Tensor> tensors;
  for (const uint64_t elements : {300000, 0, 5, 8192, 1000000, 1}) {
    tensors.emplace_back(Pattern{Kind::kMixed, 0}, Dtype::kBf16, elements, elements);
  }
  tensors.emplace_back(Pattern{Kind::kMixed, 0}, Dtype::kFp64, 4, 100000);
  for (const Tensor& tensor : tensors) {
    SCOPED_TRACE(tensor.elements);
    const Frame expected = encode(codec(), tensor, {});
    for (const auto parallel_for : {on_threads, one_after_another, last_one_first}) {
      for (const uint32_t tasks : {0u, 1u, 2u, 5u, 16u, 1000u}) {
        SCOPED_TRACE(tasks);
        const memswap_launch where = launch(parallel_for, tasks);
        const Frame frame = encode(codec(), tensor, {.launch = where});
        ASSERT_TRUE(frame.bytes == expected.bytes) << "another frame";
        Tensor output(tensor.dtype, tensor.elements);
        EXPECT_EQ(decode(codec(), frame, &output, where), frame::kOk);
        EXPECT_TRUE(output.buffer == tensor.buffer) << "another tensor";
      }
    }
  }
}

TEST_P(Tasks, ThreadsShareAnOverflowArena) {
  const Tensor tensor({Kind::kOutliers, 9}, Dtype::kBf16, 1, 400000);
  const uint64_t needed = encode(codec(), tensor, {}).header().var_used;
  const Frame frame = encode(
      codec(), tensor,
      {.var_capacity = needed / 2, .overflow_capacity = needed, .launch = launch(on_threads, 4)});
  EXPECT_EQ(frame.header().status, frame::kOk);
  expect_round_trip(codec(), frame, tensor);
}

MEMSWAP_FOR_EACH_INSTRUCTION_SET(Tasks);

}  // namespace
}  // namespace memswap::test
