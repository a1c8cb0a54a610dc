// One piece of a pool, owned.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "work/ticket.h"

namespace memswap {

// A block goes back to its pool when its last owner drops it, and the pool hands its range out
// again only behind the tickets of its uses. A block holds no reference to device storage.
class Block {
 public:
  Block() = default;
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  virtual ~Block() = default;

  // Bytes that were asked for, or are left after shrink; the range behind it may be longer.
  virtual size_t nbytes() const = 0;

  // Keeps the first `nbytes` bytes, at most nbytes() of them, and gives the rest back to the pool
  // at once. By then, work that touched the rest has ended.
  virtual void shrink(size_t nbytes) = 0;

  // Address of the bytes in host memory, or nullptr where the block is not addressable (a file).
  virtual void* data() const = 0;

  // Whether a device copies to and from the block by itself; if not, the host waits for a copy.
  virtual bool pinned() const = 0;

  // Where these bytes lie in the piece of memory that the system gave, from its beginning.
  virtual size_t offset() const = 0;

  // Moves nbytes() bytes between the block and ordinary host memory; blocks the calling thread.
  // Throws TransferError. Needs no lock of the pool.
  virtual void write(const void* source) = 0;
  virtual void read(void* destination) = 0;

  // The work behind `ticket` uses this block: its range is not reused before that work has ended
  // or, by work that waits for the ticket, behind it.
  virtual void used_by(TicketPtr ticket) = 0;

  // Tickets that the next work on this block must be ordered after: all recorded uses, including
  // those of the range's previous owner that may still be running.
  virtual std::vector<TicketPtr> uses() const = 0;
};

using BlockPtr = std::shared_ptr<Block>;

}  // namespace memswap
