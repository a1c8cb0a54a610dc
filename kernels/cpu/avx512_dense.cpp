// Shapes dense and upcast, with AVX-512.
#include <algorithm>

#include "avx512.h"
#include "avx512_exponents.h"
#include "avx512_floats.h"
#include "avx512_literal.h"

MEMSWAP_AVX512_BEGIN

namespace memswap::cpu::avx512 {
namespace {

using Pending = Escapes;

template <frame::Dtype kDtype, bool kStreaming>
[[gnu::always_inline]] inline Range split_block(const uint8_t* elements, uint8_t* slab,
                                                uint8_t* plane1, Bytes& symbols) {
  using Type = Float<kDtype>;
  if constexpr (Type::kWidth == 1) {
    split_byte_floats<Type::kRestBits, kStreaming>(elements, slab, plane1, symbols);
  } else {
    split_floats<kDtype, kStreaming>(elements, slab, symbols);
    take_rest<Type::kRestBits, kStreaming>(
        symbols, slab + frame::kBlockElements * Type::kBytePlanes, plane1);
  }
  constexpr bool kShort = is_short(Type::kSymbolBits);
  return kShort ? range_of_short(symbols) : range_of(symbols);
}

template <frame::Dtype kDtype, bool kStreaming>
inline void join_block(uint8_t* out, const uint8_t* slab, const Symbols& symbols) {
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

// The high halves of a block of float32; false if a low half is not 0.
inline bool take_high_halves(const uint8_t* elements, uint8_t* high) {
  Vector all = _mm512_setzero_si512();
  for (uint32_t i = 0; i < 2 * kVectors; ++i) {
    const Vector a = load(elements + 2 * kLanes * i);
    const Vector b = load(elements + 2 * kLanes * i + kLanes);
    all = _mm512_ternarylogic_epi64(all, a, b, 0xfe);  // or
    const __m256i low = _mm512_cvtepi32_epi16(_mm512_srli_epi32(a, 16));
    const __m256i top = _mm512_cvtepi32_epi16(_mm512_srli_epi32(b, 16));
    store(high + kLanes * i, _mm512_inserti64x4(_mm512_castsi256_si512(low), top, 1));
  }
  return _mm512_test_epi32_mask(all, _mm512_set1_epi32(0xffff)) == 0;
}

template <bool kStreaming>
inline void put_high_halves(uint8_t* out, const uint8_t* high) {
  for (uint32_t i = 0; i < 4 * kVectors; ++i) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(high + 32 * i));
    store_line<kStreaming>(out + kLanes * i, _mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
  }
}

}  // namespace

#include "dense_blocks.h"

}  // namespace memswap::cpu::avx512

MEMSWAP_AVX512_END
