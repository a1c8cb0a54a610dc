#include "run_time.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include "work/without_gil.h"

namespace memswap {

RunTime::RunTime(c10::Device device) : device_(device) {}

void RunTime::note(std::optional<c10::Event>& event) {
  if (!device_.is_cpu()) {
    event.emplace(device_.type(), c10::EventFlag::BACKEND_DEFAULT);
    event->record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  }
}

void RunTime::begin() {
  note(began_);
  host_began_ = Clock::now();
}

void RunTime::end() {
  host_ended_ = Clock::now();
  note(ended_);
}

double RunTime::seconds() {
  const std::chrono::duration<double> host = host_ended_ - host_began_;
  if (!began_ || !ended_) {
    return host.count();
  }
  {
    const WithoutGil without_gil;
    ended_->synchronize();
  }
  try {
    return began_->elapsedTime(*ended_) * 1e-3;
  } catch (const c10::Error&) {
    return std::chrono::duration<double>(Clock::now() - host_began_).count();
  }
}

}  // namespace memswap
