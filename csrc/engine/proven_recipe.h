// A recipe that is proven, for who plans with it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace memswap {

struct ProvenRecipe {
  std::string words;
  double seconds;
  int64_t made_nbytes;  // the most that it has made at once, its result included
  // What stands for each "saved" and "kept" of the words: one of the storages that this iteration
  // has saved, or nothing where it is none of them.
  std::vector<std::optional<size_t>> saved;
};

}  // namespace memswap
