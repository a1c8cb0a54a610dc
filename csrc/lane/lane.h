// Where transfers run, in order.
#pragma once

#include <cstddef>
#include <limits>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "gather.h"
#include "pool/block.h"
#include "storage/storage.h"
#include "work/ticket.h"

namespace memswap {

// Part of a storage; all of it unless told otherwise.
struct ByteRange {
  static constexpr size_t kToTheEnd = std::numeric_limits<size_t>::max();

  size_t offset = 0;
  size_t nbytes = kToTheEnd;

  // The same part of a storage of `storage_nbytes` bytes, its length in numbers. Throws
  // std::invalid_argument where it reaches beyond the end.
  ByteRange of(size_t storage_nbytes) const;
};

using Tickets = std::vector<TicketPtr>;

// What lanes have in common, whether storages are copied there (Lane) or encoded (CodecLane).
class AnyLane {
 public:
  AnyLane() = default;
  AnyLane(const AnyLane&) = delete;
  AnyLane& operator=(const AnyLane&) = delete;
  virtual ~AnyLane() = default;

  // For storages that are sent later, perhaps while another stream is current: what is current now
  // is a compute stream as well, and memory may belong to it.
  virtual void meet_stream() {}

  // Makes the calling thread's current stream wait for every send still under way, and lets go of
  // the storages that they own.
  virtual void settle() = 0;

  // Bytes of storages that sends still own. A storage counts once, and as a whole, however many
  // sends take parts of it.
  virtual size_t leaving_bytes() = 0;

  // Bounds leaving_bytes(): a send beyond it first waits for the oldest. 0: no bound.
  virtual void set_max_leaving_bytes(size_t bytes) = 0;
};
using AnyLanePtr = std::shared_ptr<AnyLane>;

// Every transfer comes after what the calling thread has submitted so far, after the recorded uses
// of its block, and after the tickets in `after`, which may be any lane's. It is not ordered with
// transfers of the same bytes of a storage that nobody has waited for: name those in `after`.
//
// Throws std::invalid_argument for arguments that do not fit together, and TransferError where the
// calling thread itself has to wait for a ticket in `after`, and its work failed.
class Lane : public AnyLane {
 public:
  // Copies a range of the storage into the block, which is exactly as long. The ticket owns the
  // whole storage until the copy is ordered before any reuse of its memory.
  virtual TicketPtr send(StorageRefPtr storage, BlockPtr block, ByteRange range = {},
                         Tickets after = {}) = 0;

  // Allocates a storage on the calling thread's current stream and fills it from the block. The
  // caller waits for the ticket before it reads; the ticket keeps the storage alive.
  virtual std::pair<StorageRefPtr, TicketPtr> fetch(BlockPtr block, Tickets after = {}) = 0;

  // Copies the block to `offset` of a storage that exists. Its other bytes stay as they are and
  // may be in use meanwhile; its version counter does not notice. The ticket keeps it alive.
  virtual TicketPtr fetch_into(BlockPtr block, StorageRefPtr storage, size_t offset,
                               Tickets after = {}) = 0;

  // Copies of storages in one (gather.h). The sources may be dropped as soon as the call has
  // returned, whichever compute stream their memory belongs to.
  virtual std::pair<StorageRefPtr, std::vector<size_t>> gather(
      const std::vector<StorageRefPtr>& storages) {
    return memswap::gather(storages);
  }
};

// A lane that moves bytes itself: what it is asked for is checked here, once for every kind.
class CheckedLane : public Lane {
 public:
  TicketPtr send(StorageRefPtr storage, BlockPtr block, ByteRange range = {},
                 Tickets after = {}) final;
  std::pair<StorageRefPtr, TicketPtr> fetch(BlockPtr block, Tickets after = {}) final;
  TicketPtr fetch_into(BlockPtr block, StorageRefPtr storage, size_t offset,
                       Tickets after = {}) final;

 private:
  // Throws unless the lane can reach the memory of both.
  virtual void check(const StorageRef& storage, const Block& block) const = 0;
  virtual void check(const Block& block) const = 0;

  // The calls above, with arguments that fit together: block->nbytes() bytes from or to `offset`.
  virtual TicketPtr start_send(StorageRefPtr storage, size_t offset, BlockPtr block,
                               Tickets after) = 0;
  virtual TicketPtr start_fetch(BlockPtr block, StorageRefPtr storage, size_t offset,
                                Tickets after) = 0;
  virtual StorageRefPtr allocate(size_t nbytes) = 0;
};

// The storages that the sends of a lane own. Thread-safe.
class LeavingStorages {
 public:
  void add(const StorageRef& storage);     // once per send
  void remove(const StorageRef& storage);  // once per send
  bool contains(const StorageRef& storage) const;
  size_t nbytes() const;

 private:
  struct Owned {
    size_t nbytes = 0;  // when the first send began
    size_t sends = 0;
  };
  mutable std::mutex mutex_;
  std::unordered_map<const void*, Owned> storages_;
  size_t nbytes_ = 0;
};

}  // namespace memswap
