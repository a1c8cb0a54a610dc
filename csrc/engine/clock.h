// Moments of one device: points of its work between which seconds can be counted.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

namespace memswap {

// Seconds of the host on a CPU; on an accelerator an event, which the device may not have come to.
struct Moment {
  std::chrono::steady_clock::time_point host;
  std::optional<c10::Event> event;  // nothing: a CPU's

  // Whether the device has come to it. Never waits.
  bool reached() const { return !event || event->query(); }
  // Blocks the host until it has.
  void wait() const {
    if (event) {
      event->synchronize();
    }
  }
};

using MomentPtr = std::shared_ptr<const Moment>;

// Seconds from one moment to another of the same clock, never fewer than 0. Both were reached.
double seconds_between(const Moment& begin, const Moment& end);

// An event on a stream that can be timed.
MomentPtr moment_on(c10::Stream stream);

class Clock {
 public:
  // `capturing`: whether a graph is captured now; empty: none ever is on such a device.
  explicit Clock(c10::Device device, std::function<bool()> capturing = {})
      : device_(device), capturing_(std::move(capturing)) {}

  // This moment of the host, or of the device's current stream. nullptr while a graph is captured:
  // an event that is recorded then belongs to the graph and never happens.
  MomentPtr now() const;

 private:
  c10::Device device_;
  std::function<bool()> capturing_;
};

}  // namespace memswap
