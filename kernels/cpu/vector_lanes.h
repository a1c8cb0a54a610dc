// Vectors of bytes from GCC's vector extensions: AVX-512 and AVX2 on x86-64, NEON on aarch64.
// Internal linkage throughout, as these files are compiled for more than the baseline on x86-64.
//
// [Note: one source for all vectors]
// The algorithms stand once, in the vector_*.h and vector_*.cpp that include this, and are compiled
// for each set of instructions in a namespace of its own. What sets do differently has one name in
// vector_avx512.h, vector_avx2.h and vector_neon.h, the latter two with vector_extensions.h. Only
// encoding layout sparse has code of its own for AVX-512, where that measured faster.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "block.h"
#include "by_dtype.h"

// The set of instructions, and the namespace, of what includes this: that of avx512*.cpp, which
// define MEMSWAP_VECTOR_AVX512, or else what every x86-64 of the last ten years and every aarch64
// has.
#if defined(MEMSWAP_VECTOR_AVX512)
#include "avx512_target.h"
#define MEMSWAP_ISA avx512
#define MEMSWAP_ISA_NAME "avx512"
#define MEMSWAP_ISA_BLOCKS avx512_blocks
#define MEMSWAP_VECTOR_BEGIN MEMSWAP_AVX512_BEGIN
#define MEMSWAP_VECTOR_END MEMSWAP_AVX512_END
#elif defined(__x86_64__)
#include <immintrin.h>
#define MEMSWAP_ISA vector
#define MEMSWAP_ISA_NAME "vector"
#define MEMSWAP_ISA_BLOCKS vector_blocks
// clang-format off
#if defined(__clang__)
#define MEMSWAP_VECTOR_BEGIN                                                                  \
  _Pragma("clang attribute push(__attribute__((target(\"avx2,bmi,bmi2,popcnt\"))), apply_to = function)")
#define MEMSWAP_VECTOR_END _Pragma("clang attribute pop")
#else
#define MEMSWAP_VECTOR_BEGIN                                                                  \
  _Pragma("GCC push_options")                                                                 \
  _Pragma("GCC target(\"avx2,bmi,bmi2,popcnt\")")
#define MEMSWAP_VECTOR_END _Pragma("GCC pop_options")
#endif
// clang-format on
#else
#include <arm_neon.h>
#define MEMSWAP_ISA vector
#define MEMSWAP_ISA_NAME "vector"
#define MEMSWAP_ISA_BLOCKS vector_blocks
#define MEMSWAP_VECTOR_BEGIN
#define MEMSWAP_VECTOR_END
#endif

MEMSWAP_VECTOR_BEGIN

namespace memswap::cpu::MEMSWAP_ISA {
namespace {

#if defined(MEMSWAP_VECTOR_AVX512)
inline constexpr uint32_t kLanes = 64;
#elif defined(__x86_64__)
inline constexpr uint32_t kLanes = 32;
#else
inline constexpr uint32_t kLanes = 16;
#endif

typedef uint8_t Vector __attribute__((vector_size(kLanes)));
typedef uint64_t Words64 __attribute__((vector_size(kLanes)));

// Of elements of one kind.
template <typename Element>
struct Elements {
  typedef Element Vector __attribute__((vector_size(kLanes)));
};

inline constexpr uint32_t kWords = kLanes / 8;

template <typename Value>
inline Value load_as(const void* from) {
  Value value;
  __builtin_memcpy(&value, from, sizeof value);
  return value;
}
template <typename Value>
inline void store_as(void* to, Value value) {
  __builtin_memcpy(to, &value, sizeof value);
}
inline Vector load(const void* from) { return load_as<Vector>(from); }
inline void store(void* to, Vector value) { store_as(to, value); }
inline Vector broadcast(uint32_t byte) { return Vector{} + static_cast<uint8_t>(byte); }

}  // namespace
}  // namespace memswap::cpu::MEMSWAP_ISA

MEMSWAP_VECTOR_END
