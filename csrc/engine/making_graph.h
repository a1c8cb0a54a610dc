// What a forward made of what, and what could become of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace memswap {

// What a forward did, as far as its results can be had again: storages, and the calls that made
// them. Costs are in bytes; what a call takes is weighed against them (MakingGraph::Call::cost).
struct MakingGraph {
  struct Storage {
    int64_t nbytes = 0;  // when it is there
    // Bytes that it takes to keep it; nothing: it cannot be kept.
    std::optional<int64_t> keep_cost;
    // Which of the calls made it; nothing: it cannot be made again.
    std::optional<size_t> maker;
    // Backward demands it. Then it can be kept.
    bool needed = false;
    // It is there whatever is chosen: a parameter, or what stays for another reason.
    bool there = false;
  };

  struct Call {
    int64_t cost;
    std::vector<size_t> inputs;  // storages
  };

  std::vector<Storage> storages;
  std::vector<Call> calls;
  // What is needed, as often as it is saved, in the order of the forward. Backward's is the other.
  std::vector<size_t> saved;
};

// What becomes of one storage.
enum class Fate : uint8_t {
  kUnused,     // nothing asks for it
  kKept,       // its bytes are kept, or are there anyway
  kMadeAgain,  // its call is made again, from what is kept or made again itself
};

// Of each storage.
using Fates = std::vector<Fate>;

}  // namespace memswap
