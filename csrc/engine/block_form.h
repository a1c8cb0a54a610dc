// SWAP: raw bytes in a block of a pool. Buckets and the state of optimizers leave by the same
// class; tensors that are swapped in place (python/memswap/inplace.py) by the lane itself.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "away.h"
#include "lane/lane.h"
#include "pool/block.h"
#include "pool/pool.h"

namespace memswap {

class BlockForm final : public AwayForm {
 public:
  BlockForm(std::shared_ptr<Lane> lane, BlockPtr block)
      : lane_(std::move(lane)), block_(std::move(block)) {}

  Returning bring() override;
  size_t device_nbytes() const override { return 0; }
  size_t pool_nbytes() const override { return block_->nbytes(); }
  bool can_fetch_ahead() const override { return true; }
  AnyLanePtr sent_by() const override { return lane_; }
  Reason short_of() const override { return reasons::kPool; }

  // Brings the bytes into the memory of a storage of the same length, as soon as that has left:
  // `departure` is its send. The caller waits for both tickets before it uses the memory.
  TicketPtr bring_into(StorageRefPtr leaving, TicketPtr departure);

 private:
  const std::shared_ptr<Lane> lane_;
  const BlockPtr block_;
};

// Sends storages into blocks of one pool, by one lane.
class BlockSender {
 public:
  BlockSender(std::shared_ptr<Lane> lane, std::shared_ptr<Pool> pool)
      : lane_(std::move(lane)), pool_(std::move(pool)) {}

  // Starts sending a storage. Nothing: there is no room for it, and nothing was started. The caller
  // holds the GIL (memory_share.h), which is let go of while memory is asked for and the send
  // begins.
  std::optional<Leaving> send(const StorageRefPtr& storage);

  // Why `send` last refused, in words for the user.
  const std::string& why_refused() const { return why_refused_; }

  const std::shared_ptr<Lane>& lane() const { return lane_; }
  const std::shared_ptr<Pool>& pool() const { return pool_; }

 private:
  const std::shared_ptr<Lane> lane_;
  const std::shared_ptr<Pool> pool_;
  std::string why_refused_;
};

}  // namespace memswap
