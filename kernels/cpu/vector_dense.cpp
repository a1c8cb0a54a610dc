// Shapes dense and upcast, with portable vectors.
#include <algorithm>

#include "vector.h"
#include "vector_floats.h"
#include "vector_literal.h"

MEMSWAP_VECTOR_BEGIN

namespace memswap::cpu::MEMSWAP_ISA {
namespace {

template <frame::Dtype kDtype, bool kStreaming>
[[gnu::always_inline]] inline Range split_block(const uint8_t* elements, uint8_t* slab,
                                                uint8_t* plane1, Bytes& symbols) {
  if constexpr (Float<kDtype>::kWidth == 1) {
    return split_byte_floats<kDtype, kStreaming>(elements, slab, plane1, symbols);
  } else {
    return split_floats<kDtype, kStreaming>(elements, slab, plane1, symbols);
  }
}

template <frame::Dtype kDtype, bool kStreaming>
[[gnu::noinline]] void join_block(uint8_t* out, const uint8_t* slab, const Symbols& symbols) {
  const auto with = [&]<Code kCode>() {
    if constexpr (Float<kDtype>::kWidth == 1) {
      join_byte_floats<kDtype, kStreaming, kCode>(out, slab, symbols);
    } else {
      join_floats<kDtype, kStreaming, kCode>(out, slab, symbols);
    }
  };
  switch (symbols.code) {
    case Code::kLq2:
      with.template operator()<Code::kLq2>();
      break;
    case Code::kLq3:
      with.template operator()<Code::kLq3>();
      break;
    case Code::kFixed:
      with.template operator()<Code::kFixed>();
      break;
  }
}

// False if a low half is not 0.
inline bool take_high_halves(const uint8_t* elements, uint8_t* high) {
  Vector all{};
  for (uint32_t i = 0; i < 2 * kVectors; ++i) {
    const Vector a = load(elements + 2 * kLanes * i);
    const Vector b = load(elements + 2 * kLanes * i + kLanes);
    all |= a | b;
    store(high + kLanes * i, odd_halves(a, b));
  }
  using Words = Elements<uint32_t>::Vector;
  const Words low_bits = reinterpret_cast<Words>(all) << 16;
  return !any(mask_of(nonzero(reinterpret_cast<Vector>(low_bits))));
}

template <bool kStreaming>
inline void put_high_halves(uint8_t* elements, const uint8_t* high) {
  for (uint32_t i = 0; i < 2 * kVectors; ++i) {
    const Vector halves = load(high + kLanes * i);
    uint8_t* const to = elements + 2 * kLanes * i;
    store_line<kStreaming>(to, interleave_low_halves(Vector{}, halves));
    store_line<kStreaming>(to + kLanes, interleave_high_halves(Vector{}, halves));
  }
}

}  // namespace

#include "dense_blocks.h"

}  // namespace memswap::cpu::MEMSWAP_ISA

MEMSWAP_VECTOR_END
