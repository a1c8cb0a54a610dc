// Plan: what happens to each storage of an iteration, as data. Why it says what it says is not
// known here; the planner that makes it is python/memswap/planning.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "action.h"

namespace memswap {

struct Plan {
  // One storage, in the order of saving: what it is expected to be, and what happens to it.
  struct Place {
    std::string unit;
    int64_t ordinal = 0;
    int64_t nbytes = 0;
    c10::ScalarType dtype = c10::ScalarType::Undefined;
    std::optional<Action> action;  // nothing: somebody is asked
    // After its save: places whose sends, and whose frames' way to a pool, are waited for.
    std::vector<size_t> releases, departures;
    // At its first demand: places that start back.
    std::vector<size_t> fetches;
    // After a demand: its frame is waited for, if it is on its way still.
    bool departs = false;
    // Bytes that its frame may take; nothing: no frame is planned. A storage that does not become
    // one is swapped as it is.
    std::optional<int64_t> frame_nbytes;
    // A recipe saves it: that of the next place for which this is not so.
    bool for_recipe = false;
  };

  c10::Device device;
  int64_t least_bytes = 0;  // of a storage that it knows
  std::vector<Place> places;

  // A plan that was checked.
  static std::shared_ptr<Plan> make(c10::Device device, int64_t least_bytes,
                                    std::vector<Place> places);
  // Throws std::invalid_argument where places refer to others that are not there, or not yet.
  void check() const;
};

}  // namespace memswap
