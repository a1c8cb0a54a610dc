// Where transfers run, in order.
#pragma once

#include <c10/core/Device.h>

#include <utility>

#include "block.h"
#include "storage.h"
#include "ticket.h"

namespace memswap {

class Lane {
 public:
  Lane() = default;
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;
  virtual ~Lane() = default;

  // Copies the whole storage into the block, after everything that the calling thread has submitted
  // so far. The ticket owns the storage until the copy is ordered before any reuse of its memory.
  virtual TicketPtr send(StorageRefPtr storage, BlockPtr block) = 0;

  // Allocates a storage on the calling thread's current stream and fills it from the block, after
  // every use of the block that was submitted before. The caller waits for the ticket before it
  // reads; the ticket keeps the storage alive.
  virtual std::pair<StorageRefPtr, TicketPtr> fetch(BlockPtr block) = 0;

  // Makes the calling thread's current stream wait for every send still under way, and lets go of
  // the storages that they own.
  virtual void settle() = 0;

  // Bytes of storages that sends still own.
  virtual size_t leaving_bytes() = 0;

  // Bounds leaving_bytes(): a send beyond it first waits for the oldest. 0: no bound.
  virtual void set_max_leaving_bytes(size_t bytes) = 0;
};

}  // namespace memswap
