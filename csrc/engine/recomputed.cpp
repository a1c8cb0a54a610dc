#include "recomputed.h"

namespace memswap {

bool Recomputed::add(const StorageRef& storage) {
  sweep();
  const WeakStorage weak(storage);
  const auto nbytes = static_cast<int64_t>(storage.storage.nbytes());
  if (!storages_.try_emplace(weak.key(), weak, nbytes).second) {
    return false;
  }
  counters_.set_recomputed(counters_.recomputed_bytes + nbytes);
  return true;
}

void Recomputed::sweep() {
  if (storages_.empty()) {
    return;
  }
  int64_t gone = 0;
  std::erase_if(storages_, [&](const auto& row) {
    const auto& [storage, nbytes] = row.second;
    gone += storage.expired() ? nbytes : 0;
    return storage.expired();
  });
  counters_.set_recomputed(counters_.recomputed_bytes - gone);
}

void Recomputed::clear() {
  storages_.clear();
  counters_.set_recomputed(0);
}

}  // namespace memswap
