// One training step in columns: what is saved and demanded when, and what could be done with it.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "action.h"

namespace memswap {

// Instead of a mark, where there is none.
inline constexpr int32_t kNever = -1;

// Instead of a recipe's seconds, where a storage has no recipe.
inline constexpr double kNoRecipe = -1;

// What happens to one saved storage.
using PlannedAction = Action;

// Whether bytes cross the link.
constexpr bool moves(PlannedAction action) {
  return action == PlannedAction::kSwap || action == PlannedAction::kEncodeSwap;
}

// Whether the codec works on it.
constexpr bool coded(PlannedAction action) {
  return action == PlannedAction::kEncode || action == PlannedAction::kEncodeSwap;
}

// Marks are numbered from 0: first the saves in their order, then the first demands in theirs.
// Bytes are those of storages, seconds those of the device.
struct StepRecord {
  // One number per storage, in the order of the saves.
  std::vector<int64_t> nbytes;
  std::vector<int64_t> held_frame_nbytes;  // its frame with spare capacity
  std::vector<int64_t> overflow_nbytes;    // what its encode sets aside until the host has seen it
  std::vector<int32_t> held_until;         // the first mark at which the forward holds it no longer
  std::vector<int32_t> last_demand;        // the mark in whose course it is demanded last
  std::vector<int32_t> gone_after;         // the last mark at which it is there if it stays
  std::vector<double> recipe_s;            // what its recipe takes; kNoRecipe: it has none
  std::vector<int64_t> inner_nbytes;       // and has made beside the storage, at once
  std::vector<std::vector<int32_t>> recipe_sources;  // storages that its recipe reads
  std::vector<uint8_t> for_recipe;  // it is saved for recipes alone, and not where none is planned

  // One number per demand.
  std::vector<int32_t> order;  // which storage is demanded

  // One number per mark.
  std::vector<double> gaps_s;         // work before it
  std::vector<double> windows_s;      // of that, seconds in which the codec is free; may be empty
  std::vector<int64_t> extra_nbytes;  // what recomputed units have saved again; may be empty

  int32_t saves() const { return static_cast<int32_t>(nbytes.size()); }
  int32_t marks() const { return static_cast<int32_t>(nbytes.size() + order.size()); }

  // Throws std::invalid_argument where columns contradict each other.
  void check() const;
};

// One whose columns fit together.
struct CheckedStep : StepRecord {
  template <class... Columns>
  explicit CheckedStep(Columns&&... columns) : StepRecord{std::forward<Columns>(columns)...} {
    check();
  }
};

}  // namespace memswap
