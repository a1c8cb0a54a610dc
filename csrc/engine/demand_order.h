// The order of an iteration's saves and demands, how far ahead of the demands bytes come back, and
// what that says about the next iteration. Numbers only: storages are known by their places in the
// order of saving.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <stdexcept>
#include <vector>

#include "held_at_peak.h"

namespace memswap {

class DemandOrder {
 public:
  // Bytes of several storages, and of the largest of them.
  struct Share {
    int64_t nbytes = 0;
    int64_t most = 0;
  };

  // The next storage. `decoded`: its bytes would be encoded where they are.
  void save(int64_t nbytes, bool decoded) {
    saved_.push_back({nbytes, kNever, decoded, false});
    Share& share = decoded ? decoded_ : raw_;
    share.nbytes += nbytes;
    share.most = std::max(share.most, nbytes);
  }

  size_t size() const { return saved_.size(); }
  int64_t nbytes(size_t index) const { return saved_.at(index).nbytes; }
  std::vector<int64_t> sizes() const {
    std::vector<int64_t> all;
    for (const Saved& saved : saved_) {
      all.push_back(saved.nbytes);
    }
    return all;
  }
  const Share& raw() const { return raw_; }
  const Share& decoded() const { return decoded_; }

  // A storage is demanded. Whether for the first time.
  bool demand(size_t index) {
    Saved& saved = saved_.at(index);
    if (saved.demanded) {
      return false;
    }
    saved.demanded = true;
    demanded_.push_back(index);
    return true;
  }
  bool was_demanded(size_t index) const { return saved_.at(index).demanded; }
  const std::vector<size_t>& demanded() const { return demanded_; }

  // A window opens: an operator is launched, and about so many bytes can be decoded beside it; 0
  // before its duration is known.
  void open_window(double room_bytes) {
    if (!saved_.empty() && demanded_.size() == saved_.size()) {
      return;  // nothing is left to be decoded beside it
    }
    if (!windows_.empty() && windows_.back().saved == saved_.size() &&
        windows_.back().demanded == demanded_.size()) {
      windows_.back().room_bytes += room_bytes;  // nothing lies between the two
      windows_.back().timed = windows_.back().timed && room_bytes > 0;
      return;
    }
    windows_.push_back({saved_.size(), demanded_.size(), room_bytes, room_bytes > 0});
  }

  // How many bytes ahead of the latest demand must be known to come, so that every decode starts
  // with a window and has ended when its storage is demanded; as the windows of this backward would
  // have had it, and before that those of the forward. 0: there were none.
  int64_t bytes_ahead() const;

  // Demands are expected in this order from here on, and `prefetch_bytes` bytes ahead of the latest
  // one. Throws std::invalid_argument unless each storage so far is in it once.
  void expect(std::vector<size_t> order, int64_t prefetch_bytes) {
    std::vector<size_t> ranks(size(), kNever);
    std::vector<int64_t> before{0};
    for (size_t rank = 0; rank < order.size(); ++rank) {
      if (order[rank] >= size() || ranks[order[rank]] != kNever) {
        throw std::invalid_argument("an order of demands names each storage of its iteration once");
      }
      ranks[order[rank]] = rank;
      before.push_back(before.back() + saved_[order[rank]].nbytes);
    }
    if (order.size() != size()) {
      throw std::invalid_argument("an order of demands names all storages of its iteration");
    }
    for (size_t index = 0; index < size(); ++index) {
      saved_[index].rank = ranks[index];
    }
    expected_ = std::move(order);
    bytes_before_ = std::move(before);
    prefetch_bytes_ = prefetch_bytes;
    frontier_ = 0;
  }
  bool expects_all() const { return expected_.size() == size(); }

  // What newly lies within these bytes now that a storage is demanded, after expect(). What is
  // decoded lies beside its frame until it has been used, and takes a part of them.
  std::span<const size_t> advance(size_t index) {
    const Saved& saved = saved_.at(index);
    const int64_t beside = saved.decoded ? saved.nbytes : 0;
    const size_t next = saved.rank + 1;
    const size_t first = std::max(next, frontier_);
    const int64_t limit = bytes_before_.at(next) + std::max<int64_t>(prefetch_bytes_ - beside, 0);
    frontier_ = first;
    while (frontier_ < expected_.size() && bytes_before_[frontier_ + 1] <= limit) {
      ++frontier_;
    }
    return std::span(expected_).subspan(first, frontier_ - first);
  }

 private:
  static constexpr size_t kNever = std::numeric_limits<size_t>::max();

  struct Saved {
    int64_t nbytes;
    size_t rank;  // in the expected order
    bool decoded;
    bool demanded;
  };

  // How much was saved and demanded before the window opened.
  struct Window {
    size_t saved;
    size_t demanded;
    double room_bytes;
    bool timed;
  };

  std::vector<Saved> saved_;
  std::vector<size_t> demanded_;  // in the order of their first demand
  std::vector<Window> windows_;
  Share raw_, decoded_;
  std::vector<size_t> expected_;
  std::vector<int64_t> bytes_before_;  // each place of the expected order, and its end
  int64_t prefetch_bytes_ = 0;
  size_t frontier_ = 0;  // places before it were demanded or asked for
};

// [Note: Bytes ahead]
// What is demanded between one window and the next must have been started with the window before
// that: not with the one that has just opened, since its operator itself may be who demands. So the
// latest demand before a window must look past the two stretches of demands that follow. Where
// decodes take longer than windows, it must look further: counted from the end, each decode ends
// by its demand and before the next one begins, and starts with the last window that is in time for
// that. Time is counted in bytes that could have been decoded, and stands still between windows.
inline int64_t DemandOrder::bytes_ahead() const {
  const bool in_backward = !windows_.empty() && windows_.back().demanded > 0;
  const size_t count = in_backward ? demanded_.size() : saved_.size();
  const auto at = [&](size_t rank) -> const Saved& {
    return saved_[in_backward ? demanded_[rank] : rank];
  };
  std::vector<size_t> firsts;     // of each window: the first storage demanded after it opened
  std::vector<double> opened{0};  // and when that was
  bool timed = in_backward;
  for (const Window& window : windows_) {
    if (in_backward != (window.demanded > 0)) {
      continue;  // of the forward
    }
    firsts.push_back(in_backward ? window.demanded : window.saved);
    opened.push_back(opened.back() + window.room_bytes);
    timed = timed && window.timed;
  }
  const size_t windows = firsts.size();
  std::vector<int64_t> before{0};
  for (size_t rank = 0; rank < count; ++rank) {
    before.push_back(before.back() + at(rank).nbytes);
  }
  std::vector<double> starts(count, 0);  // when each decode must have started, if times are known
  double next = std::numeric_limits<double>::infinity();
  for (size_t rank = count, window = windows; timed && rank-- > 0;) {
    while (window > 0 && firsts[window - 1] > rank) {
      --window;
    }
    const double demanded = window == 0 ? 0 : opened[window - 1];
    const int64_t cost = at(rank).decoded ? at(rank).nbytes : 0;
    next = starts[rank] = std::min(demanded, next) - static_cast<double>(cost);
  }
  int64_t most = 0;
  for (size_t window = 0, end = 0; window < windows; ++window) {
    const size_t first = firsts[window];
    end = std::max(end, window + 2 < windows ? firsts[window + 2] : count);
    while (timed && end < count && starts[end] < opened[window + 1]) {
      ++end;
    }
    const int64_t beside = first > 0 && at(first - 1).decoded ? at(first - 1).nbytes : 0;
    most = std::max(most, before[end] - before[first] + beside);
  }
  return most;
}

// The prediction of an iteration that was demanded about the next one, storage by storage.
struct Forecast {
  enum class Verdict : uint8_t { kNone, kNeededAtOnce, kNeverFreed };

  // `held`: places of storages that stayed alive although they had left.
  Forecast(const DemandOrder& seen, std::span<const size_t> held, int64_t bytes)
      : prefetch_bytes(bytes), order(seen.demanded()), sizes(seen.sizes()) {
    for (size_t index = seen.size(); index-- > 0;) {  // the others: last saved first
      if (!seen.was_demanded(index)) {
        order.push_back(index);
      }
    }
    verdicts.resize(sizes.size(), Verdict::kNone);
    int64_t room = bytes;
    for (const size_t index : order) {
      room -= sizes[index];
      if (room < 0) {
        break;
      }
      verdicts[index] = Verdict::kNeededAtOnce;
    }
    for (const size_t index : held) {
      verdicts.at(index) = Verdict::kNeverFreed;
    }
  }

  bool expects(size_t index, int64_t nbytes) const {
    return index < sizes.size() && sizes[index] == nbytes;
  }

  int64_t prefetch_bytes;
  std::vector<size_t> order;  // in which all of them will be demanded
  std::vector<int64_t> sizes;
  std::vector<Verdict> verdicts;
  // Storages that stay because they are held at the peak, unless they have a recipe.
  HeldAtPeak::Frames held_at_peak;
};

}  // namespace memswap
