#include "range_allocator.h"

#include <bit>
#include <iterator>
#include <limits>
#include <stdexcept>
#include <string>

namespace memswap {

RangeAllocator::RangeAllocator(size_t alignment) : alignment_(alignment) {
  if (!std::has_single_bit(alignment)) {
    throw std::invalid_argument("alignment must be a power of two, found " +
                                std::to_string(alignment));
  }
}

size_t RangeAllocator::rounded(size_t nbytes) const {
  if (nbytes > std::numeric_limits<size_t>::max() - (alignment_ - 1)) {
    throw std::length_error("a range of " + std::to_string(nbytes) + " bytes cannot be addressed");
  }
  const size_t size = (nbytes + alignment_ - 1) & ~(alignment_ - 1);
  return size == 0 ? alignment_ : size;
}

void RangeAllocator::add_slab(SlabId id, size_t size) {
  size &= ~(alignment_ - 1);
  if (!slabs_.try_emplace(id, SlabSize{.total = size, .free = size}).second) {
    throw std::invalid_argument("slab " + std::to_string(id) + " was added before");
  }
  if (size > 0) {
    insert_free(id, 0, size);
  }
  total_ += size;
  free_ += size;
}

bool RangeAllocator::remove_slab(SlabId id) {
  const auto slab = slabs_.find(id);
  if (slab == slabs_.end() || slab->second.free != slab->second.total) {
    return false;
  }
  const size_t size = slab->second.total;
  if (size > 0) {
    by_place_.erase(Place{id, 0});
    by_size_.erase(SizedPlace{size, id, 0});
  }
  slabs_.erase(slab);
  total_ -= size;
  free_ -= size;
  return true;
}

std::vector<SlabId> RangeAllocator::free_slabs() const {
  std::vector<SlabId> ids;
  for (const auto& [id, size] : slabs_) {
    if (size.free == size.total) {
      ids.push_back(id);
    }
  }
  return ids;
}

std::optional<Range> RangeAllocator::allocate(size_t nbytes) {
  const size_t size = rounded(nbytes);
  const auto best = by_size_.lower_bound(SizedPlace{size, 0, 0});
  if (best == by_size_.end()) {
    return std::nullopt;
  }
  const auto [found, slab, offset] = *best;
  by_size_.erase(best);
  by_place_.erase(Place{slab, offset});
  if (found > size) {
    insert_free(slab, offset + size, found - size);
  }
  slabs_.at(slab).free -= size;
  free_ -= size;
  return Range{.slab = slab, .offset = offset, .size = size};
}

Range RangeAllocator::free(const Range& range) {
  const auto slab = slabs_.find(range.slab);
  if (slab == slabs_.end() || range.size == 0 || range.size % alignment_ != 0 ||
      range.offset % alignment_ != 0 || range.size > slab->second.total ||
      range.offset > slab->second.total - range.size) {
    throw std::logic_error("freed a range that was never given out: slab " +
                           std::to_string(range.slab) + ", offset " + std::to_string(range.offset) +
                           ", " + std::to_string(range.size) + " bytes");
  }
  auto next = by_place_.lower_bound(Place{range.slab, range.offset});
  auto previous = next == by_place_.begin() ? by_place_.end() : std::prev(next);
  const bool has_next = next != by_place_.end() && next->first.first == range.slab;
  const bool has_previous = previous != by_place_.end() && previous->first.first == range.slab;
  if ((has_next && next->first.second < range.offset + range.size) ||
      (has_previous && previous->first.second + previous->second > range.offset)) {
    throw std::logic_error("freed a range twice: slab " + std::to_string(range.slab) + ", offset " +
                           std::to_string(range.offset) + ", " + std::to_string(range.size) +
                           " bytes");
  }

  size_t offset = range.offset;
  size_t size = range.size;
  if (has_next && next->first.second == range.offset + range.size) {
    size += next->second;
    by_size_.erase(SizedPlace{next->second, range.slab, next->first.second});
    by_place_.erase(next);
  }
  if (has_previous && previous->first.second + previous->second == range.offset) {
    offset = previous->first.second;
    size += previous->second;
    by_size_.erase(SizedPlace{previous->second, range.slab, offset});
    by_place_.erase(previous);
  }
  insert_free(range.slab, offset, size);
  slab->second.free += range.size;
  free_ += range.size;
  return Range{.slab = range.slab, .offset = offset, .size = size};
}

size_t RangeAllocator::largest_free_range() const {
  return by_size_.empty() ? 0 : std::get<0>(*by_size_.rbegin());
}

void RangeAllocator::insert_free(SlabId slab, size_t offset, size_t size) {
  by_place_.emplace(Place{slab, offset}, size);
  by_size_.emplace(size, slab, offset);
}

}  // namespace memswap
