// Chunks of tiles, dealt out to the tasks of one call.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <new>

#include "block.h"
#include "memswap/codec.h"
#include "memswap/frame.h"

namespace memswap::cpu {

// Uncompressed bytes that a task takes at once: small enough for its caches, large enough that
// taking it costs nothing.
inline constexpr uint32_t kChunkBytes = 64 * 1024;

constexpr uint32_t tiles_per_chunk(uint32_t width) {
  return kChunkBytes / (frame::kTileElements * width);
}

constexpr uint32_t chunks_of(uint32_t tiles, uint32_t tiles_per_chunk) {
  return (tiles + tiles_per_chunk - 1) / tiles_per_chunk;
}

// How many tasks a call with so many chunks asks parallel_for for.
inline size_t tasks_for(const memswap_launch& launch, uint32_t chunks) {
  if (launch.parallel_for == nullptr) {
    return 1;
  }
  return std::clamp<uint32_t>(launch.max_processors, 1, std::max<uint32_t>(chunks, 1));
}

// Hands out 0 .. chunks - 1 in order. Whoever holds a chunk is running, so waiting for the holder
// of an earlier one ends, on any number of threads and also where tasks run one after another.
class ChunkQueue {
 public:
  explicit ChunkQueue(uint32_t chunks) : chunks_(chunks) {}

  bool take(uint32_t* chunk) {
    const uint64_t next = next_.fetch_add(1, std::memory_order_relaxed);
    *chunk = static_cast<uint32_t>(next);
    return next < chunks_;
  }

 private:
  std::atomic<uint64_t> next_{0};  // every task takes one more than there are
  const uint32_t chunks_;
};

// Calls work(task) for 0 .. tasks - 1 and returns when all have.
template <typename Work>
void run_tasks(const memswap_launch& launch, size_t tasks, Work& work) {
  if (tasks == 1) {
    work(0);
    return;
  }
  launch.parallel_for(
      launch.pool, tasks, [](void* context, size_t task) { (*static_cast<Work*>(context))(task); },
      &work);
}

// Calls code(chunk, workspace) for 0 .. chunks - 1, with a workspace for each task, and returns
// when all is done; false if there was no memory, and then nothing was done.
template <typename Workspace, typename Code>
bool run_chunks(const BlockCodec& blocks, uint32_t chunks, const memswap_launch& launch,
                Code code) {
  const size_t tasks = tasks_for(launch, chunks);
  const std::unique_ptr<Workspace[]> workspaces(new (std::nothrow) Workspace[tasks]);
  if (workspaces == nullptr) {
    return false;
  }
  ChunkQueue queue(chunks);
  auto work = [&](size_t task) {
    for (uint32_t chunk; queue.take(&chunk);) {
      code(chunk, workspaces[task]);
    }
    blocks.fence();
  };
  run_tasks(launch, tasks, work);
  return true;
}

}  // namespace memswap::cpu
