// Virtual time: what the program would cost on a device with the given rates.
#pragma once

#include <array>
#include <map>

#include "runtime.h"

namespace simdev {

// When one engine is busy.
//
// [Note: gaps]
// Durations are known at launch, so every task is placed at launch. A task whose stream must first
// wait (a decode behind a copy) leaves the time before it free, and a task launched later may use
// it: placing tasks strictly in launch order would charge the compute stream for waits that only
// the side stream has.
class EngineTimeline {
 public:
  double place(double ready_us, double duration_us) const;  // returns when it would begin
  double reserve(double ready_us, double duration_us);      // returns when the task ends

  // When work ends that is done at a speed below 1 wherever this engine is busy.
  double beside(double begin_us, double work_us, double speed) const;
  void forget_before(double time_us);
  void clear() { busy_.clear(); }

 private:
  std::map<double, double> busy_;  // begin -> end, disjoint, adjacent ones merged
};

class VirtualTime {
 public:
  // Returns when a task launched now ends, on a stream whose earlier work ends at stream_us.
  double launch(int device, Engine engine, double bytes, double stream_us);
  void host_reaches(double time_us) { host_us_ = host_us_ < time_us ? time_us : host_us_; }
  void host_spends(double us) { host_us_ += us; }
  double host_us() const { return host_us_; }
  void reset();

  CostModel model;

 private:
  double host_us_ = 0;
  std::array<std::array<EngineTimeline, 4>, kDevices> engines_;
};

}  // namespace simdev
