// How long work takes that the calling thread does or launches.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <chrono>
#include <optional>

namespace memswap {

// The seconds between two moments: of the device's current stream, or of the host's clock where the
// device is the host, or has no clock of its own.
class RunTime {
 public:
  explicit RunTime(c10::Device device);

  void begin();
  void end();
  // Waits until the device has passed the end.
  double seconds();

 private:
  using Clock = std::chrono::steady_clock;

  void note(std::optional<c10::Event>& event);

  const c10::Device device_;
  std::optional<c10::Event> began_, ended_;
  Clock::time_point host_began_, host_ended_;
};

}  // namespace memswap
