#include "virtual_time.h"

#include <algorithm>
#include <iterator>

namespace simdev {

double EngineTimeline::reserve(double ready_us, double duration_us) {
  double begin = ready_us;
  auto next = busy_.upper_bound(ready_us);
  if (next != busy_.begin()) begin = std::max(begin, std::prev(next)->second);
  while (next != busy_.end() && next->first < begin + duration_us) {
    begin = std::max(begin, next->second);
    ++next;
  }
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
  return timeline.reserve(std::max(stream_us, host_us_), model.launch_us + bytes / bytes_per_us);
}

void VirtualTime::reset() {
  host_us_ = 0;
  for (auto& device : engines_)
    for (auto& engine : device) engine.clear();
}

}  // namespace simdev
