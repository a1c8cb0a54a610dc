#include "in_use.h"

#include <utility>

#include "entry.h"

namespace memswap {

void InUse::count(const Row& row, int64_t sign) {
  others_nbytes_ += row.is_entrys ? 0 : sign * row.nbytes;
  counters_.set_in_use(counters_.in_use_bytes + sign * row.nbytes);
}

bool InUse::add(const StorageRef& storage) {
  sweep();
  const WeakStorage weak(storage);
  const auto nbytes = static_cast<int64_t>(storage.storage.nbytes());
  const auto [added, is_new] = rows_.try_emplace(weak.key(), Row{weak, nbytes, false, {}});
  if (is_new) {
    count(added->second, 1);
  }
  return is_new;
}

void InUse::add(Entry& entry) {
  const Row row{entry.identity(), entry.nbytes(), true, entry.weak_from_this()};
  if (rows_.try_emplace(row.storage.key(), row).second) {
    count(row, 1);
  }
}

void InUse::remove(const void* key) {
  const auto found = rows_.find(key);
  if (found != rows_.end()) {
    count(found->second, -1);
    rows_.erase(found);
  }
}

void InUse::sweep() {
  if (rows_.empty()) {
    return;
  }
  std::erase_if(rows_, [&](const auto& one) {
    const bool over = one.second.over();
    if (over) {
      count(one.second, -1);
    }
    return over;
  });
}

void InUse::clear() {
  rows_.clear();
  others_nbytes_ = 0;
  counters_.set_in_use(0);
}

}  // namespace memswap
