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
  BlockPtr block;
  TicketPtr departure;
  try {
    const WithoutGil without_gil;
    block = pool_->allocate(storage->storage.nbytes());
    departure = block ? lane_->send(storage, block) : nullptr;
  } catch (const TransferError& error) {  // no host memory on the way to a file
    why_refused_ = error.what();
    return std::nullopt;
  }
  if (!block) {
    why_refused_ = pool_->statistics().last_refusal;
    return std::nullopt;
  }
  return Leaving{std::make_shared<BlockForm>(lane_, std::move(block)), std::move(departure)};
}

}  // namespace memswap
