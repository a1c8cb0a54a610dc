// The largest running sum of a row of numbers, while single numbers change.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace memswap {

// Adding to one number takes the logarithm of their count, asking takes no time.
class RunningPeak {
 public:
  explicit RunningPeak(const std::vector<int64_t>& numbers)
      : leaves_(std::bit_ceil(std::max<size_t>(numbers.size(), 1))),
        count_(numbers.size()),
        nodes_(2 * leaves_) {
    for (size_t place = 0; place < count_; ++place) {
      nodes_[leaves_ + place] = {numbers[place], numbers[place]};
    }
    for (size_t node = leaves_ - 1; node > 0; --node) {
      join(node);
    }
  }

  // From this place on, all running sums are larger by so much. A place beyond the last one: none.
  void add(size_t place, int64_t more) {
    if (place >= count_) {
      return;
    }
    size_t node = leaves_ + place;
    nodes_[node].sum += more;
    nodes_[node].peak += more;
    while (node > 1) {
      node /= 2;
      join(node);
    }
  }

  // The largest running sum; less than any number of bytes if there are no numbers.
  int64_t peak() const { return nodes_[1].peak; }

  // The first place whose running sum that is; 0 if there are no numbers.
  size_t place() const {
    size_t node = 1;
    while (node < leaves_) {
      const Node& left = nodes_[2 * node];
      node = 2 * node + (left.peak == nodes_[node].peak ? 0 : 1);
    }
    return node - leaves_;
  }

 private:
  struct Node {
    int64_t sum = 0;
    int64_t peak = kNone;
  };
  // Less than any sum of bytes, and far from the end of what the type holds.
  static constexpr int64_t kNone = INT64_MIN / 2;

  void join(size_t node) {
    const Node& left = nodes_[2 * node];
    const Node& right = nodes_[2 * node + 1];
    nodes_[node] = {left.sum + right.sum, std::max(left.peak, left.sum + right.peak)};
  }

  size_t leaves_;
  size_t count_;
  std::vector<Node> nodes_;
};

}  // namespace memswap
