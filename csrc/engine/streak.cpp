#include "streak.h"

#include <algorithm>
#include <utility>

namespace memswap {

Streak::Streak(const IterationPtr& first, const Terms& terms)
    : terms(terms), course_(first->course.terms()), seen_{.in_flight = {first}} {}

bool Streak::extend(const IterationPtr& begun) {
  std::vector<IterationPtr> waiting;
  int64_t peak_bytes = seen_.peak_bytes;
  for (const IterationPtr& one : seen_.in_flight) {
    if (one->mostly_alive()) {
      waiting.push_back(one);
      continue;
    }
    if (!one->outcome().as_planned()) {
      return false;
    }
    peak_bytes = std::max(peak_bytes, one->course.peak_bytes());
  }
  if (seen_.forwards == terms.forwards || waiting.size() >= terms.in_flight) {
    return false;
  }
  begun->course.set_terms(course_);
  seen_.most_in_flight = std::max(seen_.most_in_flight, seen_.in_flight.size());
  seen_.ended += static_cast<int64_t>(seen_.in_flight.size() - waiting.size());
  seen_.peak_bytes = peak_bytes;
  ++seen_.forwards;
  waiting.push_back(begun);
  seen_.in_flight = std::move(waiting);
  return true;
}

Streak::Seen Streak::end() {
  const IterationPtr& last = seen_.in_flight.back();
  if (last->size() == 0) {
    last->course.set_terms({});
    seen_.in_flight.pop_back();
  }
  seen_.most_in_flight = std::max(seen_.most_in_flight, seen_.in_flight.size());
  return std::exchange(seen_, {});
}

}  // namespace memswap
