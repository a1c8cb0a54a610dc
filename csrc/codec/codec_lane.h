// Where encodes and decodes run, in order.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "frame_plan.h"
#include "lane/lane.h"
#include "pool/pool.h"
#include "storage/storage.h"
#include "work/ticket.h"

namespace memswap {

// What an encoder found, for those who still want to know when the frame is gone. Holds neither the
// frame nor any other memory of the device.
class FrameWatch {
 public:
  FrameWatch() = default;
  FrameWatch(const FrameWatch&) = delete;
  FrameWatch& operator=(const FrameWatch&) = delete;
  virtual ~FrameWatch() = default;

  // As soon as the host can know without waiting; nothing before, and never where an encode failed.
  virtual std::optional<FrameReport> report() = 0;
};

// One storage's bytes in their encoded form. Owned as a block is: whoever holds it can have the
// bytes back, any number of times. It may be dropped at any time and on any thread; tickets of work
// under way keep what that work touches.
class EncodedStorage {
 public:
  EncodedStorage() = default;
  EncodedStorage(const EncodedStorage&) = delete;
  EncodedStorage& operator=(const EncodedStorage&) = delete;
  virtual ~EncodedStorage() = default;

  // Bytes that it holds now: of a pool where the frame was swapped, else of the device.
  virtual size_t nbytes() const = 0;
  virtual size_t raw_nbytes() const = 0;

  // Bytes of the device beside these: what did not fit the frame, or until that is known, what is
  // set aside for it. (Pinned memory that serves instead does not count.)
  virtual size_t overflow_nbytes() const { return 0; }

  // Bytes of the device that it takes now, overflow included. (Where a room for overflows was set,
  // that room counts as a whole instead, and frames on their way to a pool or back count here.)
  virtual size_t device_nbytes() const { return swapped() ? 0 : nbytes(); }

  // What the caller does next comes after all work that sends the frame away: none of that holds
  // memory of the device any more.
  virtual void wait_sent() {}

  // Whether the frame is in a pool that encode_to was given.
  virtual bool swapped() const = 0;

  virtual std::shared_ptr<FrameWatch> watch() const = 0;
  std::optional<FrameReport> report() const { return watch()->report(); }
};
using EncodedStoragePtr = std::shared_ptr<EncodedStorage>;

struct Encoding {
  EncodedStoragePtr encoded;
  TicketPtr ticket;
};

// Both directions as a Lane has them, with an EncodedStorage in the place of the block.
class CodecLane : public AnyLane {
 public:
  // Encodes the whole storage, after everything that the calling thread has submitted so far. The
  // ticket owns the storage until the encode is ordered before any reuse of its memory; where an
  // encode fails it gives the storage back (a device's cannot fail). Nothing: there is no room, or
  // these bytes cannot be encoded so; last_refusal() says why, and nothing was started.
  virtual std::optional<Encoding> encode(StorageRefPtr storage, const FrameOptions& options) = 0;

  // The same, and then moves the frame to a block of `pool` on `lane`. The ticket is the encode's:
  // the storage does not wait for the frame's departure.
  virtual std::optional<Encoding> encode_to(StorageRefPtr storage, const FrameOptions& options,
                                            const std::shared_ptr<Lane>& lane,
                                            const std::shared_ptr<Pool>& pool) = 0;

  // Allocates a storage on the calling thread's current stream and decodes into it. The caller
  // waits for the ticket before it reads; the ticket keeps the storage alive.
  virtual std::pair<StorageRefPtr, TicketPtr> decode(const EncodedStoragePtr& encoded) = 0;

  std::string last_refusal() const {
    const std::lock_guard lock(refusal_mutex_);
    return last_refusal_;
  }
  // Whether that was for want of room for what may not fit its frame, and nothing had failed.
  bool arena_was_full() const {
    const std::lock_guard lock(refusal_mutex_);
    return arena_was_full_;
  }

 protected:
  std::nullopt_t refuse(std::string reason, bool arena_is_full = false) {
    const std::lock_guard lock(refusal_mutex_);
    last_refusal_ = std::move(reason);
    arena_was_full_ = arena_is_full;
    return std::nullopt;
  }

 private:
  mutable std::mutex refusal_mutex_;
  std::string last_refusal_;
  bool arena_was_full_ = false;
};

}  // namespace memswap
