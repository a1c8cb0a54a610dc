// Shapes dense and upcast, with AVX-512.
#include "avx512.h"
#include "avx512_exponents.h"
#include "avx512_floats.h"
#include "avx512_literal.h"

MEMSWAP_AVX512_BEGIN

namespace memswap::cpu::avx512 {
namespace {

using frame::Dtype;

template <Dtype kDtype, bool kStreaming>
EncodedBlock encode_dense(const EncodeParams& params, const void* elements, uint32_t count,
                          uint8_t* slab, uint8_t* payload) {
  using Type = Float<kDtype>;
  const auto* from = static_cast<const uint8_t*>(elements);
  Bytes symbols;
  if constexpr (kDtype == Dtype::kBf16) {
    top_bytes(from, symbols);
  } else {
    split_floats<kDtype, kStreaming>(from, slab, symbols);
    take_rest<Type::kRestBits, kStreaming>(symbols,
                                           slab + frame::kBlockElements * Type::kBytePlanes);
  }
  const Choice choice = params.fast ? choose_fast(symbols, Type::kSymbolBits, params.center)
                                    : choose_canonical(symbols);
  encode_symbols<kStreaming>(symbols, choice, slab + Type::kRestBytes, payload, [&] {
    if constexpr (kDtype == Dtype::kBf16) {
      store_low_bytes<kStreaming>(from, slab);
    }
  });
  return {choice.mode, choice.units, count - choice.nonzero, choice.center, choice.center2};
}

template <Dtype kDtype, bool kStreaming>
bool decode_dense(void* out, const uint8_t* slab, const uint8_t* payload, uint32_t mode,
                  uint32_t units, uint8_t center) {
  using Type = Float<kDtype>;
  if constexpr (kStreaming) {
    if (!is_line_aligned(out)) {
      return decode_dense<kDtype, false>(out, slab, payload, mode, units, center);
    }
  }
  Symbols symbols;
  if (!decode_symbols(symbols, slab + Type::kRestBytes, payload, mode, units, center)) {
    return false;
  }
  auto* to = static_cast<uint8_t*>(out);
  if (symbols.has_escapes) {
    join_floats<kDtype, kStreaming, true>(to, slab, symbols);
  } else {
    join_floats<kDtype, kStreaming, false>(to, slab, symbols);
  }
  return true;
}

struct alignas(64) HighHalves {
  uint8_t byte[2 * frame::kBlockElements];
};

// The high halves of a block of float32; false if a low half is not 0.
inline bool take_high_halves(const uint8_t* elements, HighHalves& high) {
  Vector all = _mm512_setzero_si512();
  for (uint32_t i = 0; i < 2 * kVectors; ++i) {
    const Vector a = load(elements + 2 * kLanes * i);
    const Vector b = load(elements + 2 * kLanes * i + kLanes);
    all = _mm512_ternarylogic_epi64(all, a, b, 0xfe);  // or
    const __m256i low = _mm512_cvtepi32_epi16(_mm512_srli_epi32(a, 16));
    const __m256i top = _mm512_cvtepi32_epi16(_mm512_srli_epi32(b, 16));
    store(high.byte + kLanes * i, _mm512_inserti64x4(_mm512_castsi256_si512(low), top, 1));
  }
  return _mm512_test_epi32_mask(all, _mm512_set1_epi32(0xffff)) == 0;
}

template <bool kStreaming>
inline void put_high_halves(uint8_t* out, const HighHalves& high) {
  for (uint32_t i = 0; i < 4 * kVectors; ++i) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(high.byte + 32 * i));
    store_line<kStreaming>(out + kLanes * i, _mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
  }
}

template <bool kStreaming>
EncodedBlock encode_upcast(const EncodeParams& params, const void* elements, uint32_t count,
                           uint8_t* slab, uint8_t* payload) {
  const auto* from = static_cast<const uint8_t*>(elements);
  HighHalves high;
  if (!take_high_halves(from, high)) {
    return encode_literal<kStreaming>(from, Dtype::kFp32, frame::Shape::kUpcast, slab, payload);
  }
  return encode_dense<Dtype::kBf16, kStreaming>(params, high.byte, count, slab, payload);
}

template <bool kStreaming>
bool decode_upcast(void* out, const uint8_t* slab, const uint8_t* payload, uint32_t mode,
                   uint32_t units, uint8_t center) {
  if constexpr (kStreaming) {
    if (!is_line_aligned(out)) {
      return decode_upcast<false>(out, slab, payload, mode, units, center);
    }
  }
  auto* to = static_cast<uint8_t*>(out);
  if (mode == frame::kLiteral) {
    return decode_literal<kStreaming>(to, Dtype::kFp32, frame::Shape::kUpcast, slab, payload,
                                      units);
  }
  HighHalves high;
  if (!decode_dense<Dtype::kBf16, false>(high.byte, slab, payload, mode, units, center)) {
    return false;
  }
  put_high_halves<kStreaming>(to, high);
  return true;
}

}  // namespace

EncodeBlock dense_encoder(const EncodeParams& params) {
  return for_float<EncodeBlock>(params.dtype, params.streaming,
                                []<Dtype kDtype, bool kStreaming>() -> EncodeBlock {
                                  return &encode_dense<kDtype, kStreaming>;
                                });
}

DecodeBlock dense_decoder(Dtype dtype, bool streaming) {
  return for_float<DecodeBlock>(dtype, streaming,
                                []<Dtype kDtype, bool kStreaming>() -> DecodeBlock {
                                  return &decode_dense<kDtype, kStreaming>;
                                });
}

EncodeBlock upcast_encoder(const EncodeParams& params) {
  return params.streaming ? &encode_upcast<true> : &encode_upcast<false>;
}

DecodeBlock upcast_decoder(bool streaming) {
  return streaming ? &decode_upcast<true> : &decode_upcast<false>;
}

}  // namespace memswap::cpu::avx512

MEMSWAP_AVX512_END
