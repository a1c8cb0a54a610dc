#include "lane.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace memswap {

namespace {

void check(const Tickets& after) {
  if (std::find(after.begin(), after.end(), nullptr) != after.end()) {
    throw std::invalid_argument("expected tickets to come after, found None");
  }
}

}  // namespace

ByteRange ByteRange::of(size_t storage_nbytes) const {
  const bool to_the_end = nbytes == kToTheEnd;
  if (offset > storage_nbytes || (!to_the_end && nbytes > storage_nbytes - offset)) {
    throw std::invalid_argument("expected a range within a storage of " +
                                std::to_string(storage_nbytes) + " bytes, found " +
                                (to_the_end ? std::string("all") : std::to_string(nbytes)) +
                                " bytes from offset " + std::to_string(offset));
  }
  return {offset, to_the_end ? storage_nbytes - offset : nbytes};
}

TicketPtr CheckedLane::send(StorageRefPtr storage, BlockPtr block, ByteRange range, Tickets after) {
  if (!storage || !block) {
    throw std::invalid_argument("send needs a storage and a block, found None");
  }
  const auto [offset, nbytes] = range.of(storage->storage.nbytes());
  if (nbytes != block->nbytes()) {
    throw std::invalid_argument("send needs a block as long as what it takes: expected " +
                                std::to_string(nbytes) + " bytes, found " +
                                std::to_string(block->nbytes()));
  }
  check(*storage, *block);
  memswap::check(after);
  return start_send(std::move(storage), offset, std::move(block), std::move(after));
}

std::pair<StorageRefPtr, TicketPtr> CheckedLane::fetch(BlockPtr block, Tickets after) {
  if (!block) {
    throw std::invalid_argument("fetch needs a block, found None");
  }
  check(*block);
  memswap::check(after);
  auto storage = allocate(block->nbytes());
  auto ticket = start_fetch(std::move(block), storage, 0, std::move(after));
  return {std::move(storage), std::move(ticket)};
}

TicketPtr CheckedLane::fetch_into(BlockPtr block, StorageRefPtr storage, size_t offset,
                                  Tickets after) {
  if (!storage || !block) {
    throw std::invalid_argument("fetch_into needs a block and a storage, found None");
  }
  (void)ByteRange{offset, block->nbytes()}.of(storage->storage.nbytes());
  check(*storage, *block);
  memswap::check(after);
  return start_fetch(std::move(block), std::move(storage), offset, std::move(after));
}

void LeavingStorages::add(const StorageRef& storage) {
  const std::lock_guard lock(mutex_);
  Owned& owned = storages_[storage.storage.unsafeGetStorageImpl()];
  if (owned.sends++ == 0) {
    owned.nbytes = storage.storage.nbytes();
    nbytes_ += owned.nbytes;
  }
}

void LeavingStorages::remove(const StorageRef& storage) {
  const std::lock_guard lock(mutex_);
  const auto found = storages_.find(storage.storage.unsafeGetStorageImpl());
  if (--found->second.sends == 0) {
    nbytes_ -= found->second.nbytes;
    storages_.erase(found);
  }
}

bool LeavingStorages::contains(const StorageRef& storage) const {
  const std::lock_guard lock(mutex_);
  return storages_.contains(storage.storage.unsafeGetStorageImpl());
}

size_t LeavingStorages::nbytes() const {
  const std::lock_guard lock(mutex_);
  return nbytes_;
}

}  // namespace memswap
