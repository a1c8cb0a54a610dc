#include "block_form.h"

#include "storage/memory_share.h"
#include "work/without_gil.h"

namespace memswap {

Returning BlockForm::bring() {
  const WithoutGil without_gil;
  auto [storage, arrival] = lane_->fetch(block_);
  return {std::move(storage), std::move(arrival)};
}

TicketPtr BlockForm::bring_into(StorageRefPtr leaving, TicketPtr departure) {
  const WithoutGil without_gil;
  return lane_->fetch_into(block_, std::move(leaving), 0, {std::move(departure)});
}

std::optional<Leaving> BlockSender::send(const StorageRefPtr& storage) {
  if (storage->storage.device().is_cpu()) {
    share_memory(*storage);
  }
  const WithoutGil without_gil;
  BlockPtr block = pool_->allocate(storage->storage.nbytes());
  if (!block) {
    return std::nullopt;
  }
  TicketPtr departure = lane_->send(storage, block);
  return Leaving{std::make_shared<BlockForm>(lane_, std::move(block)), std::move(departure)};
}

}  // namespace memswap
