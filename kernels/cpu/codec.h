// What codec.cpp is made of: the entry points of encode.cpp and decode.cpp, for one instruction
// set, and the choice of one.
#pragma once

#include <stddef.h>

#include "block.h"
#include "memswap/codec.h"

namespace memswap::cpu {

// This backend's own code, beside those of memswap/codec.h.
inline constexpr int kOutOfMemory = 1;

// Both need valid arguments and return 0 or kOutOfMemory.
int encode_frame(const BlockCodec& blocks, const memswap_encode_job& job,
                 const memswap_launch& launch);
int decode_frame(const BlockCodec& blocks, const memswap_decode_job& job,
                 const memswap_launch& launch);

enum class Isa { kScalar, kVector, kAvx512 };

// NULL where the build or the processor lacks it.
const BlockCodec* blocks_of(Isa isa);

// The fastest that this processor runs.
Isa best_isa();

// EncodeParams::asks_near, on this processor, and whether ask_pages() pays on it.
bool asks_near();
bool asks_pages();

// Whether [Note: pages ahead] pays on this processor.
bool touches_pages();

}  // namespace memswap::cpu
