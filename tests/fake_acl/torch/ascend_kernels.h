// memswap's codec for Ascend with its kernels on the emulator (tests/ascend_emulator), launched on
// the driver's streams.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "memswap/codec.h"

namespace fake_acl {

// memswap_codec_ascend(): kernels/ascend as it is. Only what CANN compiles and launches is
// replaced.
const memswap_codec* ascend_codec();

// How often each kernel was launched and accepted.
std::map<std::string, uint64_t> kernel_launches();

// From now on launches of this kernel succeed and nothing runs; "" for none.
void lose_launches_of(const std::string& kernel);

}  // namespace fake_acl
