// Streams on their way to Python.
#pragma once

#include <c10/core/Stream.h>

#include <cstdint>
#include <tuple>

namespace memswap {

// What torch.Stream(stream_id=..., device_index=..., device_type=...) takes.
inline std::tuple<int64_t, int64_t, int64_t> packed(c10::Stream stream) {
  const auto parts = stream.pack3();
  return {parts.stream_id, parts.device_index, static_cast<int64_t>(parts.device_type)};
}

}  // namespace memswap
