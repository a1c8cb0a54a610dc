// The device allocator: stream-ordered, caching, with the most aggressive reuse.
#include <algorithm>
#include <cstring>

#include "machine.h"

namespace simdev {
namespace {

constexpr size_t kGranularityBytes = 512;  // CUDA's caching allocator rounds to this as well

size_t round_up(size_t bytes) {
  return (bytes + kGranularityBytes - 1) / kGranularityBytes * kGranularityBytes;
}

// [Note: frees]
// Reuse of a freed block is ordered by its stream only. So a free is a write by that stream, at
// its present end, after everything the host knows and after the uses that record_stream announced:
// any other task that touched the block and is not ordered before that is a race.
void finish_free(Machine& machine, Block& block) {
  Stream& stream = machine.scheduler.stream(block.stream);
  stream.clock.join(machine.host_clock);
  if (machine.detector.on()) {
    VectorClock known = stream.clock;
    for (const auto& use : block.pending_uses) known.join(use->clock);
    const Access access{stream.slot, known[stream.slot], "free", machine.scheduler.enqueued()};
    machine.detector.check(block.accesses, block.bytes, block.whole(true), access, known, true);
  }
  block.pending_uses.clear();
  block.accesses.clear();
  const auto fill = [pointer = block.pointer(), bytes = block.bytes] {
    std::memset(pointer, kPoison, bytes);
  };
  if (machine.scheduler.runs_at_once(stream)) {
    fill();
  } else {  // pushed only: a destructor is no place to run tasks
    machine.scheduler.push(stream, "poison", nullptr, make_work(fill));
    machine.scheduler.wake_workers();
  }
  machine.device(block.stream.device)
      .free_lists[{block.stream.index, block.bytes}]
      .push_back(&block);
}

void finish_deferred(Machine& machine, DeviceMemory& memory) {
  if (memory.deferred.empty()) return;
  std::erase_if(memory.deferred, [&](Block* block) {
    for (const auto& use : block->pending_uses)
      if (!machine.scheduler.complete(*use)) return false;
    --memory.stats.deferred;
    finish_free(machine, *block);
    return true;
  });
}

Block* take_cached(DeviceMemory& memory, StreamId stream, size_t bytes) {
  auto list = memory.free_lists.find({stream.index, bytes});
  if (list == memory.free_lists.end() || list->second.empty()) return nullptr;
  Block* block = list->second.back();
  list->second.pop_back();
  return block;
}

void flush_cache(Machine& machine, Scheduler::Lock& lock, int device) {
  DeviceMemory& memory = machine.device(device);
  machine.synchronize_device(lock, device);
  finish_deferred(machine, memory);
  machine.synchronize_device(lock, device);  // the poison of what was deferred
  // The lock was released while the host waited, and a block freed since then still has its poison
  // queued. Such a block stays in the cache.
  for (auto& [key, list] : memory.free_lists) {
    const Stream& stream = machine.scheduler.stream({device, key.first});
    if (stream.done != stream.issued) continue;
    for (Block* block : list) {
      memory.stats.reserved -= block->bytes;
      machine.blocks.unmap(*block);
    }
    list.clear();
  }
  std::erase_if(memory.free_lists, [](const auto& list) { return list.second.empty(); });
}

}  // namespace

void* device_allocate(StreamId id, size_t requested) {
  if (requested == 0) return nullptr;
  Machine& machine = Machine::get();
  Scheduler::Lock lock(machine.mutex);
  if (const auto* mutation = machine.mutations.apply(Mutations::Kind::kAllocateOn, id))
    id = mutation->tagged;
  Stream& stream = machine.scheduler.stream(id);
  DeviceMemory& memory = machine.device(id.device);
  MemoryStats& stats = memory.stats;
  const size_t bytes = round_up(requested);
  finish_deferred(machine, memory);
  if (memory.failing_requests > 0) {
    if (memory.good_requests_before_failure > 0) {
      --memory.good_requests_before_failure;
    } else {
      --memory.failing_requests;
      ++stats.out_of_memory;
      throw OutOfMemory("sim: out of memory on device " + std::to_string(id.device) +
                        ": a request for " + std::to_string(requested) + " bytes was to fail");
    }
  }
  Block* block = take_cached(memory, id, bytes);
  if (!block && stats.reserved + bytes > stats.capacity) {
    flush_cache(machine, lock, id.device);
    block = take_cached(memory, id, bytes);
  }
  if (!block) {
    if (stats.reserved + bytes > stats.capacity) {
      ++stats.out_of_memory;
      throw OutOfMemory("sim: out of memory on device " + std::to_string(id.device) +
                        ": tried to allocate " + std::to_string(requested) + " bytes; capacity " +
                        std::to_string(stats.capacity) + ", allocated " +
                        std::to_string(stats.allocated) + ", reserved " +
                        std::to_string(stats.reserved));
    }
    block = &machine.blocks.map(bytes, false);
    block->stream = id;
    stats.reserved += bytes;
    ++machine.counters.device_allocations;
  }
  machine.blocks.begin_life(*block, requested);
  // [Note: allocation is a write]
  // Earlier work of the stream may still use the block, so another stream must be ordered after the
  // allocation before it touches the block, even to write. Fresh memory is no exception: whether
  // the allocator reuses is not the program's to know.
  stream.clock.join(machine.host_clock);
  if (machine.detector.on())
    block->accesses.remember(block->whole(true), {stream.slot, stream.clock.tick(stream.slot),
                                                  "allocate", machine.scheduler.enqueued()});
  stats.allocated += bytes;
  stats.peak = std::max(stats.peak, stats.allocated);
  ++stats.requests;
  return block->pointer();
}

void device_free(void* pointer) noexcept {
  if (!pointer) return;
  Machine& machine = Machine::get();
  Scheduler::Lock lock(machine.mutex);
  Block* block = machine.blocks.find(reinterpret_cast<uintptr_t>(pointer));
  if (!block || !block->live || block->pinned || block->pointer() != pointer) {
    machine.detector.report("sim: free of a pointer that is not allocated", true);
    return;
  }
  DeviceMemory& memory = machine.device(block->stream.device);
  memory.stats.allocated -= block->bytes;
  ++memory.stats.frees;
  block->live = false;
  for (StreamId user : block->used_by)
    block->pending_uses.push_back(machine.record(machine.scheduler.stream(user)));
  block->used_by.clear();
  if (block->pending_uses.empty()) {
    finish_free(machine, *block);
  } else {
    ++memory.stats.deferred;
    memory.deferred.push_back(block);
  }
}

void record_stream(const void* pointer, StreamId user) {
  Machine& machine = Machine::get();
  std::lock_guard lock(machine.mutex);
  Block* block = machine.blocks.find(reinterpret_cast<uintptr_t>(pointer));
  if (!block || !block->live || block->pinned) return;
  ++machine.device(block->stream.device).stats.recorded;
  if (block->stream == user) return;
  if (machine.mutations.apply(Mutations::Kind::kDropRecordStream)) return;
  if (std::find(block->used_by.begin(), block->used_by.end(), user) == block->used_by.end())
    block->used_by.push_back(user);
}

void empty_cache(int device) {
  Machine& machine = Machine::get();
  Scheduler::Lock lock(machine.mutex);
  flush_cache(machine, lock, device);
}

int device_of(const void* pointer) {
  Machine& machine = Machine::get();
  std::lock_guard lock(machine.mutex);
  Block* block = machine.blocks.find(reinterpret_cast<uintptr_t>(pointer));
  return block && !block->pinned ? block->stream.device : -1;
}

void set_capacity(int device, size_t bytes) {
  Machine& machine = Machine::get();
  std::lock_guard lock(machine.mutex);
  machine.device(device).stats.capacity = bytes;
}

void fail_device_requests(int device, uint64_t skip, uint64_t count) {
  Machine& machine = Machine::get();
  std::lock_guard lock(machine.mutex);
  machine.device(device).good_requests_before_failure = skip;
  machine.device(device).failing_requests = count;
}

MemoryStats memory_stats(int device) {
  Machine& machine = Machine::get();
  std::lock_guard lock(machine.mutex);
  finish_deferred(machine, machine.device(device));
  return machine.device(device).stats;
}

void reset_peak(int device) {
  Machine& machine = Machine::get();
  std::lock_guard lock(machine.mutex);
  MemoryStats& stats = machine.device(device).stats;
  stats.peak = stats.allocated;
}

std::vector<LiveBlock> live_blocks(uint64_t after_serial) {
  Machine& machine = Machine::get();
  std::lock_guard lock(machine.mutex);
  return machine.blocks.live(after_serial);
}

uint64_t last_serial() {
  Machine& machine = Machine::get();
  std::lock_guard lock(machine.mutex);
  return machine.blocks.last_serial();
}

}  // namespace simdev
