// What AVX2 and NEON share beyond vector_lanes.h: chosen lanes as bytes of 0 or 255, made by the
// compiler's vector extensions, and tables by which lanes are moved.
#pragma once

#include "vector_lanes.h"

MEMSWAP_VECTOR_BEGIN

namespace memswap::cpu::MEMSWAP_ISA {
namespace {

// Which lanes are chosen: a byte of 255 in each of them. Sets combine by &, | and ~.
using Lanes = Vector;

inline Lanes equal(Vector a, Vector b) { return reinterpret_cast<Lanes>(a == b); }
inline Lanes less(Vector a, Vector b) { return reinterpret_cast<Lanes>(a < b); }
inline Lanes nonzero(Vector value) { return ~equal(value, Vector{}); }
// The vector in the chosen lanes, 0 in the others.
inline Vector only(Lanes lanes, Vector value) { return lanes & value; }
// One more in the chosen lanes.
inline Vector increment(Vector value, Lanes lanes) { return value - lanes; }
// Sets a bit, which was 0, in the chosen lanes.
template <uint32_t kBit>
inline Vector set_bit(Vector value, Lanes lanes) {
  return value | (lanes & static_cast<uint8_t>(1u << kBit));
}

inline Vector minimum(Vector a, Vector b) { return a < b ? a : b; }
inline Vector maximum(Vector a, Vector b) { return a > b ? a : b; }
// The `kCount` bits from kFrom on of each byte, to kTo; the others become 0.
template <uint32_t kFrom, uint32_t kTo, uint32_t kCount>
inline Vector move_bits(Vector value) {
  using Halves = Elements<uint16_t>::Vector;
  const Halves halves = reinterpret_cast<Halves>(value);  // there are no shifts of bytes
  const Halves moved = kTo >= kFrom ? halves << (kTo - kFrom) : halves >> (kFrom - kTo);
  return reinterpret_cast<Vector>(moved) & static_cast<uint8_t>(((1 << kCount) - 1) << kTo);
}

template <uint32_t kWidth>
inline Vector rotate_left(Vector value) {
  using Words = typename Elements<UnsignedOf<kWidth>>::Vector;
  const Words words = reinterpret_cast<Words>(value);
  return reinterpret_cast<Vector>(words << 1 | words >> (8 * kWidth - 1));
}
template <uint32_t kWidth>
inline Vector rotate_right(Vector value) {
  using Words = typename Elements<UnsignedOf<kWidth>>::Vector;
  const Words words = reinterpret_cast<Words>(value);
  return reinterpret_cast<Vector>(words >> 1 | words << (8 * kWidth - 1));
}

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

// The lanes whose number is below `count`.
inline Lanes first_lanes(uint32_t count) {
  return less(load(kLaneNumbers.number), broadcast(count < kLanes ? count : kLanes));
}

// Too few bytes at a time to be worth more.
inline void copy_around_caches(void* to, const void* from, size_t bytes) {
  __builtin_memcpy(to, from, bytes);
}

}  // namespace
}  // namespace memswap::cpu::MEMSWAP_ISA

MEMSWAP_VECTOR_END
