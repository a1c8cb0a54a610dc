#include "clock.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

namespace memswap {

double seconds_between(const Moment& begin, const Moment& end) {
  const double seconds = begin.event && end.event
                             ? begin.event->elapsedTime(*end.event) * 1e-3
                             : std::chrono::duration<double>(end.host - begin.host).count();
  return std::max(seconds, 0.0);
}

MomentPtr moment_on(c10::Stream stream) {
  auto moment = std::make_shared<Moment>();
  moment->event.emplace(stream.device_type(), c10::EventFlag::BACKEND_DEFAULT);  // timed
  moment->event->record(stream);
  return moment;
}

MomentPtr Clock::now() const {
  if (device_.is_cpu()) {
    return std::make_shared<Moment>(Moment{std::chrono::steady_clock::now(), std::nullopt});
  }
  if (capturing_ && capturing_()) {
    return nullptr;
  }
  return moment_on(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
}

}  // namespace memswap
