// What checkpoint regions that are off were called with in one iteration.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "entry.h"
#include "iteration_record.h"

namespace memswap {

class RegionCalls {
 public:
  // A region is called with these tensors; storages of fewer bytes than `least_bytes` do not count.
  // Those that the iteration has saved are known by their places.
  void add(std::string unit, const std::vector<at::Tensor>& inputs, const Iteration& of,
           int64_t least_bytes);
  // A storage is saved for the first time.
  void saved(const Entry& entry);

  // All calls, one region after another.
  std::vector<IterationRecord::Region> found() const;

 private:
  struct Input {
    std::string unit;
    WeakStorage storage;  // keeps its key from being used again
    int64_t nbytes;
    std::optional<size_t> place;  // once it is saved
  };

  std::vector<Input> inputs_;
};

}  // namespace memswap
