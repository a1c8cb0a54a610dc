#include "link_model.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace memswap {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNotYet = std::numeric_limits<double>::quiet_NaN();

// What a sum of seconds may be off by.
constexpr double kRounding = 1e-12;

double slower(double duplex, double alone) {
  return alone != 0 && duplex != 0 ? duplex / alone : 1.0;
}

}  // namespace

LinkModel::LinkModel(const MachineRates& rates, int32_t storages)
    : latency_s_(rates.copy_latency_s) {
  Way& away = way(Direction::kAway);
  away.bytes_per_s = rates.d2h_bytes_per_s;
  away.slower = slower(rates.duplex_d2h_bytes_per_s, rates.d2h_bytes_per_s);
  Way& back = way(Direction::kBack);
  back.bytes_per_s = rates.h2d_bytes_per_s;
  back.slower = slower(rates.duplex_h2d_bytes_per_s, rates.h2d_bytes_per_s);
  for (Way& one : ways_) {
    one.begins.assign(storages, kNotYet);
    one.ends.assign(storages, kNotYet);
  }
}

void LinkModel::add(Direction direction, int32_t index, int64_t nbytes, double ready_s) {
  const Way& other = ways_[1 - static_cast<size_t>(direction)];
  if (!other.queue.empty()) {
    run(ready_s, std::nullopt);  // what this copy slows down, it slows down from here on
  }
  Way& mine = way(direction);
  const double seconds = latency_s_ + static_cast<double>(nbytes) / mine.bytes_per_s;
  mine.queue.push_back({index, seconds, ready_s});
}

double LinkModel::end_s(Direction direction, int32_t index) {
  const Awaited awaited{direction, index};
  if (!ended(awaited)) {
    run(kInfinity, awaited);
  }
  return way(direction).ends[index];
}

void LinkModel::drain() { run(kInfinity, std::nullopt); }

std::optional<double> LinkModel::begin_s(Direction direction, int32_t index) const {
  const double begin = ways_[static_cast<size_t>(direction)].begins[index];
  return std::isnan(begin) ? std::nullopt : std::optional(begin);
}

bool LinkModel::ended(const Awaited& awaited) {
  return !std::isnan(way(awaited.direction).ends[awaited.index]);
}

void LinkModel::run(double until_s, std::optional<Awaited> awaited) {
  while (true) {
    for (const Direction direction : {Direction::kAway, Direction::kBack}) {
      if (ways_[1 - static_cast<size_t>(direction)].queue.empty()) {
        if (!awaited || awaited->direction == direction) {
          run_alone(way(direction), until_s, awaited);
        }
        return;
      }
    }
    if ((awaited && ended(*awaited)) || now_ >= until_s) {
      return;
    }
    run_both(until_s);
  }
}

// Copies go in both directions, or are about to: on to the next moment at which something changes.
void LinkModel::run_both(double until_s) {
  bool active[2];
  double next_ready = kInfinity;
  double first_ready = until_s;
  for (const size_t direction : {0, 1}) {
    const double ready = ways_[direction].queue.front().ready_s;
    active[direction] = ready <= now_;
    first_ready = std::min(first_ready, ready);
    if (!active[direction]) {
      next_ready = std::min(next_ready, ready);
    }
  }
  if (!active[0] && !active[1]) {
    now_ = first_ready;
    return;
  }
  const bool both = active[0] && active[1];
  double step_s = std::min(until_s, next_ready) - now_;
  for (const size_t direction : {0, 1}) {
    if (active[direction]) {
      Way& one = ways_[direction];
      const Copy& head = one.queue.front();
      if (std::isnan(one.begins[head.index])) {
        one.begins[head.index] = now_;
      }
      step_s = std::min(step_s, head.left_s / (both ? one.slower : 1.0));
    }
  }
  const double then = now_ + step_s;
  for (const size_t direction : {0, 1}) {
    if (active[direction]) {
      Way& one = ways_[direction];
      Copy& head = one.queue.front();
      head.left_s -= step_s * (both ? one.slower : 1.0);
      if (head.left_s <= kRounding) {
        one.ends[head.index] = then;
        one.queue.pop_front();
      }
    }
  }
  now_ = then;
}

// Nothing goes in the other direction.
void LinkModel::run_alone(Way& way, double until_s, std::optional<Awaited> awaited) {
  double now = now_;
  while (!way.queue.empty() && now < until_s) {
    Copy& head = way.queue.front();
    const double begin_s = std::max(now, head.ready_s);
    if (begin_s >= until_s) {
      break;
    }
    const int32_t index = head.index;
    const double end_s = begin_s + head.left_s;
    if (std::isnan(way.begins[index])) {
      way.begins[index] = begin_s;
    }
    if (end_s > until_s) {
      head.left_s = end_s - until_s;
      break;
    }
    now = way.ends[index] = end_s;
    way.queue.pop_front();
    if (awaited && awaited->index == index) {
      now_ = now;
      return;
    }
  }
  now_ = until_s < kInfinity ? std::max(now, until_s) : now;
}

}  // namespace memswap
