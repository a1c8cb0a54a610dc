// Vectors of bytes from GCC's vector extensions, AVX2 on x86-64 and NEON on aarch64, and tables of
// their lanes. Internal linkage throughout, as these files are compiled for more than the baseline
// on x86-64.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
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
#define MEMSWAP_VECTOR_BEGIN
#define MEMSWAP_VECTOR_END
#endif

#include "block.h"

MEMSWAP_VECTOR_BEGIN

namespace memswap::cpu::vector {
namespace {

#if defined(__x86_64__)
inline constexpr uint32_t kLanes = 32;
#else
inline constexpr uint32_t kLanes = 16;
#endif

typedef uint8_t Vector __attribute__((vector_size(kLanes)));
typedef uint64_t Words64 __attribute__((vector_size(kLanes)));

// Lanes of 0 or 255.
typedef int8_t Condition __attribute__((vector_size(kLanes)));
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

inline Vector lanes_where(Condition condition) { return reinterpret_cast<Vector>(condition); }

// By lane: its number, and the bit that it has in a byte. Tables, as GCC makes a vector whose lanes
// are set in a loop anew each time.
struct LaneNumbers {
  alignas(kLanes) uint8_t number[kLanes];
  alignas(kLanes) uint8_t bit[kLanes];
};
constexpr LaneNumbers make_lane_numbers() {
  LaneNumbers numbers{};
  for (uint32_t i = 0; i < kLanes; ++i) {
    numbers.number[i] = static_cast<uint8_t>(i);
    numbers.bit[i] = static_cast<uint8_t>(1u << i % 8);
  }
  return numbers;
}
inline constexpr LaneNumbers kLaneNumbers = make_lane_numbers();

// By which of kElements elements are chosen: the numbers of their parts in a row. 255: none.
template <uint32_t kElements, uint32_t kParts>
struct Chosen {
  alignas(64) uint8_t of[1u << kElements][kElements * kParts];
};
template <uint32_t kElements, uint32_t kParts>
constexpr Chosen<kElements, kParts> make_chosen(uint32_t first) {
  Chosen<kElements, kParts> chosen{};
  for (uint32_t elements = 0; elements < 1u << kElements; ++elements) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < kElements * kParts; ++i) {
      if ((elements >> i / kParts & 1) != 0) {
        chosen.of[elements][count++] = static_cast<uint8_t>(first + i);
      }
    }
    while (count < kElements * kParts) {
      chosen.of[elements][count++] = 255;
    }
  }
  return chosen;
}
template <uint32_t kElements, uint32_t kParts>
inline constexpr Chosen<kElements, kParts> kChosenParts = make_chosen<kElements, kParts>(0);
// For lanes 0 to 7, and for 8 to 15.
inline constexpr Chosen<8, 1> kChosenLanes[2] = {make_chosen<8, 1>(0), make_chosen<8, 1>(8)};

}  // namespace
}  // namespace memswap::cpu::vector

MEMSWAP_VECTOR_END
