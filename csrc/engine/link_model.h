// When copies in two directions begin and end on a link.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "machine_rates.h"

namespace memswap {

enum class Direction : uint8_t { kAway, kBack };

// Both directions of a link, each in order; slower while both are busy.
class LinkModel {
 public:
  // `storages`: copies are known by numbers below this, once in each direction.
  LinkModel(const MachineRates& rates, int32_t storages);

  // A copy that may start at `ready_s`, which is never earlier than in calls before.
  void add(Direction direction, int32_t index, int64_t nbytes, double ready_s);

  // When a copy that was added ends, if nothing else is added before.
  double end_s(Direction direction, int32_t index);

  // Lets everything end.
  void drain();

  // When a copy began, after `drain`; nothing if there was none.
  std::optional<double> begin_s(Direction direction, int32_t index) const;

 private:
  struct Copy {
    int32_t index;
    double left_s;
    double ready_s;
  };
  struct Way {
    std::deque<Copy> queue;
    std::vector<double> begins;  // NaN: not yet
    std::vector<double> ends;
    double bytes_per_s;
    double slower;  // while the other way is busy
  };
  // Which copy's end is waited for.
  struct Awaited {
    Direction direction;
    int32_t index;
  };

  Way& way(Direction direction) { return ways_[static_cast<size_t>(direction)]; }
  bool ended(const Awaited& awaited);
  void run(double until_s, std::optional<Awaited> awaited);
  void run_both(double until_s);
  void run_alone(Way& way, double until_s, std::optional<Awaited> awaited);

  double now_ = 0;
  double latency_s_;
  std::array<Way, 2> ways_;
};

}  // namespace memswap
