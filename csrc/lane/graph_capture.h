// Whether work becomes part of a graph of the device instead of being done.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <torch/headeronly/version.h>

namespace memswap {

// Whether devices of all kinds are asked. In torch 2.12 one that does not know the question throws,
// and torch 2.11 has no question at all: there CUDA is asked, and nobody else.
inline constexpr bool kEveryDeviceIsAsked = TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13;

// Whether a stream captures a graph now: what is submitted to it happens when somebody replays the
// graph, as often as that, and an event that is recorded never happens. Never waits.
bool captures_graph(c10::Stream stream);
// The same of the calling thread's current stream of a device. A CPU has none.
bool captures_graph(c10::Device device);

}  // namespace memswap
