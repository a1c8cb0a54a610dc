// Which codec serves a device type.
#pragma once

#include <c10/core/Device.h>

#include <map>
#include <string>

#include "memswap/codec.h"

namespace memswap {

// The table for a device type, or nullptr where there is none. What this library was built with is
// there from the beginning; a backend of its own (another library's device) is registered.
const memswap_codec* codec_of(c10::DeviceType type);

// `codec` stays valid for ever. Throws std::invalid_argument for another version of the table, or
// where a different codec serves that device type already.
void register_codec(c10::DeviceType type, const memswap_codec* codec);

// By device type as Python names it: why this build has no codec for it, in words for the user
// (left_out.cpp.in).
std::map<std::string, std::string> codecs_left_out();

// Throws std::runtime_error with the backend's words unless `code` is MEMSWAP_CODEC_OK.
void check_codec(const memswap_codec& codec, int code, const std::string& attempted);

}  // namespace memswap
