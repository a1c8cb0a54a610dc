// Device and pinned memory: caching allocators whose frees are poisoned in stream order.
//
// [Note: poison]
// Freed device memory goes to the free list of the stream it was allocated on, last in first out,
// and a task of that stream fills it with 0xFF, which is NaN in every floating format. So whoever
// still reads it sees NaN or someone else's data, and never a fault: memory is unmapped only when
// the cache is flushed, after the device was synchronised.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "race_detector.h"

namespace simdev {

struct Block {
  uintptr_t begin = 0;
  size_t bytes = 0;      // rounded up, as the free lists know it
  size_t requested = 0;  // by the current owner
  StreamId stream;       // whose free list it belongs to (device memory)
  bool pinned = false;
  bool live = false;
  uint64_t serial = 0;
  AccessMap accesses;
  std::vector<StreamId> used_by;           // record_stream
  std::vector<RecordingPtr> pending_uses;  // of a freed block, until they are complete

  void* pointer() const { return reinterpret_cast<void*>(begin); }
  Span whole(bool write) const { return {begin, begin + requested, write, !pinned}; }
};

// Every block that is mapped, by address.
class BlockTable {
 public:
  // Maps memory and fills it with poison. Throws Error where the system has none.
  Block& map(size_t bytes, bool pinned);
  void unmap(Block& block);
  Block* find(uintptr_t address);  // the block that contains it
  void begin_life(Block& block, size_t requested);
  std::vector<LiveBlock> live(uint64_t after_serial) const;
  uint64_t last_serial() const { return serial_; }

 private:
  std::map<uintptr_t, std::unique_ptr<Block>> blocks_;
  uint64_t serial_ = 0;
};

struct DeviceMemory {
  MemoryStats stats;
  std::map<std::pair<int, size_t>, std::vector<Block*>> free_lists;  // by stream index and bytes
  std::vector<Block*> deferred;                                      // freed, but still in use
  uint64_t good_requests_before_failure = 0;
  uint64_t failing_requests = 0;
};

struct PinnedMemory {
  PinnedStats stats;
  std::map<size_t, std::vector<Block*>> free_lists;
  std::vector<Block*> deferred;
  uint64_t good_requests_before_failure = 0;
  uint64_t failing_requests = 0;
  std::optional<size_t> budget;
};

inline constexpr unsigned char kPoison = 0xFF;

}  // namespace simdev
