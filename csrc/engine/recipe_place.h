// Where a storage is saved: the same program saves it at the same place in each iteration.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/hash.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace memswap {

struct RecipePlace {
  bool operator==(const RecipePlace&) const = default;

  std::string unit;
  int64_t number;  // among what one call of the unit saves
  int64_t nbytes;
  c10::ScalarType dtype;
  int64_t time = 0;  // of several that are saved together: which one
};

struct RecipePlaceHash {
  size_t operator()(const RecipePlace& place) const {
    return c10::get_hash(place.unit, place.number, place.nbytes, static_cast<int>(place.dtype),
                         place.time);
  }
};

}  // namespace memswap
