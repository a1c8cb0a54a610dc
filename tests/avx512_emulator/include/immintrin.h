// The intrinsics that kernels/cpu/avx512* is written in, as functions of plain loops: found before
// the compiler's own header, so that those very sources run on a processor without AVX-512, and
// under sanitizers. Only what is used is here; what the processor leaves undefined is garbage
// (kUndefinedByte), and what it refuses, or what the instruction cannot encode, does not compile or
// ends the program. What each function does is Intel's description of it.
//
// Definitions are in the .cpp files of tests/avx512_emulator, which are compiled once, and without
// sanitizers except for memory.cpp: tests make millions of calls.
#pragma once

// For avx512_target.h: there are no registers of 64 bytes, and no functions to switch them on for.
#define MEMSWAP_EMULATES_AVX512

#include "emulated/arithmetic.h"
#include "emulated/bits.h"
#include "emulated/lanes.h"
#include "emulated/masks.h"
#include "emulated/memory.h"
#include "emulated/vectors.h"
