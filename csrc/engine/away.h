// Away forms: where a storage's bytes wait for backward, and how they come back.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

#include "lane/lane.h"
#include "reasons.h"
#include "storage/storage.h"
#include "work/ticket.h"

namespace memswap {

// A storage that is coming back. The caller waits for `arrival` before it reads.
struct Returning {
  StorageRefPtr storage;
  TicketPtr arrival;
};

// An entry owns one from its send on, also while the storage is back; dropping it gives the memory
// back. The away forms are a block of a pool (block_form.h), a part of a block (bucket.h), a frame,
// on the device or in a pool (frame_form.h), and a recipe (recipe_form.h). Each stands in one file,
// with what puts a storage into it; which storages have a recipe, recipes.h finds out.
//
// Whoever owns the entry serialises the calls.
class AwayForm {
 public:
  AwayForm() = default;
  AwayForm(const AwayForm&) = delete;
  AwayForm& operator=(const AwayForm&) = delete;
  virtual ~AwayForm() = default;

  // Starts bringing the bytes back, into a new storage on the calling thread's current stream. The
  // form stays what it is: it may be asked again. Throws c10::OutOfMemoryError and TransferError.
  virtual Returning bring() = 0;
  // The same for a look in passing (Source::look), which leaves whatever the form reads as it is.
  virtual Returning look() { return bring(); }

  // Bytes that it takes now: of the device, and of a pool.
  virtual size_t device_nbytes() const = 0;
  virtual size_t pool_nbytes() const = 0;

  // Calls this each time that `device_nbytes` has become another number by somebody else's doing.
  virtual void on_change(std::function<void()> /*call*/) {}

  // Bytes of the device that it needs while it comes back, beside the storage.
  virtual size_t returning_nbytes() const { return 0; }

  // Whether bytes can be on their way back before they are demanded.
  virtual bool can_fetch_ahead() const = 0;

  // Whether they are decoded where they are, without a link: that is best done beside an operator.
  virtual bool decodes() const { return false; }

  // Whether the storage may be gone before its bytes are in this form for sure.
  virtual bool frees_first() const { return false; }

  // Whether the bytes are nowhere meanwhile, and are computed again when they are asked for.
  virtual bool recomputes() const { return false; }

  // How many operators have to run one after another for that.
  virtual int depth() const { return 0; }

  // The lane by which the storage was sent; nullptr: none, or as a part of something longer.
  virtual AnyLanePtr sent_by() const { return nullptr; }

  // The resource that has run out where a send into this form fails.
  virtual Reason short_of() const = 0;

  // Orders the caller behind the form's own way to a pool: it holds no memory of the device then.
  virtual void wait_sent() {}
};
using AwayFormPtr = std::shared_ptr<AwayForm>;

// A storage that is leaving. The ticket owns the storage until its memory may be used again.
struct Leaving {
  AwayFormPtr away;
  TicketPtr departure;
};

}  // namespace memswap
