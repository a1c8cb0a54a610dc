// The ticket of work on a lane's stream, and how much such work may own.
#pragma once

#include <c10/util/SmallVector.h>

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>

#include "device_streams.h"
#include "storage/storage.h"
#include "stream_ticket.h"

namespace memswap {

// [Note: No lock while holding the GIL]
// A backend may let go of the GIL and take it back inside a call that is made under one of the
// locks of a ticket or a lane (an event query that runs a queue of tasks, a destructor of
// Python's). A thread that held the GIL and waited for that lock would then wait for ever, so every
// way in lets go of the GIL first: the bindings do for calls, and what a destructor can reach does
// it itself.

// The event behind the work, and everything that must outlive it. All of it goes at once: when the
// first stream has waited, or the host knows that the work has ended.
class StreamTransfer final : public StreamTicket {
 public:
  enum class Direction { kAway, kBack };

  // `storage` is what leaves (kAway: sent or encoded) or comes back. What leaves is on the books of
  // `leaving` while it is owned. "Compute" is the stream that is current here.
  StreamTransfer(std::shared_ptr<DeviceStreams> streams, Direction direction, StorageRefPtr storage,
                 std::shared_ptr<LeavingStorages> leaving = nullptr);
  ~StreamTransfer() override;  // anywhere, including while the process ends

  // Before the work is submitted: other memory that it uses, and what else it needs.
  void also_owns(StorageRefPtr storage) { owned_.storages.push_back(std::move(storage)); }
  void also_needs(std::shared_ptr<void> other) { owned_.others.push_back(std::move(other)); }

  c10::Stream compute() const { return compute_; }
  void record(c10::Stream stream);

  // Called at every use, because each may come from another stream.
  void wait() override;
  bool done() override;
  void synchronize() override;
  void abandon() noexcept override;
  void order_before(c10::Stream stream) override;

  bool owns_storage() const { return owns_storage_; }

 private:
  struct Owned {
    c10::SmallVector<StorageRefPtr, 2> storages;
    c10::SmallVector<std::shared_ptr<void>, 2> others;
  };

  Owned let_go();
  Owned known_to_have_ended();

  const std::shared_ptr<DeviceStreams> streams_;
  const Direction direction_;
  const c10::Stream compute_;  // the stream that was current at submission
  const WeakStorage identity_;
  const void* const memory_;  // the storage's, at submission
  const std::shared_ptr<LeavingStorages> leaving_;
  std::atomic<bool> owns_storage_{true};
  std::mutex mutex_;  // guards what follows
  c10::Event event_;
  Owned owned_;
  StorageRefPtr kept_;  // what has other memory than was sent ([Note: Memory that is taken away])
  bool ended_ = false;  // as far as the host knows
  c10::SmallVector<c10::Stream, 2> ordered_;  // streams that have waited
};

// Transfers that own storages until they are ordered, and a bound for what they own together.
class StreamDepartures {
 public:
  explicit StreamDepartures(size_t bound) : bound_(bound) {}

  const std::shared_ptr<LeavingStorages>& leaving() const { return leaving_; }
  size_t nbytes() const { return leaving_->nbytes(); }
  void set_bound(size_t bound) { bound_ = bound; }

  // Lets go of what the host can see has ended.
  void reap();

  // Makes compute wait for the oldest until one more storage fits the bound (0: no bound).
  void make_room(const StorageRef& storage);

  void add(std::shared_ptr<StreamTransfer> transfer);

  // Makes compute wait for everything that was added.
  void settle();

 private:
  std::shared_ptr<StreamTransfer> oldest();

  const std::shared_ptr<LeavingStorages> leaving_ = std::make_shared<LeavingStorages>();
  std::atomic<size_t> bound_;
  std::mutex mutex_;  // never held while a ticket is called
  std::deque<std::shared_ptr<StreamTransfer>> transfers_;
};

}  // namespace memswap
