// Action: what can be done with a saved storage.
#pragma once

#include <cstdint>

namespace memswap {

// The numbers are those of memswap.Action, in its order; what each means is told there.
enum class Action : uint8_t { kKeep, kEncode, kSwap, kEncodeSwap, kRecompute };

}  // namespace memswap
