#include "held_at_peak.h"

#include <algorithm>
#include <optional>

#include "running_peak.h"

namespace memswap {

void HeldAtPeak::saved(size_t index, int64_t nbytes, int64_t frame_nbytes, bool stays,
                       int64_t most_bytes) {
  if (index >= saved_.size()) {
    saved_.resize(index + 1);
    most_bytes_.resize(index + 1);
  }
  saved_[index] = {nbytes, frame_nbytes, stays};
  most_bytes_[index] = most_bytes;
  if (stays) {
    held_.push_back(index);
  }
}

void HeldAtPeak::let_go(size_t index) {
  if (index < saved_.size() && saved_[index].let_go_at == kNever) {
    saved_[index].let_go_at = most_bytes_.size();
    std::erase(held_, index);
  }
}

void HeldAtPeak::demanded(size_t index, int64_t most_bytes) {
  if (index < saved_.size() && saved_[index].demanded_at == kNever) {
    saved_[index].demanded_at = most_bytes_.size();
    most_bytes_.push_back(most_bytes);
  }
}

namespace {

std::vector<int64_t> differences(const std::vector<int64_t>& numbers) {
  std::vector<int64_t> found;
  int64_t before = 0;
  for (const int64_t number : numbers) {
    found.push_back(number - before);
    before = number;
  }
  return found;
}

}  // namespace

HeldAtPeak::Frames HeldAtPeak::best() const {
  if (std::ranges::none_of(saved_, [](const Saved& one) { return one.frame_nbytes > 0; })) {
    return {};
  }
  RunningPeak peak(differences(most_bytes_));
  std::vector<bool> stays;
  for (const Saved& one : saved_) {
    stays.push_back(one.stays);
  }
  // What is a frame stays, or the other way round.
  const auto turn = [&](size_t index) {
    const Saved& one = saved_[index];
    const int64_t sign = stays[index] ? -1 : 1;
    peak.add(index, -sign * one.frame_nbytes);
    peak.add(one.gone_at(), sign * one.nbytes);
    if (one.demanded_at != kNever) {
      peak.add(one.demanded_at, -sign * one.nbytes);
      peak.add(one.demanded_at + 1, sign * one.frame_nbytes);
    }
    stays[index] = !stays[index];
  };
  // Whether that takes something off a mark.
  const auto lowers = [&](size_t index, size_t mark) {
    const Saved& one = saved_[index];
    const bool gone = one.gone_at() <= mark && mark < one.demanded_at;
    return one.frame_nbytes > 0 && index <= mark && gone == stays[index];
  };
  for (bool lower = true; lower;) {
    std::optional<size_t> best;
    int64_t lowest = peak.peak();
    const size_t mark = peak.place();
    for (size_t index = 0; index < saved_.size(); ++index) {
      if (lowers(index, mark)) {
        turn(index);
        if (peak.peak() < lowest) {
          lowest = peak.peak();
          best = index;
        }
        turn(index);
      }
    }
    lower = best.has_value();
    if (best) {
      turn(*best);
    }
  }
  Frames found;
  for (size_t index = 0; index < saved_.size(); ++index) {
    if (stays[index]) {
      found.emplace(index, saved_[index].frame_nbytes);
    }
  }
  return found;
}

}  // namespace memswap
