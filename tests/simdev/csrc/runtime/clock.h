// Streams, vector clocks and event recordings: the vocabulary of the runtime.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace simdev {

inline constexpr int kDevices = 2;
// The stream with index 0 is the default stream; the others are handed out round-robin, as CUDA's
// pool does, so that a program that creates streams for ever does not grow anything for ever.
inline constexpr int kPoolStreams = 32;
inline constexpr int kStreamsPerDevice = kPoolStreams + 1;
inline constexpr int kStreams = kDevices * kStreamsPerDevice;
// The slot of "no stream": the host.
inline constexpr int kHost = -1;

struct StreamId {
  int device = 0;
  int index = 0;
  friend bool operator==(const StreamId&, const StreamId&) = default;
};

// A stream's place in a vector clock. It is also the stream's native handle, so that the default
// stream of device 0 is the null handle, as in CUDA.
constexpr int slot_of(StreamId stream) { return stream.device * kStreamsPerDevice + stream.index; }
constexpr StreamId stream_of(int slot) {
  return {slot / kStreamsPerDevice, slot % kStreamsPerDevice};
}
inline std::string name_of(int slot) {
  if (slot == kHost) return "host";
  const StreamId stream = stream_of(slot);
  return "sim:" + std::to_string(stream.device) + "/stream" + std::to_string(stream.index);
}

// For each stream, how many of its tasks are known to be ordered before "now".
class VectorClock {
 public:
  uint64_t operator[](int slot) const { return times_[static_cast<size_t>(slot)]; }
  uint64_t tick(int slot) { return ++times_[static_cast<size_t>(slot)]; }
  void join(const VectorClock& other) {
    for (size_t i = 0; i < times_.size(); ++i) times_[i] = std::max(times_[i], other.times_[i]);
  }

 private:
  std::array<uint64_t, kStreams> times_{};
};

// One recording of an event. Events are versioned, as in CUDA: a wait binds to the recording that
// the event holds at that moment, whatever is recorded into the event later.
struct Recording {
  StreamId stream;
  uint64_t sequence = 0;  // complete when the stream has finished its task of this number
  VectorClock clock;
  double virtual_us = 0;
};
using RecordingPtr = std::shared_ptr<const Recording>;

}  // namespace simdev
