// Storages that operators of backward hold, and that no entry holds.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>

#include "counters.h"
#include "storage/storage.h"

namespace memswap {

class Entry;

// [Note: In use]
// An entry lets go of its storage when every save has read it, and whoever reads it holds it on:
// one operator for as long as it runs, the recomputation of a checkpoint region until backward is
// past the operators that read it there. Such a region also saves storages of its own. All of them
// count as resident for as long as they are there, so that a budget and a peak mean the same bytes
// however a unit gets what it needs. Backward holds them; here are weak references, looked through
// at each mark.

// The engine's lock serialises the calls.
class InUse {
 public:
  explicit InUse(Counters& counters) : counters_(counters) {}

  // A region has saved a storage that no entry counts. False: it was known.
  bool add(const StorageRef& storage);
  // An entry has let go of its storage, which counts until that is gone, or the entry: what is
  // there without its graph is somebody else's.
  void add(Entry& entry);
  // An entry holds its storage again, and counts it.
  void remove(const void* key);
  // Takes off the books what is gone.
  void sweep();
  // No backward runs: what is there still is somebody else's.
  void clear();

  // Of what is no entry's.
  int64_t others_nbytes() const { return others_nbytes_; }

 private:
  struct Row {
    WeakStorage storage;
    int64_t nbytes;
    bool is_entrys;
    std::weak_ptr<Entry> entry;  // if it is one's

    bool over() const { return storage.expired() || (is_entrys && entry.expired()); }
  };

  void count(const Row& row, int64_t sign);

  Counters& counters_;
  int64_t others_nbytes_ = 0;
  std::unordered_map<const void*, Row> rows_;
};

}  // namespace memswap
