// Where a pool's memory comes from, and thin layers around a source.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace memswap {

// One large piece of memory (or of a file). Its destructor returns it to where it came from.
// Transfers of disjoint ranges may run on several threads at once.
class Slab {
 public:
  Slab() = default;
  Slab(const Slab&) = delete;
  Slab& operator=(const Slab&) = delete;
  virtual ~Slab() = default;

  virtual size_t size() const = 0;  // bytes

  // First byte in host memory, or nullptr where the slab is not addressable (a file).
  virtual void* data() const = 0;

  // Whether a device copies to and from the slab by itself (page-locked memory).
  virtual bool pinned() const { return false; }

  // Move `nbytes` bytes between the slab at `offset` and host memory of the caller; block the
  // calling thread; throw TransferError. A write may also overwrite what lies between the end of
  // the bytes and the next multiple of the alignment that the pool was made with.
  virtual void write(size_t offset, const void* source, size_t nbytes) = 0;
  virtual void read(size_t offset, void* destination, size_t nbytes) = 0;

  // Nobody reads this range any more until it has been written again. Its memory may go.
  virtual void forget(size_t offset, size_t nbytes) {
    (void)offset;
    (void)nbytes;
  }

  // Keeps `share` until the memory has been returned: how a layer learns of the return.
  void attach(std::shared_ptr<void> share) { attached_.push_back(std::move(share)); }

 private:
  std::vector<std::shared_ptr<void>> attached_;  // a base is destroyed after what derives from it
};

// Either a slab or, in words for the user, why there is none.
struct SlabResult {
  std::unique_ptr<Slab> slab;
  std::string refusal;
  // Of a slab that was to be pinned and is not: what pinning was refused with.
  std::string why_pageable = {};
};

// Thread-safe. A source may be dropped before its slabs.
class SlabSource {
 public:
  SlabSource() = default;
  SlabSource(const SlabSource&) = delete;
  SlabSource& operator=(const SlabSource&) = delete;
  virtual ~SlabSource() = default;

  // At least `nbytes` bytes. May take milliseconds per MiB (page locking); no lock of a pool is
  // held by the caller. A source at the bottom throws what the system says; see FallbackSlabs.
  virtual SlabResult acquire(size_t nbytes) = 0;

  // Bytes that acquire(nbytes) takes from the system: nbytes and what the system rounds it up by.
  // The slab has all of them.
  virtual size_t granted(size_t nbytes) const { return nbytes; }

  // Bytes that a budget still allows; the system may have fewer.
  virtual size_t room() const { return std::numeric_limits<size_t>::max(); }

  // Gives memory that returned slabs have left in a cache below back to the system.
  virtual void trim() {}
};
using SlabSourcePtr = std::shared_ptr<SlabSource>;

// Never lets more than `budget` bytes be out at a time. Refuses, does not throw.
class BudgetedSlabs final : public SlabSource {
 public:
  BudgetedSlabs(SlabSourcePtr upstream, size_t budget);

  SlabResult acquire(size_t nbytes) override;
  size_t granted(size_t nbytes) const override { return upstream_->granted(nbytes); }
  size_t room() const override;
  void trim() override { upstream_->trim(); }

 private:
  SlabSourcePtr upstream_;
  size_t budget_;
  std::shared_ptr<std::atomic<size_t>> out_;  // shared with the slabs, which may live longer
};

// Counts what passes.
class CountedSlabs final : public SlabSource {
 public:
  struct Counts {
    size_t live = 0;        // slabs
    size_t bytes = 0;       // of live slabs
    size_t peak_bytes = 0;  // highest `bytes`
    size_t acquired = 0;    // slabs so far
    size_t refused = 0;     // acquires without a slab
    double acquire_s = 0;   // seconds spent below in acquire, refused ones included
  };

  explicit CountedSlabs(SlabSourcePtr upstream);

  SlabResult acquire(size_t nbytes) override;
  size_t granted(size_t nbytes) const override { return upstream_->granted(nbytes); }
  size_t room() const override { return upstream_->room(); }
  void trim() override { upstream_->trim(); }

  Counts counts() const;

 private:
  struct State {
    std::mutex mutex;
    Counts counts;
  };

  SlabSourcePtr upstream_;
  std::shared_ptr<State> state_;
};

// Turns what the source below throws into a refusal with the same words. A driver that could not
// pin memory takes long to say so again, so after a failure the answer is repeated for
// `retry_after` without asking; trim() asks anew.
class FallbackSlabs final : public SlabSource {
 public:
  explicit FallbackSlabs(SlabSourcePtr upstream,
                         std::chrono::milliseconds retry_after = std::chrono::milliseconds(1000));

  SlabResult acquire(size_t nbytes) override;
  size_t granted(size_t nbytes) const override { return upstream_->granted(nbytes); }
  size_t room() const override { return upstream_->room(); }
  void trim() override;

 private:
  using Clock = std::chrono::steady_clock;

  SlabSourcePtr upstream_;
  std::chrono::milliseconds retry_after_;
  std::mutex mutex_;
  std::string last_failure_;  // empty: the last acquire did not throw
  size_t failed_nbytes_ = 0;
  Clock::time_point failed_at_;
};

}  // namespace memswap
