// A lane whose sends end badly, as on a disk that fails: their tickets give the storage back.
#pragma once

#include <memory>
#include <utility>

#include "lane/lane_around.h"

namespace memswap::testing {

class FailingLane final : public LaneAround {
 public:
  using LaneAround::LaneAround;

  TicketPtr send(StorageRefPtr storage, BlockPtr, ByteRange, Tickets) override {
    return std::make_shared<Failing>(std::move(storage), fails);
  }

  // Whether the sends have failed by now; until then they are on their way.
  const std::shared_ptr<bool> fails = std::make_shared<bool>(true);

 private:
  struct Failing final : Ticket {
    Failing(StorageRefPtr sent, std::shared_ptr<const bool> fails)
        : storage(std::move(sent)), fails(std::move(fails)) {}
    void wait() override { throw TransferError("no space"); }
    bool done() override { return *fails; }
    bool failed() override { return *fails; }
    std::shared_ptr<StorageRef> kept_storage() override { return storage; }
    void synchronize() override { wait(); }

    const StorageRefPtr storage;
    const std::shared_ptr<const bool> fails;
  };
};

}  // namespace memswap::testing
