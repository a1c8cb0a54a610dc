#include "pool.h"

#include <utility>

#include "pool_core.h"
#include "work/leak.h"

namespace memswap {

Pool::Pool(SlabSourcePtr source, PoolOptions options)
    : core_(std::make_shared<PoolCore>(std::move(source), options)) {
  if (options.grow_ahead_bytes > 0) {
    start_background();
  }
}

Pool::~Pool() {
  if (!forked()) {
    stop_background();
    return;
  }
  // A forked child has no background thread to join, and destroying the condition that it waited
  // on would wait for it.
  leak(std::move(grower_));
  leak(std::shared_ptr<PoolCore>(core_));
}

bool Pool::forked() const { return core_->forked(); }

BlockPtr Pool::allocate(size_t nbytes) {
  if (forked()) {
    return nullptr;
  }
  BlockPtr block = core_->allocate(nbytes);
  return block || !overflow_ ? std::move(block) : overflow_->allocate(nbytes);
}

void Pool::reserve(size_t nbytes) {
  if (!forked()) {
    start_background();
    core_->ask_reserve(nbytes);
  }
}

bool Pool::wait_reserved() { return !forked() && core_->wait_background(); }

size_t Pool::trim() { return forked() ? 0 : core_->trim(); }

PoolStatistics Pool::statistics() const {
  if (forked()) {
    PoolStatistics nothing;
    nothing.last_refusal =
        "the pool belongs to the process that this one was forked from; make a pool in this one";
    return nothing;
  }
  return core_->statistics();
}

void Pool::start_background() {
  const std::lock_guard lock(grower_mutex_);
  if (!grower_.joinable() && !stopped_) {
    grower_ = std::thread([core = core_] { core->run_background(); });
  }
}

void Pool::stop_background() {
  core_->ask_stop();
  const std::lock_guard lock(grower_mutex_);
  stopped_ = true;
  if (grower_.joinable()) {
    grower_.join();
  }
}

}  // namespace memswap
