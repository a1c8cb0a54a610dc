// The completion of submitted work: the only synchronisation object of memswap.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>

namespace memswap {

struct StorageRef;

// A transfer that was submitted and did not succeed. The message says what was attempted, what the
// system answered and what is still intact.
struct TransferError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A ticket owns the device storage that its work touches, until the work is known to be ordered
// before whatever may reuse that storage. Dropping a ticket early is therefore always safe: its
// destructor waits. Tickets may be used from any thread.
class Ticket {
 public:
  Ticket() = default;
  Ticket(const Ticket&) = delete;
  Ticket& operator=(const Ticket&) = delete;
  virtual ~Ticket() = default;

  // What the caller does next comes after the work: a stream lane makes the calling thread's
  // current stream wait, a worker lane blocks the thread. Idempotent.
  // Throws TransferError if the work failed.
  virtual void wait() = 0;

  // True once the host knows that the work has ended, well or badly. Never needed for correctness.
  virtual bool done() = 0;

  // Whether the work has ended badly. Work in stream order cannot fail.
  virtual bool failed() { return false; }

  // After a failed send: its storage, which is as it was. nullptr for any other work.
  virtual std::shared_ptr<StorageRef> kept_storage() { return nullptr; }

  // Blocks the calling thread until the work has ended. Throws TransferError if the work failed.
  virtual void synchronize() = 0;

  // Nobody will wait for this ticket any more. A ticket that holds device storage until somebody
  // does lets go of it now, in order; one that lets go by itself has nothing to do.
  virtual void abandon() noexcept {}
};

using TicketPtr = std::shared_ptr<Ticket>;

// Waits for a transfer whose failure is noticed by the entry that it is of: a send that failed
// gives the storage back. `ticket` is a share, since the entry may drop its own meanwhile.
inline void wait_ignoring_failure(const TicketPtr ticket) {
  try {
    ticket->wait();
  } catch (const TransferError&) {
  }
}

}  // namespace memswap
