// Which storages stay, so that all that backward needs can be had at the least cost.
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
    // Backward demands it.
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
  std::vector<size_t>
      saved;  // what is needed, in the order of the forward; backward's is the other
};

// What becomes of one storage.
enum class Fate : uint8_t {
  kUnused,     // nothing asks for it
  kKept,       // its bytes are kept, or are there anyway
  kMadeAgain,  // its call is made again, from what is kept or made again itself
};

// [Note: What stays is a cut]
// Each storage is two nodes, "it is had" and "it is made again", each call one: "it is made". A
// node on the sink's side means yes. Three edges make wrong answers impossible: what is needed is
// had; what is made again, or read by a call that is made, is had; what is made again has its call
// made. The others cost: what is had and is not made again is kept, for its bytes; a call that is
// made takes its time. So each cut is one way to have everything, and the minimum one the cheapest.
// (Where two cost the same, more is made again, and less kept.)
//
// A row of calls is made at one demand. It has `deepest` calls at most, and what backward needs of
// their results is there from then on, beside all that is kept. So rows also end where that makes
// the peak lower, in the forward or in backward. Where a row would be longer, what stands there is
// not made again, and the cut is looked for once more.

// The fate of each storage, in the order of the graph's. What is needed can be kept (`keep_cost`),
// and no call reads what it makes, also by way of others.
std::vector<Fate> cheapest_set(const MakingGraph& graph, int deepest);

// What a choice costs: bytes that are kept, but for what is there anyway, and calls that are made,
// once each.
int64_t cost_of(const MakingGraph& graph, const std::vector<Fate>& fates);

// The most bytes that are there at once, in a forward and a backward that demands what was saved
// last first.
int64_t peak_of(const MakingGraph& graph, const std::vector<Fate>& fates);

}  // namespace memswap
