#include "clock.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "work/without_gil.h"

namespace memswap {

namespace {

using HostClock = std::chrono::steady_clock;

double seconds_of(HostClock::duration time) { return std::chrono::duration<double>(time).count(); }

}  // namespace

double seconds_between(const Moment& begin, const Moment& end) {
  const double seconds = begin.event && end.event ? begin.event->elapsedTime(*end.event) * 1e-3
                                                  : seconds_of(end.host - begin.host);
  return std::max(seconds, 0.0);
}

MomentPtr moment_on(c10::Stream stream) {
  auto moment = std::make_shared<Moment>();
  moment->host = HostClock::now();
  moment->event.emplace(stream.device_type(), c10::EventFlag::BACKEND_DEFAULT);  // timed
  moment->event->record(stream);
  return moment;
}

MomentPtr moment_on(c10::Device device) {
  if (device.is_cpu()) {
    return std::make_shared<Moment>(Moment{HostClock::now(), std::nullopt});
  }
  const c10::impl::VirtualGuardImpl guard(device.type());
  return moment_on(guard.getStream(device.has_index() ? device : guard.getDevice()));
}

double Lap::seconds() const {
  {
    const WithoutGil without_gil;
    ended_->wait();
  }
  try {
    return seconds_between(*began_, *ended_);
  } catch (const c10::Error&) {
    return seconds_of(HostClock::now() - began_->host);
  }
}

}  // namespace memswap
