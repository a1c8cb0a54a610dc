// Slabs that leave the machine some memory.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <string>

#include "host_limits.h"
#include "slab_source.h"

namespace memswap {

// [Note: What ends a process]
// Linux refuses hardly any allocation; it ends a process when pages are touched that are not there,
// and pinned pages are never given up for others. A budget is a number from when the pool was made.
// So before each slab the system is asked what is left now, and a slab is refused that would leave
// less than a spare: a sixteenth of the machine (or of the control group), at most 8 GiB, and half
// of that for memory that can still be swapped or was never touched.
//
// The account that all processes of a machine share is the system's own: what one has taken, the
// others find missing. Nothing is written down, so nothing of a process that dies is left there.
// Where so little is left that processes which look at the same time could take it twice, they
// take it one after another: whoever takes holds a lock on a folder that all of them see (flock),
// which the system lets go of when the process ends, however it ends.
//
// RLIMIT_MEMLOCK counts what is locked by mlock. Some drivers pin like that and some do not, so the
// first pinned slab shows which this one is: whether the system counted it.
class SpareSlabs final : public SlabSource {
 public:
  enum class Memory { kPinned, kOrdinary };

  struct Options {
    Memory memory = Memory::kPinned;
    std::function<HostLimits()> look = [] { return host_limits(); };
    std::string folder = "/dev/shm";  // empty: no lock
  };

  SpareSlabs(SlabSourcePtr upstream, Options options);

  // Bytes that a slab leaves at least, on a machine or in a group with `whole` of them.
  static size_t spare(size_t whole, Memory memory);

  SlabResult acquire(size_t nbytes) override;
  size_t granted(size_t nbytes) const override { return upstream_->granted(nbytes); }
  size_t room() const override { return upstream_->room(); }
  void trim() override { upstream_->trim(); }

 private:
  std::string why_not(const HostLimits& limits, size_t nbytes) const;

  const SlabSourcePtr upstream_;
  const Options options_;
  std::atomic<bool> counts_as_locked_{false};
};

// Pinned memory, or ordinary memory where none can be pinned: a slower way that is always there.
// Each slab of the second kind comes with the reason (SlabResult::why_pageable).
class PageableSlabs final : public SlabSource {
 public:
  PageableSlabs(SlabSourcePtr pinned, SlabSourcePtr ordinary);

  SlabResult acquire(size_t nbytes) override;
  size_t granted(size_t nbytes) const override { return pinned_->granted(nbytes); }
  size_t room() const override { return pinned_->room(); }
  void trim() override { pinned_->trim(); }

 private:
  const SlabSourcePtr pinned_;  // refuses, does not throw
  const SlabSourcePtr ordinary_;
};

}  // namespace memswap
