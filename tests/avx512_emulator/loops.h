// What the emulator's files write their loops with: vectors as arrays of lanes.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "emulated/vectors.h"

namespace memswap::emulated {

template <typename Lane, typename Vector>
using Lanes = std::array<Lane, sizeof(Vector) / sizeof(Lane)>;

template <typename Lane, typename Vector>
Lanes<Lane, Vector> lanes_of(const Vector& vector) {
  return std::bit_cast<Lanes<Lane, Vector>>(vector);
}

template <typename Vector, typename Lane>
Vector vector_of(const Lanes<Lane, Vector>& lanes) {
  return std::bit_cast<Vector>(lanes);
}

// A vector whose lane i is make(i).
template <typename Lane, typename Vector = __m512i, typename Make>
Vector make_lanes(Make make) {
  Lanes<Lane, Vector> lanes{};
  for (size_t i = 0; i < lanes.size(); ++i) {
    lanes[i] = static_cast<Lane>(make(i));
  }
  return vector_of<Vector, Lane>(lanes);
}

// A vector of compute(a's lane), or compute(a's lane, b's lane).
template <typename Lane, typename Vector, typename Compute>
Vector map(const Vector& a, Compute compute) {
  const auto x = lanes_of<Lane>(a);
  return make_lanes<Lane, Vector>([&](size_t i) { return compute(x[i]); });
}
template <typename Lane, typename Vector, typename Compute>
Vector map(const Vector& a, const Vector& b, Compute compute) {
  const auto x = lanes_of<Lane>(a);
  const auto y = lanes_of<Lane>(b);
  return make_lanes<Lane, Vector>([&](size_t i) { return compute(x[i], y[i]); });
}

// A vector of other lanes, or as many of them as there are.
template <typename To, typename From, typename ToVector, typename FromVector>
ToVector convert(const FromVector& a) {
  static_assert(sizeof(ToVector) / sizeof(To) == sizeof(FromVector) / sizeof(From));
  const auto x = lanes_of<From>(a);
  return make_lanes<To, ToVector>([&](size_t i) { return x[i]; });
}

inline bool is_chosen(__mmask64 mask, size_t lane) { return (mask >> lane & 1) != 0; }

// Lanes where hold(a's lane, b's lane).
template <typename Lane, typename Hold>
__mmask64 mask_where(const __m512i& a, const __m512i& b, Hold hold) {
  const auto x = lanes_of<Lane>(a);
  const auto y = lanes_of<Lane>(b);
  __mmask64 mask = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    mask |= __mmask64{hold(x[i], y[i])} << i;
  }
  return mask;
}

// Bytes of `a` where they are chosen, of `other` elsewhere.
inline __m512i merge(const __m512i& other, __mmask64 chosen, const __m512i& a) {
  return make_lanes<uint8_t>(
      [&](size_t i) { return is_chosen(chosen, i) ? a.byte[i] : other.byte[i]; });
}

}  // namespace memswap::emulated
