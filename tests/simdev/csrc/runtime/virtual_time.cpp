#include "virtual_time.h"

#include <algorithm>
#include <iterator>

namespace simdev {
namespace {

constexpr double kTinyCopyBytes = 256;

}  // namespace

double EngineTimeline::place(double ready_us, double duration_us) const {
  double begin = ready_us;
  auto next = busy_.upper_bound(ready_us);
  if (next != busy_.begin()) begin = std::max(begin, std::prev(next)->second);
  while (next != busy_.end() && next->first < begin + duration_us) {
    begin = std::max(begin, next->second);
    ++next;
  }
  return begin;
}

double EngineTimeline::reserve(double ready_us, double duration_us) {
  double begin = place(ready_us, duration_us);
  auto next = busy_.upper_bound(begin);
  double end = begin + duration_us;
  if (duration_us <= 0) return end;
  if (next != busy_.end() && next->first == end) {
    end = next->second;
    next = busy_.erase(next);
  }
  if (next != busy_.begin() && std::prev(next)->second == begin) {
    std::prev(next)->second = end;
  } else {
    busy_.emplace_hint(next, begin, end);
  }
  return begin + duration_us;
}

double EngineTimeline::beside(double begin_us, double work_us, double speed) const {
  double now = begin_us;
  auto next = busy_.upper_bound(begin_us);
  if (next != busy_.begin()) --next;
  for (; next != busy_.end() && work_us > 0; ++next) {
    if (next->second <= now) continue;
    const double alone_us = std::max(next->first - now, 0.0);
    if (work_us <= alone_us) break;
    work_us -= alone_us;
    now += alone_us;
    const double both_us = next->second - now;
    if (work_us <= both_us * speed) return now + work_us / speed;
    work_us -= both_us * speed;
    now = next->second;
  }
  return now + work_us;
}

void EngineTimeline::forget_before(double time_us) {
  while (!busy_.empty() && busy_.begin()->second <= time_us) busy_.erase(busy_.begin());
}

double VirtualTime::launch(int device, Engine engine, double bytes, double stream_us) {
  if (engine == Engine::kMatrix && model.matrix_gb_per_s <= 0) engine = Engine::kCompute;
  const double gb_per_s = engine == Engine::kHostToDevice   ? model.h2d_gb_per_s
                          : engine == Engine::kDeviceToHost ? model.d2h_gb_per_s
                          : engine == Engine::kMatrix       ? model.matrix_gb_per_s
                                                            : model.hbm_gb_per_s;
  host_us_ += model.host_us;
  auto& timeline = engines_[static_cast<size_t>(device)][static_cast<size_t>(engine)];
  timeline.forget_before(host_us_);
  const double bytes_per_us = gb_per_s * 1e3;
  const double ready_us = std::max(stream_us, host_us_);
  const double alone_us = model.launch_us + bytes / bytes_per_us;
  const bool copies = engine == Engine::kHostToDevice || engine == Engine::kDeviceToHost;
  // A copy engine takes turns between streams after each copy. Copies are placed at launch here,
  // all of one stream behind each other, so the shortest must not wait behind what only queues.
  if (copies && bytes <= kTinyCopyBytes) return ready_us + alone_us;
  if (model.duplex < 1 && copies) {
    const auto back =
        engine == Engine::kHostToDevice ? Engine::kDeviceToHost : Engine::kHostToDevice;
    const auto& other = engines_[static_cast<size_t>(device)][static_cast<size_t>(back)];
    double duration_us = alone_us;
    while (true) {  // a longer stay may be placed elsewhere, beside something else
      const double begin_us = timeline.place(ready_us, duration_us);
      const double longer_us = other.beside(begin_us, alone_us, 2 * model.duplex - 1) - begin_us;
      if (longer_us <= duration_us + 1e-9) return timeline.reserve(ready_us, duration_us);
      duration_us = longer_us;
    }
  }
  return timeline.reserve(ready_us, alone_us);
}

void VirtualTime::reset() {
  host_us_ = 0;
  for (auto& device : engines_)
    for (auto& engine : device) engine.clear();
}

}  // namespace simdev
