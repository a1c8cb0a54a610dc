#include "spare_slabs.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

namespace memswap {
namespace {

constexpr size_t kGiB = size_t{1} << 30;
constexpr size_t kSpareShare = 16;
constexpr size_t kMostSpare = 8 * kGiB;

// So many processes may look at the same moment and take a slab each without passing the spare.
constexpr size_t kTakersAtOnce = 16;

// Of what may be locked, this part is left for the program's own.
constexpr size_t kLockShare = 16;

// A process that holds the lock pins one slab, which takes a second at most; one that does not end
// (it was stopped) is not waited for.
constexpr std::chrono::seconds kLongestWait{10};
constexpr std::chrono::milliseconds kPause{2};

// Exclusive among processes that lock the same folder, as long as it lives; nothing is written.
class FolderLock {
 public:
  explicit FolderLock(const std::string& folder)
      : descriptor_(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {
    const auto until = std::chrono::steady_clock::now() + kLongestWait;
    while (descriptor_ >= 0 && flock(descriptor_, LOCK_EX | LOCK_NB) != 0 &&
           std::chrono::steady_clock::now() < until) {
      std::this_thread::sleep_for(kPause);
    }
  }
  ~FolderLock() {
    if (descriptor_ >= 0) {
      close(descriptor_);
    }
  }
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

 private:
  const int descriptor_;
};

// The system counts a page when it is touched first.
void touch(Slab& slab) {
  auto* const first = static_cast<volatile std::byte*>(slab.data());
  if (first == nullptr) {
    return;
  }
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  for (size_t at = 0; at < slab.size(); at += page) {
    first[at] = std::byte{0};
  }
}

std::string in_mib(size_t nbytes) { return std::to_string(nbytes >> 20) + " MiB"; }

}  // namespace

SpareSlabs::SpareSlabs(SlabSourcePtr upstream, Options options)
    : upstream_(std::move(upstream)), options_(std::move(options)) {}

size_t SpareSlabs::spare(size_t whole, Memory memory) {
  const size_t pinned = std::min(whole / kSpareShare, kMostSpare);
  return memory == Memory::kPinned ? pinned : pinned / 2;
}

std::string SpareSlabs::why_not(const HostLimits& limits, size_t nbytes) const {
  const size_t spare = SpareSlabs::spare(limits.whole(), options_.memory);
  if (const size_t free = limits.free(); free < nbytes || free - nbytes < spare) {
    return in_mib(nbytes) + " more would leave less than " + in_mib(spare) +
           " of host memory to everybody else: " + in_mib(free) + " are left " +
           (limits.group && *limits.group == free ? "in the control group" : "on the machine");
  }
  if (counts_as_locked_ && limits.lockable) {
    const size_t most = *limits.lockable - *limits.lockable / kLockShare;
    if (limits.locked > most || nbytes > most - limits.locked) {
      return "pinned memory counts as locked here, of which this process may have " +
             in_mib(*limits.lockable) + " (ulimit -l) and has " + in_mib(limits.locked) + "; " +
             in_mib(nbytes) + " more were needed";
    }
  }
  return {};
}

SlabResult SpareSlabs::acquire(size_t nbytes) {
  nbytes = upstream_->granted(nbytes);
  std::optional<FolderLock> lock;
  HostLimits limits = options_.look();
  const size_t spare = SpareSlabs::spare(limits.whole(), options_.memory);
  if (!options_.folder.empty() && limits.free() / kTakersAtOnce < nbytes + spare / kTakersAtOnce) {
    lock.emplace(options_.folder);
    limits = options_.look();
  }
  if (std::string refusal = why_not(limits, nbytes); !refusal.empty()) {
    return {nullptr, std::move(refusal)};
  }
  SlabResult result = upstream_->acquire(nbytes);
  if (!result.slab) {
    return result;
  }
  if (options_.memory == Memory::kOrdinary && lock) {
    touch(*result.slab);
  }
  if (options_.memory == Memory::kPinned && limits.lockable && !counts_as_locked_) {
    const size_t now = options_.look().locked;
    counts_as_locked_ = now > limits.locked && now - limits.locked >= nbytes / 2;
  }
  return result;
}

PageableSlabs::PageableSlabs(SlabSourcePtr pinned, SlabSourcePtr ordinary)
    : pinned_(std::make_shared<FallbackSlabs>(std::move(pinned))), ordinary_(std::move(ordinary)) {}

SlabResult PageableSlabs::acquire(size_t nbytes) {
  SlabResult result = pinned_->acquire(nbytes);
  if (result.slab) {
    return result;
  }
  SlabResult second = ordinary_->acquire(pinned_->granted(nbytes));
  if (second.slab) {
    second.why_pageable = std::move(result.refusal);
  } else {
    second.refusal = result.refusal + "; and of memory that is not pinned: " + second.refusal;
  }
  return second;
}

}  // namespace memswap
