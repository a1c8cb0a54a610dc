#include "parallel.h"

#include <torch/csrc/stable/c/shim.h>

#include <exception>

namespace memswap {
namespace {

struct Tasks {
  void (*task)(void* context, size_t i);
  void* context;
};

void run_range(int64_t begin, int64_t end, void* tasks) {
  const auto* known = static_cast<const Tasks*>(tasks);
  for (int64_t i = begin; i < end; ++i) {
    known->task(known->context, static_cast<size_t>(i));
  }
}

// Through torch's library, not its header: the header's template would need OpenMP in this library,
// and a second OpenMP runtime beside torch's has threads of its own.
void parallel_for(void*, size_t count, void (*task)(void*, size_t), void* context) {
  Tasks tasks{task, context};
  if (torch_parallel_for(0, static_cast<int64_t>(count), 1, &run_range, &tasks) != 0) {
    std::terminate();  // tasks throw nothing and torch has nothing to refuse
  }
}

}  // namespace

memswap_launch on_torch_threads() {
  uint32_t threads = 1;
  torch_get_num_threads(&threads);
  memswap_launch launch{};
  launch.max_processors = threads;
  launch.parallel_for = &parallel_for;
  return launch;
}

}  // namespace memswap
