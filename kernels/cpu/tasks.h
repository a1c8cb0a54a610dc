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
inline size_t tasks_for(const memswap_launch& launch, uint64_t chunks) {
  if (launch.parallel_for == nullptr) {
    return 1;
  }
  return static_cast<size_t>(
      std::clamp<uint64_t>(launch.max_processors, 1, std::max<uint64_t>(chunks, 1)));
}

// Hands out 0 .. chunks - 1 in order. Whoever holds a chunk is running, so waiting for the holder
// of an earlier one ends, on any number of threads and also where tasks run one after another.
class ChunkQueue {
 public:
  explicit ChunkQueue(uint64_t chunks) : chunks_(chunks) {}

  bool take(uint64_t* chunk) {
    *chunk = next_.fetch_add(1, std::memory_order_relaxed);
    return *chunk < chunks_;
  }

 private:
  std::atomic<uint64_t> next_{0};
  const uint64_t chunks_;
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

// Starts a Frame for each job and calls code(frame, chunk, workspace) for every chunk of them all,
// with a workspace for each task. Returns the frames when all is done; nullptr if there was no
// memory, and then nothing was done.
template <typename Frame, typename Workspace, typename Job, typename Code>
std::unique_ptr<Frame[]> run_frames(const BlockCodec& blocks, const Job* jobs, size_t count,
                                    const memswap_launch& launch, Code code) {
  std::unique_ptr<Frame[]> frames(new (std::nothrow) Frame[count]);
  if (frames == nullptr) {
    return nullptr;
  }
  uint64_t chunks = 0;
  for (size_t i = 0; i < count; ++i) {
    frames[i].start(blocks, jobs[i]);
    chunks += frames[i].chunks();
  }
  const size_t tasks = tasks_for(launch, chunks);
  const std::unique_ptr<Workspace[]> workspaces(new (std::nothrow) Workspace[tasks]);
  if (workspaces == nullptr) {
    return nullptr;
  }
  ChunkQueue queue(chunks);
  auto work = [&](size_t task) {
    size_t current = 0;
    uint64_t first_chunk = 0;
    for (uint64_t chunk; queue.take(&chunk);) {
      for (; chunk - first_chunk >= frames[current].chunks(); ++current) {
        first_chunk += frames[current].chunks();
      }
      code(frames[current], static_cast<uint32_t>(chunk - first_chunk), workspaces[task]);
    }
    blocks.fence();
  };
  run_tasks(launch, tasks, work);
  return frames;
}

}  // namespace memswap::cpu
