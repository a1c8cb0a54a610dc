// What the backend's files offer to each other and to the operators.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <optional>

#include "../runtime/runtime.h"
#include "state.h"

namespace simdev {

inline constexpr c10::DeviceType kDeviceType = c10::DeviceType::PrivateUse1;

// The calling thread's current device, and its current stream on a device.
c10::DeviceIndex current_device();
c10::DeviceIndex exchange_device(c10::DeviceIndex device);  // a negative one changes nothing
StreamId current_stream(int device);
inline StreamId current_stream() { return current_stream(current_device()); }
inline StreamId stream_id(const c10::Stream& stream) {
  return {stream.device_index(), static_cast<int>(stream.id())};
}
inline c10::Stream torch_stream(StreamId stream) {
  const c10::Device device(kDeviceType, static_cast<c10::DeviceIndex>(stream.device));
  return c10::Stream(c10::Stream::UNSAFE, device, stream.index);
}

// As on CUDA: a new allocation on the current stream, to which the old bytes are copied in order.
void resize_storage(const c10::Storage& storage, size_t bytes);
void copy_bytes(void* destination, const void* source, size_t bytes);  // on the current stream

// [Note: random numbers]
// The generator is a counter (seed, offset). An operator that draws numbers takes the next counter
// at launch and runs with a private CPU generator seeded from it, so what it draws does not depend
// on the schedule, and checkpointing can restore it.
uint64_t next_random_seed(const std::optional<at::Generator>& generator);
const at::Generator& default_generator(int device);  // a negative one: of the current device
at::Generator new_generator(int device);

}  // namespace simdev
