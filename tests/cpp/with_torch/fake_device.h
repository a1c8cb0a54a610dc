// A device without hardware: the backend that a StreamLane needs, and a global lock like Python's.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <limits>

namespace memswap::testing {

inline const c10::Device kFakeDevice{c10::DeviceType::PrivateUse1, 0};

// Bytes on the fake device (in host memory, and copies do nothing: tests look at calls and locks).
at::Tensor fake_bytes(int64_t nbytes);

// Runs in every event query, event wait and event synchronisation, on the thread that calls.
// Empty: nothing. Not to be changed while another thread uses the device.
extern std::function<void()> in_event_call;

// What event queries answer.
extern bool events_have_ended;

// Whether every stream captures a graph: of a torch that asks (kEveryDeviceIsAsked).
extern bool graph_is_captured;

// Milliseconds between any two of them. kNoClock: the device cannot tell.
extern double elapsed_ms;
inline constexpr double kNoClock = std::numeric_limits<double>::infinity();

// Stands in for the GIL, through set_gil_hooks.
class GlobalLock {
 public:
  static void install();

  // The calling thread is one that runs Python code: it has the lock until the end of the scope,
  // but for what lets go of it.
  GlobalLock();
  ~GlobalLock();
  GlobalLock(const GlobalLock&) = delete;
  GlobalLock& operator=(const GlobalLock&) = delete;

  static bool held_here();

  // Takes the lock and gives it back, as native code does that needs Python for a moment. False
  // where nobody let go of it for so long that nobody ever will.
  static bool can_be_taken();
};

}  // namespace memswap::testing
