// First contact of a codec with a device.
#pragma once

#include <c10/core/Device.h>

#include <string>

#include "memswap/codec.h"

namespace memswap {

// Why the codec must not encode on this device, in words for the user; empty where it may. A codec
// that asks for it (memswap_codec::check_first) encodes and decodes small tensors of each shape, on
// the current stream, and every bit is compared; the first call for a codec and a device waits for
// that, later ones know the answer. A device that fails is not asked again before the next process;
// one that has no memory for the check is.
// Thread-safe; called without the GIL and without locks.
std::string distrust(const memswap_codec& codec, c10::Device device);

}  // namespace memswap
