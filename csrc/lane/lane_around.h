// A lane around another one: tests and benchmarks derive from it, to watch transfers, to break one of
// their edges or to leave them out.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "lane.h"

namespace memswap {

class LaneAround : public Lane {
 public:
  explicit LaneAround(std::shared_ptr<Lane> lane) : lane_(std::move(lane)) {}

  TicketPtr send(StorageRefPtr storage, BlockPtr block, ByteRange range, Tickets after) override {
    return lane_->send(std::move(storage), std::move(block), range, std::move(after));
  }
  std::pair<StorageRefPtr, TicketPtr> fetch(BlockPtr block, Tickets after) override {
    return lane_->fetch(std::move(block), std::move(after));
  }
  TicketPtr fetch_into(BlockPtr block, StorageRefPtr storage, size_t offset,
                       Tickets after) override {
    return lane_->fetch_into(std::move(block), std::move(storage), offset, std::move(after));
  }
  std::pair<StorageRefPtr, std::vector<size_t>> gather(
      const std::vector<StorageRefPtr>& storages) override {
    return lane_->gather(storages);
  }
  void meet_stream() override { lane_->meet_stream(); }
  void settle() override { lane_->settle(); }
  size_t leaving_bytes() override { return lane_->leaving_bytes(); }
  void set_max_leaving_bytes(size_t bytes) override { lane_->set_max_leaving_bytes(bytes); }

 private:
  const std::shared_ptr<Lane> lane_;
};

// A lane that moves nothing: it sends by handing out one ticket, and brings back one storage. For
// measuring what everything but the copies takes.
class StillLane final : public LaneAround {
 public:
  StillLane(std::shared_ptr<Lane> lane, StorageRefPtr storage, TicketPtr ticket)
      : LaneAround(std::move(lane)), storage_(std::move(storage)), ticket_(std::move(ticket)) {}

  TicketPtr send(StorageRefPtr, BlockPtr, ByteRange, Tickets) override { return ticket_; }
  std::pair<StorageRefPtr, TicketPtr> fetch(BlockPtr, Tickets) override {
    return {storage_, ticket_};
  }

 private:
  const StorageRefPtr storage_;
  const TicketPtr ticket_;
};

}  // namespace memswap
