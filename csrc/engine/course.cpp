#include "course.h"

#include <algorithm>
#include <cmath>

namespace memswap {

namespace {

// An iteration is another one than planned when the bytes that it saves differ by this share.
constexpr double kSizeTolerance = 1.0 / 4;

}  // namespace

const Plan::Place* Course::place(size_t index) const {
  const std::shared_ptr<const Plan>& plan = terms_.plan;
  return plan && index < plan->places.size() ? &plan->places[index] : nullptr;
}

void Course::note_resident(int64_t bytes) { peak_bytes_ = std::max(peak_bytes_, bytes); }

void Course::note_refused(int64_t away_bytes) {
  refused_ = true;
  pooled_bytes_ = std::max(pooled_bytes_, away_bytes);
}

void Course::begin_backward(size_t storages, int64_t away_bytes) {
  if (refused_) {
    pooled_bytes_ = std::max(pooled_bytes_, away_bytes);
  }
  if (!plans_all(storages)) {
    leave_plan();
  }
}

Outcome Course::outcome(int64_t nbytes, bool began_backward) const {
  Outcome found{.began_backward = began_backward,
                .unfit = unfit_,
                .refused = refused_,
                .pooled_bytes = pooled_bytes_,
                .peak_bytes = peak_bytes_,
                .no_recipe = no_recipe_};
  const std::optional<Expected>& expected = terms_.expected;
  if (!expected) {
    return found;
  }
  const double more = static_cast<double>(nbytes) - expected->nbytes;
  const bool resized = began_backward && std::abs(more) > kSizeTolerance * expected->nbytes;
  found.changed = !follows_plan() || resized;
  if (expected->budget_bytes) {
    const int64_t most = std::max(*expected->budget_bytes, limit_bytes());
    found.over_budget_bytes = std::max<int64_t>(peak_bytes_ - most, 0);
  }
  const int64_t limit = limit_bytes() != 0 ? limit_bytes() : expected->peak_bytes;
  found.unfit |= !found.changed && peak_bytes_ > limit;
  return found;
}

}  // namespace memswap
