// Streak: iterations in a row that follow one plan, and go as planned.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "course.h"
#include "iteration.h"

namespace memswap {

// [Note: Asked when something changed]
// When a forward begins, whoever directs has two questions: how did those before it go, and what is
// this one to do? Where all went as planned, the answers are those of the last time. So whoever
// directs says once which plan is followed, by how many forwards, and how many of these may be in
// flight at a time; and is asked again by the first one that finds something else. Until then this
// counts, and whoever is asked takes over what was counted.
//
// The engine's lock serialises the calls.
class Streak {
 public:
  struct Terms {
    int64_t forwards = 1;       // that begin without asking, the first one included
    size_t in_flight = 1;       // of them, at a time
    int64_t leaving_bytes = 0;  // that may leave at once; 0: as many as the timeline says
  };

  // What nobody has taken over yet.
  struct Seen {
    int64_t forwards = 1;  // that began, whether they saved something or not
    // Of them, those that are not mostly alive any more: most of their backward is over. They went
    // as planned.
    int64_t ended = 0;
    // The others that saved something, in the order in which they began. How they go is not known.
    std::vector<IterationPtr> in_flight;
    size_t most_in_flight = 0;
    int64_t peak_bytes = 0;  // resident ones, the most of those that ended
  };

  // `first` has just begun, and follows its plan.
  Streak(const IterationPtr& first, const Terms& terms);

  // A new forward begins. Whether it follows the plan, as those before it did.
  bool extend(const IterationPtr& begun);
  // Nobody follows the plan from here on without being told to. Of an iteration that has saved
  // nothing, it is not known yet what it is: it follows none.
  Seen end();
  size_t in_flight() const { return seen_.in_flight.size(); }

  const Terms terms;

 private:
  const Course::Terms course_;  // of all of them
  Seen seen_;
};

}  // namespace memswap
