// Moments of one device: points of its work between which seconds can be counted.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <chrono>
#include <memory>
#include <optional>

#include "lane/graph_capture.h"

namespace memswap {

// On an accelerator an event, which the device may not have come to.
struct Moment {
  std::chrono::steady_clock::time_point host;  // when the host noted it, which on a CPU is the time
  std::optional<c10::Event> event;             // nothing: a CPU's

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

// This moment of a stream's work; of the host, or of the current stream of a device.
MomentPtr moment_on(c10::Stream stream);
MomentPtr moment_on(c10::Device device);

// How long work takes that the calling thread does or launches on a device.
class Lap {
 public:
  explicit Lap(c10::Device device) : device_(device) {}

  void begin() { began_ = moment_on(device_); }
  void end() { ended_ = moment_on(device_); }
  // Waits until the device has passed the end. Of a device that has no clock, by the host's.
  double seconds() const;

 private:
  const c10::Device device_;
  MomentPtr began_, ended_;
};

class Clock {
 public:
  explicit Clock(c10::Device device) : device_(device) {}

  // This moment of the device. nullptr while a graph is captured: an event that is recorded then
  // belongs to the graph and never happens.
  MomentPtr now() const { return captures_graph(device_) ? nullptr : moment_on(device_); }

 private:
  c10::Device device_;
};

}  // namespace memswap
