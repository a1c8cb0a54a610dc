#include "slab_source.h"

#include <algorithm>
#include <exception>
#include <utility>

namespace memswap {

namespace {

// Runs `at_end` when the last share goes.
template <typename F>
std::shared_ptr<void> at_release(F at_end) {
  return std::shared_ptr<void>(nullptr, [at_end = std::move(at_end)](void*) { at_end(); });
}

}  // namespace

BudgetedSlabs::BudgetedSlabs(SlabSourcePtr upstream, size_t budget)
    : upstream_(std::move(upstream)),
      budget_(budget),
      out_(std::make_shared<std::atomic<size_t>>(0)) {}

size_t BudgetedSlabs::room() const {
  const size_t out = out_->load();
  return std::min(out < budget_ ? budget_ - out : 0, upstream_->room());
}

SlabResult BudgetedSlabs::acquire(size_t nbytes) {
  nbytes = upstream_->granted(nbytes);
  // The bytes are taken before the memory is, so that two threads cannot both have the last of it.
  size_t out = out_->load();
  do {
    if (out > budget_ || nbytes > budget_ - out) {
      return {nullptr, "the budget of " + std::to_string(budget_) +
                           " bytes is spent: " + std::to_string(out) + " bytes are in slabs and " +
                           std::to_string(nbytes) + " more were needed"};
    }
  } while (!out_->compare_exchange_weak(out, out + nbytes));
  auto lease = at_release([taken = out_, nbytes] { taken->fetch_sub(nbytes); });
  SlabResult result = upstream_->acquire(nbytes);
  if (result.slab) {
    result.slab->attach(std::move(lease));
  }
  return result;
}

CountedSlabs::CountedSlabs(SlabSourcePtr upstream)
    : upstream_(std::move(upstream)), state_(std::make_shared<State>()) {}

SlabResult CountedSlabs::acquire(size_t nbytes) {
  const auto start = std::chrono::steady_clock::now();
  SlabResult result = upstream_->acquire(nbytes);
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;

  std::shared_ptr<void> lease;
  {
    const std::lock_guard lock(state_->mutex);
    Counts& counts = state_->counts;
    counts.acquire_s += elapsed.count();
    if (!result.slab) {
      ++counts.refused;
      return result;
    }
    ++counts.acquired;
    ++counts.live;
    counts.bytes += result.slab->size();
    counts.peak_bytes = std::max(counts.peak_bytes, counts.bytes);
    lease = at_release([state = state_, size = result.slab->size()] {
      const std::lock_guard returned(state->mutex);
      --state->counts.live;
      state->counts.bytes -= size;
    });
  }
  result.slab->attach(std::move(lease));
  return result;
}

CountedSlabs::Counts CountedSlabs::counts() const {
  const std::lock_guard lock(state_->mutex);
  return state_->counts;
}

FallbackSlabs::FallbackSlabs(SlabSourcePtr upstream, std::chrono::milliseconds retry_after)
    : upstream_(std::move(upstream)), retry_after_(retry_after) {}

SlabResult FallbackSlabs::acquire(size_t nbytes) {
  {
    const std::lock_guard lock(mutex_);
    // Less than what failed may well be there.
    if (!last_failure_.empty() && nbytes >= failed_nbytes_ &&
        Clock::now() - failed_at_ < retry_after_) {
      return {nullptr, last_failure_};
    }
  }
  std::string failure;
  try {
    SlabResult result = upstream_->acquire(nbytes);
    const std::lock_guard lock(mutex_);
    last_failure_.clear();
    return result;
  } catch (const std::exception& error) {
    failure = error.what();
  } catch (...) {
    failure = "an unknown exception";
  }
  failure = "could not get a slab of " + std::to_string(nbytes) + " bytes: " + failure;
  const std::lock_guard lock(mutex_);
  last_failure_ = failure;
  failed_nbytes_ = nbytes;
  failed_at_ = Clock::now();
  return {nullptr, failure};
}

void FallbackSlabs::trim() {
  {
    const std::lock_guard lock(mutex_);
    last_failure_.clear();
  }
  upstream_->trim();
}

}  // namespace memswap
