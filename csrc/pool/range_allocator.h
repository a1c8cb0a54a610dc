// Which bytes of which slab are free. Arithmetic only: no memory is touched here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

namespace memswap {

using SlabId = uint64_t;

// `size` bytes from `offset` of one slab. Both are multiples of the allocator's alignment.
struct Range {
  SlabId slab = 0;
  size_t offset = 0;
  size_t size = 0;

  friend bool operator==(const Range&, const Range&) = default;
};

// Best fit over several slabs, neighbours joined at once when a range comes back. Among free ranges
// of the same size the oldest slab and the lowest offset win, so that younger slabs run empty and
// can be returned. Every operation is O(log n) in the number of free ranges.
//
// Not thread-safe: the pool holds its lock around it.
class RangeAllocator {
 public:
  static constexpr size_t kDefaultAlignment = 512;  // what device copy engines like best

  // `alignment` in bytes, a power of two.
  explicit RangeAllocator(size_t alignment = kDefaultAlignment);

  // Bytes that a request of `nbytes` takes up: the next multiple of the alignment, at least one.
  // Throws std::length_error where that does not fit size_t.
  size_t rounded(size_t nbytes) const;

  // Adds `size` free bytes, cut down to a multiple of the alignment. Throws std::invalid_argument
  // for an id that is already here.
  void add_slab(SlabId id, size_t size);

  // Forgets the slab if all of it is free, and says whether it did. Unknown ids give false.
  bool remove_slab(SlabId id);

  // Slabs that remove_slab would take, oldest first.
  std::vector<SlabId> free_slabs() const;

  // nullopt where no free range is long enough.
  std::optional<Range> allocate(size_t nbytes);

  // Takes back what allocate gave. Throws std::logic_error for a range that is (partly) free
  // already or lies outside its slab: going on would give one range to two owners. Returns the free
  // range that it is a part of now.
  Range free(const Range& range);

  size_t alignment() const { return alignment_; }
  size_t slabs() const { return slabs_.size(); }
  size_t total_bytes() const { return total_; }
  size_t free_bytes() const { return free_; }
  size_t used_bytes() const { return total_ - free_; }
  size_t free_ranges() const { return by_size_.size(); }
  size_t largest_free_range() const;

 private:
  struct SlabSize {
    size_t total = 0;
    size_t free = 0;
  };
  using Place = std::pair<SlabId, size_t>;                // slab, offset
  using SizedPlace = std::tuple<size_t, SlabId, size_t>;  // size, slab, offset

  void insert_free(SlabId slab, size_t offset, size_t size);

  size_t alignment_;
  std::map<SlabId, SlabSize> slabs_;
  std::map<Place, size_t> by_place_;  // every free range, with its size
  std::set<SizedPlace> by_size_;      // the same ranges, shortest first
  size_t total_ = 0;
  size_t free_ = 0;
};

}  // namespace memswap
