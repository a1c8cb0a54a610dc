#include "needs.h"

#include <algorithm>

namespace memswap {

Needs::Needs(const StepRecord& step, std::span<const PlannedAction> actions)
    : step_(step),
      actions_(actions),
      first_(step.saves(), kNever),
      is_read_(step.saves(), false),
      last_use_(step.last_demand),
      last_reader_(step.saves(), kNever),
      gone_after_(step.gone_after),
      at_(step.order.size()) {
  for (int32_t index = 0; index < step.saves(); ++index) {
    if (step.for_recipe[index] != 0) {
      gone_after_[index] = index;
    }
  }
  for (size_t place = 0; place < at_.size(); ++place) {
    need(step.order[place], static_cast<int32_t>(place));
  }
  std::vector<int32_t> readers;  // what a recipe reads before the recipe
  std::vector<uint8_t> seen(step.saves(), false);
  for (int32_t index = 0; index < step.saves(); ++index) {
    add_reader(index, seen, readers);
  }
  for (auto reader = readers.rbegin(); reader != readers.rend(); ++reader) {
    extend_sources(*reader);
  }
  find_last_readers();
}

void Needs::need(int32_t index, int32_t place) {
  if (first_[index] != kNever) {
    return;
  }
  first_[index] = place;
  if (recomputed(index)) {
    for (const int32_t source : step_.recipe_sources[index]) {
      need(source, place);
    }
  }
  at_[place].push_back(index);
}

void Needs::add_reader(int32_t index, std::vector<uint8_t>& seen,
                       std::vector<int32_t>& readers) const {
  if (seen[index] || !recomputed(index)) {
    return;
  }
  seen[index] = true;
  for (const int32_t source : step_.recipe_sources[index]) {
    add_reader(source, seen, readers);
  }
  readers.push_back(index);
}

// What a recipe reads is there until the recipe has run, and its graph's for as long as that is.
// What the step itself never demands is there to the end once it has come back.
void Needs::extend_sources(int32_t reader) {
  const int32_t runs = first_[reader];
  for (const int32_t source : step_.recipe_sources[reader]) {
    is_read_[source] = true;
    const bool recipes_only = step_.for_recipe[source] != 0;
    const bool demanded = (step_.last_demand[source] != kNever || recipes_only) && runs != kNever;
    last_use_[source] =
        demanded ? std::max(last_use_[source], step_.saves() + runs) : step_.marks();
    const bool to_the_end = gone_after_[source] == kNever || gone_after_[reader] == kNever;
    gone_after_[source] = to_the_end ? kNever : std::max(gone_after_[source], gone_after_[reader]);
  }
}

// In the order in which recipes run.
void Needs::find_last_readers() {
  for (const std::vector<int32_t>& needed : at_) {
    for (const int32_t reader : needed) {
      if (!recomputed(reader)) {
        continue;
      }
      for (const int32_t source : step_.recipe_sources[reader]) {
        const int32_t runs = step_.saves() + first_[reader];
        const bool last = last_use_[source] == runs && step_.last_demand[source] < runs;
        last_reader_[source] = last ? reader : kNever;
      }
    }
  }
}

}  // namespace memswap
