// What the AVX-512 path may use, and nothing else of the library may: everything in the avx512
// files between these two macros has internal linkage and is compiled for these instructions, while
// the rest of a file (headers of the standard library above all) stays at the target's baseline.
// Every processor with VBMI2 has all of them; dispatch.cpp asks for each.
#pragma once

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

// GCC 12 takes the deliberately undefined operands inside its own intrinsics for mistakes of ours
// (its bug 105593).
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 13
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

// clang-format off
#if defined(MEMSWAP_EMULATES_AVX512)  // by the <immintrin.h> of tests/avx512_emulator
#define MEMSWAP_AVX512_BEGIN
#define MEMSWAP_AVX512_END
#elif defined(__clang__)
#define MEMSWAP_AVX512_BEGIN                                                                  \
  _Pragma("clang attribute push(__attribute__((target(\"avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vbmi2,avx512vnni,avx512vpopcntdq,gfni,bmi,bmi2,popcnt,lzcnt\"))), apply_to = function)")
#define MEMSWAP_AVX512_END _Pragma("clang attribute pop")
#else
#define MEMSWAP_AVX512_BEGIN                                                                  \
  _Pragma("GCC push_options")                                                                 \
  _Pragma("GCC target(\"avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vbmi2\")")        \
  _Pragma("GCC target(\"avx512vnni,avx512vpopcntdq,gfni,bmi,bmi2,popcnt,lzcnt\")")
#define MEMSWAP_AVX512_END _Pragma("GCC pop_options")
#endif
// clang-format on

// Where an operand of an asm statement is: in a register, unless there are none of its size.
#if defined(MEMSWAP_EMULATES_AVX512)
#define MEMSWAP_AVX512_OPERAND "+m"
#else
#define MEMSWAP_AVX512_OPERAND "+v"
#endif
