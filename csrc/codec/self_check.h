// First contact of a codec with a device.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <string>
#include <vector>

#include "memswap/codec.h"

namespace memswap {

// Why the codec must not encode tensors of a dtype (frame::Dtype) in a layout (frame::Layout) on
// this device, in words for the user; empty where it may. A codec that asks for it
// (memswap_codec::check_first) encodes and decodes a small tensor of each dtype in each layout that
// fits it, on the current stream, and every bit is compared; the first call for a codec and a
// device waits for that, later ones know the answers. What fails is not asked again before the next
// process; a device that has no memory for the check is.
// Thread-safe; called without the GIL and without locks.
std::string distrust(const memswap_codec& codec, c10::Device device, uint8_t dtype, uint8_t layout);

// The same of the codec that serves the device; so is that none does.
std::string codec_fault(c10::Device device, uint8_t dtype, uint8_t layout);

// All that such a check found, a sentence for each kind of fault; empty where nothing is wrong.
std::vector<std::string> codec_faults(c10::Device device);

}  // namespace memswap
