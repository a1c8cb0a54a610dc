// Everything the simulated accelerator is made of, under one lock ([Note: one lock]).
#pragma once

#include <array>
#include <mutex>
#include <set>
#include <string>

#include "memory.h"
#include "mutations.h"
#include "race_detector.h"
#include "scheduler.h"
#include "virtual_time.h"

namespace simdev {

struct Machine {
  static Machine& get();

  std::mutex mutex;
  Scheduler scheduler{mutex};
  RaceDetector detector;
  VirtualTime time;
  BlockTable blocks;
  std::array<DeviceMemory, kDevices> devices;
  PinnedMemory pinned;
  Mutations mutations;
  Counters counters;
  VectorClock host_clock;  // what every host thread is taken to know ([Note: detector])
  std::array<int, kDevices> last_pool_stream{};
  std::set<std::string> names;

  DeviceMemory& device(int index);
  RecordingPtr record(Stream& stream);
  void wait(Stream& stream, const RecordingPtr& recording);
  void synchronize(Scheduler::Lock& lock, const RecordingPtr& recording);
  void synchronize_device(Scheduler::Lock& lock, int device);

 private:
  Machine();
};

}  // namespace simdev
