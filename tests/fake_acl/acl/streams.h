// Streams and events as ACL hands them out: addresses of these.
#pragma once

#include <chrono>
#include <map>
#include <mutex>
#include <string>

#include "../../simdev/csrc/runtime/runtime.h"
#include "abi.h"

namespace fake_acl {

struct Stream {
  simdev::StreamId id;
};

// [Note: kinds of events]
// The API reference promises for an event of aclrtCreateEventExWithFlag that it may be recorded
// again at any time and that a wait binds to the recording it saw. It promises neither for the
// others, so recording one of those again while a stream has yet to wait for it is reported. An
// event without ACL_EVENT_SYNC is for the host alone: no stream may wait for it.
struct Event {
  bool extended = false;
  bool sync = false;
  std::mutex mutex;
  simdev::RecordingPtr recording;
  simdev::RecordingPtr wait_passed;  // complete when the waiter has passed that wait
  std::chrono::steady_clock::time_point recorded_at;
};

simdev::StreamId stream_id(aclrtStream stream);  // throws Failure for what is no stream
int current_device();                            // of the calling thread; throws where none is set

// How many events were created, by creating function and flag.
std::map<std::string, uint64_t> event_counts();

// Written into the race detector's reports: what the program did is not ordered.
void report(const std::string& message);

}  // namespace fake_acl
