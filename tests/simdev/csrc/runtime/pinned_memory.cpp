// The pinned host allocator. The host owns this memory: a free is ordered by the host, and reuse is
// put off until the streams that pinned_record announced have passed.
#include <algorithm>
#include <cstring>

#include "machine.h"

namespace simdev {
namespace {

constexpr size_t kPageBytes = 4096;

void finish_unpinning(Machine& machine, Block& block) {
  if (machine.detector.on()) {
    VectorClock known = machine.host_clock;
    for (const auto& use : block.pending_uses) known.join(use->clock);
    const Access access{kHost, 0, "free of pinned memory", machine.scheduler.enqueued()};
    machine.detector.check(block.accesses, block.bytes, block.whole(true), access, known, true);
  }
  block.pending_uses.clear();
  block.accesses.clear();
  std::memset(block.pointer(), kPoison, block.bytes);
  machine.pinned.free_lists[block.bytes].push_back(&block);
}

void finish_deferred(Machine& machine) {
  PinnedMemory& memory = machine.pinned;
  if (memory.deferred.empty()) return;
  std::erase_if(memory.deferred, [&](Block* block) {
    for (const auto& use : block->pending_uses)
      if (!machine.scheduler.complete(*use)) return false;
    --memory.stats.deferred;
    finish_unpinning(machine, *block);
    return true;
  });
}

void fail_if_asked(PinnedMemory& memory, size_t bytes) {
  if (memory.budget && memory.stats.allocated + bytes > *memory.budget)
    throw PinFailure("sim: cannot pin " + std::to_string(bytes) +
                     " bytes of host memory: " + std::to_string(memory.stats.allocated) + " of " +
                     std::to_string(*memory.budget) + " are pinned");
  if (memory.good_requests_before_failure > 0) {
    --memory.good_requests_before_failure;
  } else if (memory.failing_requests > 0) {
    --memory.failing_requests;
    throw PinFailure("sim: cannot pin " + std::to_string(bytes) +
                     " bytes of host memory: injected failure");
  }
}

Block* find_pinned(Machine& machine, const void* pointer) {
  Block* block = machine.blocks.find(reinterpret_cast<uintptr_t>(pointer));
  return block && block->pinned && block->live ? block : nullptr;
}

}  // namespace

void* pinned_allocate(size_t requested) {
  if (requested == 0) return nullptr;
  Machine& machine = Machine::get();
  std::lock_guard lock(machine.mutex);
  PinnedMemory& memory = machine.pinned;
  const size_t bytes = (requested + kPageBytes - 1) / kPageBytes * kPageBytes;
  finish_deferred(machine);
  fail_if_asked(memory, bytes);
  ++memory.stats.requests;
  Block* block = nullptr;
  if (auto list = memory.free_lists.find(bytes);
      list != memory.free_lists.end() && !list->second.empty()) {
    block = list->second.back();
    list->second.pop_back();
  } else {
    block = &machine.blocks.map(bytes, true);
    memory.stats.reserved += bytes;
    ++machine.counters.pinned_allocations;
  }
  machine.blocks.begin_life(*block, requested);
  memory.stats.allocated += bytes;
  memory.stats.peak = std::max(memory.stats.peak, memory.stats.allocated);
  return block->pointer();
}

void pinned_free(void* pointer) noexcept {
  if (!pointer) return;
  Machine& machine = Machine::get();
  std::lock_guard lock(machine.mutex);
  Block* block = find_pinned(machine, pointer);
  if (!block || block->pointer() != pointer) {
    machine.detector.report("sim: free of a pinned pointer that is not allocated", true);
    return;
  }
  machine.pinned.stats.allocated -= block->bytes;
  block->live = false;
  for (StreamId user : block->used_by)
    block->pending_uses.push_back(machine.record(machine.scheduler.stream(user)));
  block->used_by.clear();
  if (block->pending_uses.empty()) {
    finish_unpinning(machine, *block);
  } else {
    ++machine.pinned.stats.deferred;
    machine.pinned.deferred.push_back(block);
  }
}

bool pinned_record(const void* begin, StreamId user) {
  Machine& machine = Machine::get();
  std::lock_guard lock(machine.mutex);
  Block* block = find_pinned(machine, begin);
  if (!block || block->pointer() != begin) return false;
  if (machine.mutations.apply(Mutations::Kind::kDropRecordStream)) return true;
  if (std::find(block->used_by.begin(), block->used_by.end(), user) == block->used_by.end())
    block->used_by.push_back(user);
  return true;
}

void pinned_empty_cache() {
  Machine& machine = Machine::get();
  std::lock_guard lock(machine.mutex);
  finish_deferred(machine);
  for (auto& [bytes, list] : machine.pinned.free_lists) {
    for (Block* block : list) {
      machine.pinned.stats.reserved -= block->bytes;
      machine.blocks.unmap(*block);
    }
  }
  machine.pinned.free_lists.clear();
}

bool is_pinned(const void* pointer) {
  Machine& machine = Machine::get();
  std::lock_guard lock(machine.mutex);
  return find_pinned(machine, pointer) != nullptr;
}

void host_access(const void* pointer, size_t bytes, bool write, const char* name) {
  Machine& machine = Machine::get();
  std::lock_guard lock(machine.mutex);
  if (!machine.detector.on()) return;
  const auto begin = reinterpret_cast<uintptr_t>(pointer);
  Block* block = machine.blocks.find(begin);
  if (!block) return;
  const Access access{kHost, 0, name, machine.scheduler.enqueued()};
  machine.detector.check(block->accesses, block->bytes, {begin, begin + bytes, write, false},
                         access, machine.host_clock, false);
}

PinnedStats pinned_stats() {
  Machine& machine = Machine::get();
  std::lock_guard lock(machine.mutex);
  finish_deferred(machine);
  return machine.pinned.stats;
}

void fail_pinned_requests(uint64_t skip, uint64_t count) {
  Machine& machine = Machine::get();
  std::lock_guard lock(machine.mutex);
  machine.pinned.good_requests_before_failure = skip;
  machine.pinned.failing_requests = count;
}

void set_pinned_budget(std::optional<size_t> bytes) {
  Machine& machine = Machine::get();
  std::lock_guard lock(machine.mutex);
  machine.pinned.budget = bytes;
}

}  // namespace simdev
