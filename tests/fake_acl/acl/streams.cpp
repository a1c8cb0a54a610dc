// Streams and events, on the simulated machine's.
#include "streams.h"

#include <array>
#include <memory>
#include <vector>

#include "../../simdev/csrc/runtime/machine.h"
#include "calls.h"

namespace fake_acl {
namespace {

// [Note: one device, two rows of streams]
// There is one device, and torch_npu's pool for it is longer than a row of the machine's streams.
// So those of the machine's second device serve as well, all but its default stream. torch_npu
// creates its default stream first: it is number 0, which is what the schedules take for the main
// stream.
constexpr int kMostStreams = simdev::kStreams - 1;

constexpr simdev::StreamId id_at(int number) {
  return simdev::stream_of(number < simdev::kStreamsPerDevice ? number : number + 1);
}

struct Streams {
  std::mutex mutex;
  std::array<Stream, kMostStreams> all;
  int created = 0;
  std::vector<Stream*> destroyed;  // free to be given out again
};

Streams& streams() {
  static Streams* all = new Streams();
  return *all;
}

Event& event_of(aclrtEvent event) {
  if (!event) throw Failure{kParameterInvalid, "the event is null"};
  return *static_cast<Event*>(event);
}

void create_stream(aclrtStream* stream) {
  current_device();
  Streams& s = streams();
  const std::lock_guard lock(s.mutex);
  if (!s.destroyed.empty()) {
    *stream = s.destroyed.back();
    s.destroyed.pop_back();
    return;
  }
  if (s.created == kMostStreams) throw Failure{kNotSupported, "no stream is left"};
  Stream& made = s.all[static_cast<size_t>(s.created)];
  made.id = id_at(s.created++);
  *stream = &made;
}

void destroy_stream(aclrtStream stream) {
  simdev::synchronize_stream(stream_id(stream));
  Streams& s = streams();
  const std::lock_guard lock(s.mutex);
  s.destroyed.push_back(static_cast<Stream*>(stream));
}

void synchronize_device() {
  current_device();
  for (int row = 0; row < simdev::kDevices; ++row) simdev::synchronize_device(row);
}

constexpr const char* kPlain = "aclrtCreateEvent";
constexpr const char* kFlagged = "aclrtCreateEventWithFlag";
constexpr const char* kExtended = "aclrtCreateEventExWithFlag";

struct EventCounts {
  std::mutex mutex;
  std::map<std::string, uint64_t> by_kind;
};

EventCounts& counts_of_events() {
  static EventCounts* counts = new EventCounts();
  return *counts;
}

void create_event(aclrtEvent* event, const char* function, uint32_t flag) {
  const bool extended = function == kExtended;
  const bool sync = flag & kEventSync;
  {
    EventCounts& counts = counts_of_events();
    const std::lock_guard lock(counts.mutex);
    ++counts.by_kind[std::string(function) + " " + std::to_string(flag)];
  }
  auto made = std::make_unique<Event>();
  made->extended = extended;
  made->sync = sync;
  *event = made.release();
}

void record(aclrtEvent handle, aclrtStream stream) {
  Event& event = event_of(handle);
  const std::lock_guard lock(event.mutex);
  if (!event.extended && event.wait_passed && !simdev::query(event.wait_passed))
    report(
        "an event that aclrtCreateEventExWithFlag did not create is recorded again before a "
        "stream has passed its wait for it");
  event.recording = simdev::record(stream_id(stream));
  event.wait_passed = nullptr;
  event.recorded_at = std::chrono::steady_clock::now();
}

void wait(aclrtStream stream, aclrtEvent handle) {
  Event& event = event_of(handle);
  const std::lock_guard lock(event.mutex);
  if (!event.sync) throw Failure{kParameterInvalid, "the event was created without ACL_EVENT_SYNC"};
  if (!event.recording) {
    report("a stream waits for an event that was never recorded");
    return;
  }
  const simdev::StreamId id = stream_id(stream);
  simdev::wait(id, event.recording);
  if (!event.extended) event.wait_passed = simdev::record(id);
}

// torch_npu's caching allocator asks whether the streams that were recorded for a block have
// passed, by events that no stream may wait for. Nobody else makes such events.
bool allocator_is_lied_to(const Event& event) {
  if (event.sync) return false;
  auto& machine = simdev::Machine::get();
  const std::lock_guard lock(machine.mutex);
  return machine.mutations.apply(simdev::Mutations::Kind::kDropRecordStream) != nullptr;
}

bool recorded(aclrtEvent handle) {
  Event& event = event_of(handle);
  if (allocator_is_lied_to(event)) return true;
  simdev::RecordingPtr recording;
  {
    const std::lock_guard lock(event.mutex);
    recording = event.recording;
  }
  return !recording || simdev::query(recording);
}

}  // namespace

simdev::StreamId stream_id(aclrtStream stream) {
  if (!stream) return {current_device(), 0};
  Streams& s = streams();
  const auto* known = static_cast<Stream*>(stream);
  if (known >= s.all.data() && known < s.all.data() + s.all.size()) return known->id;
  throw Failure{kParameterInvalid, "this is no stream"};
}

std::map<std::string, uint64_t> event_counts() {
  EventCounts& counts = counts_of_events();
  const std::lock_guard lock(counts.mutex);
  return counts.by_kind;
}

void report(const std::string& message) {
  auto& machine = simdev::Machine::get();
  const std::lock_guard lock(machine.mutex);
  machine.detector.report("fake ACL: " + message, true);
}

}  // namespace fake_acl

using namespace fake_acl;

// ---------------------------------------------------------------- streams
FAKE_ACL_EXPORT aclError aclrtCreateStream(aclrtStream* stream) {
  return call("aclrtCreateStream", [&] { create_stream(stream); });
}
FAKE_ACL_EXPORT aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t, uint32_t) {
  return call("aclrtCreateStream", [&] { create_stream(stream); });
}
FAKE_ACL_EXPORT aclError aclrtDestroyStream(aclrtStream stream) {
  return call("aclrtDestroyStream", [&] { destroy_stream(stream); });
}
FAKE_ACL_EXPORT aclError aclrtDestroyStreamForce(aclrtStream stream) {
  return call("aclrtDestroyStream", [&] { destroy_stream(stream); });
}
FAKE_ACL_EXPORT aclError aclrtSynchronizeStream(aclrtStream stream) {
  return call("aclrtSynchronizeStream", [&] { simdev::synchronize_stream(stream_id(stream)); });
}
FAKE_ACL_EXPORT aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int) {
  return aclrtSynchronizeStream(stream);
}
FAKE_ACL_EXPORT aclError aclrtSynchronizeDevice() {
  return call("aclrtSynchronizeDevice", [] { synchronize_device(); });
}
FAKE_ACL_EXPORT aclError aclrtSynchronizeDeviceWithTimeout(int) { return aclrtSynchronizeDevice(); }
FAKE_ACL_EXPORT aclError aclrtStreamQuery(aclrtStream stream, int* status) {
  return call("aclrtStreamQuery", [&] {
    *status = simdev::query_stream(stream_id(stream)) ? kStreamComplete : kStreamNotReady;
  });
}
FAKE_ACL_EXPORT aclError aclrtStreamGetId(aclrtStream stream, int* id) {
  return call("aclrtStreamGetId", [&] { *id = simdev::slot_of(stream_id(stream)); });
}

// ---------------------------------------------------------------- events
FAKE_ACL_EXPORT aclError aclrtCreateEvent(aclrtEvent* event) {
  return call("aclrtCreateEvent", [&] { create_event(event, kPlain, kEventSync); });
}
FAKE_ACL_EXPORT aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t flag) {
  return call("aclrtCreateEvent", [&] { create_event(event, kFlagged, flag); });
}
FAKE_ACL_EXPORT aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t flag) {
  return call("aclrtCreateEvent", [&] { create_event(event, kExtended, flag); });
}
FAKE_ACL_EXPORT aclError aclrtDestroyEvent(aclrtEvent event) {
  return call("aclrtDestroyEvent", [&] { delete &event_of(event); });
}
FAKE_ACL_EXPORT aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream) {
  return call("aclrtRecordEvent", [&] { record(event, stream); });
}
FAKE_ACL_EXPORT aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event) {
  return call("aclrtStreamWaitEvent", [&] { wait(stream, event); });
}
FAKE_ACL_EXPORT aclError aclrtResetEvent(aclrtEvent event, aclrtStream) {
  return call("aclrtResetEvent", [&] {
    if (event_of(event).extended)
      throw Failure{kParameterInvalid, "an event of aclrtCreateEventExWithFlag cannot be reset"};
  });
}
FAKE_ACL_EXPORT aclError aclrtSynchronizeEvent(aclrtEvent handle) {
  return call("aclrtSynchronizeEvent", [&] {
    Event& event = event_of(handle);
    simdev::RecordingPtr recording;
    {
      const std::lock_guard lock(event.mutex);
      recording = event.recording;
    }
    if (recording) simdev::synchronize(recording);
  });
}
FAKE_ACL_EXPORT aclError aclrtQueryEventStatus(aclrtEvent event, int* status) {
  return call("aclrtQueryEventStatus",
              [&] { *status = recorded(event) ? kRecordedComplete : kRecordedNotReady; });
}
FAKE_ACL_EXPORT aclError aclrtEventElapsedTime(float* milliseconds, aclrtEvent begin,
                                               aclrtEvent end) {
  return call("aclrtEventElapsedTime", [&] {
    const Event &first = event_of(begin), &last = event_of(end);
    if (!first.recording || !last.recording)
      throw Failure{kParameterInvalid, "an event was never recorded"};
    *milliseconds =
        static_cast<float>((last.recording->virtual_us - first.recording->virtual_us) / 1e3);
  });
}
