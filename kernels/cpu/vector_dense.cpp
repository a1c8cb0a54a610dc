// Shapes dense and upcast, with portable vectors.
#include "vector.h"
#include "vector_exponents.h"
#include "vector_floats.h"
#include "vector_literal.h"

MEMSWAP_VECTOR_BEGIN

namespace memswap::cpu::vector {
namespace {

using frame::Dtype;
using frame::Shape;

template <Dtype kDtype, bool kStreaming>
EncodedBlock encode_dense(const EncodeParams& params, const void* elements, uint32_t count,
                          uint8_t* slab, uint8_t* payload) {
  using Type = Float<kDtype>;
  const auto* from = static_cast<const uint8_t*>(elements);
  Bytes symbols;
  for (uint32_t i = 0; i < kVectors; ++i) {
    Vector v[Type::kWidth];
    load_rotated<Type::kWidth>(from + kLanes * Type::kWidth * i, v);
    for (uint32_t p = 0; p < Type::kBytePlanes; ++p) {
      store_line<kStreaming>(slab + frame::kBlockElements * p + kLanes * i, v[p]);
    }
    symbols.vector[i] = v[Type::kBytePlanes];
  }
  if constexpr (Type::kRestBits != 0) {
    uint8_t* rest = slab + Type::kRestOffset;
    store_plane<0, Type::kFirstRestBits, kStreaming>(rest, symbols);
    if constexpr (Type::kRestBits == 3) {
      store_plane<2, 1, kStreaming>(rest + 2 * kPlane1Bytes, symbols);
    }
    for (Vector& symbol : symbols.vector) {
      symbol >>= Type::kRestBits;
    }
  }
  const Choice choice = choose(symbols, params, Type::kSymbolBits);
  encode_symbols<kStreaming>(symbols, choice, slab + Type::kLowOffset, payload);
  return {choice.mode, choice.units, count - choice.nonzero, choice.center, choice.center2};
}

template <Dtype kDtype, bool kStreaming>
bool decode_dense(void* out, const uint8_t* slab, const uint8_t* payload, uint32_t mode,
                  uint32_t units, uint8_t center, bool) {
  using Type = Float<kDtype>;
  if constexpr (kStreaming) {
    if (!is_line_aligned(out)) {
      return decode_dense<kDtype, false>(out, slab, payload, mode, units, center, false);
    }
  }
  Bytes top;
  if (!decode_symbols(top, slab + Type::kLowOffset, payload, mode, units, center)) {
    return false;
  }
  if constexpr (Type::kRestBits != 0) {
    for (Vector& byte : top.vector) {
      byte <<= Type::kRestBits;
    }
    const uint8_t* rest = slab + Type::kRestOffset;
    add_plane<0, Type::kFirstRestBits>(top, rest);
    if constexpr (Type::kRestBits == 3) {
      add_plane<2, 1>(top, rest + 2 * kPlane1Bytes);
    }
  }
  auto* to = static_cast<uint8_t*>(out);
  for (uint32_t i = 0; i < kVectors; ++i) {
    Vector v[Type::kWidth];
    for (uint32_t p = 0; p < Type::kBytePlanes; ++p) {
      v[p] = load(slab + frame::kBlockElements * p + kLanes * i);
    }
    v[Type::kBytePlanes] = top.vector[i];
    store_rotated<Type::kWidth, kStreaming>(to + kLanes * Type::kWidth * i, v);
  }
  return true;
}

struct alignas(64) HighHalves {
  uint8_t byte[2 * frame::kBlockElements];
};

template <bool kStreaming>
EncodedBlock encode_upcast(const EncodeParams& params, const void* elements, uint32_t count,
                           uint8_t* slab, uint8_t* payload) {
  const auto* from = static_cast<const uint8_t*>(elements);
  HighHalves high;
  Vector all{};
  for (uint32_t i = 0; i < 2 * kVectors; ++i) {
    const Vector a = load(from + 2 * kLanes * i);
    const Vector b = load(from + 2 * kLanes * i + kLanes);
    all |= a | b;
    store(high.byte + kLanes * i, odd_halves(a, b));
  }
  using Words = Elements<uint32_t>::Vector;
  const Words low_bits = reinterpret_cast<Words>(all) << 16;
  if (sum_of(lanes_where(reinterpret_cast<Vector>(low_bits) != 0) & 1) != 0) {
    return encode_literal<kStreaming>(from, Dtype::kFp32, Shape::kUpcast, slab, payload);
  }
  return encode_dense<Dtype::kBf16, kStreaming>(params, high.byte, count, slab, payload);
}

template <bool kStreaming>
bool decode_upcast(void* out, const uint8_t* slab, const uint8_t* payload, uint32_t mode,
                   uint32_t units, uint8_t center, bool) {
  if constexpr (kStreaming) {
    if (!is_line_aligned(out)) {
      return decode_upcast<false>(out, slab, payload, mode, units, center, false);
    }
  }
  auto* to = static_cast<uint8_t*>(out);
  if (mode == frame::kLiteral) {
    return decode_literal<kStreaming>(to, Dtype::kFp32, Shape::kUpcast, slab, payload, units);
  }
  HighHalves high;
  if (!decode_dense<Dtype::kBf16, false>(high.byte, slab, payload, mode, units, center, false)) {
    return false;
  }
  for (uint32_t i = 0; i < 2 * kVectors; ++i) {
    const Vector halves = load(high.byte + kLanes * i);
    store_line<kStreaming>(to + 2 * kLanes * i, interleave_low_halves(Vector{}, halves));
    store_line<kStreaming>(to + 2 * kLanes * i + kLanes, interleave_high_halves(Vector{}, halves));
  }
  return true;
}

}  // namespace

EncodeBlocks dense_encoder(const EncodeParams& params) {
  return for_float<EncodeBlocks>(params.dtype, params.streaming,
                                 []<Dtype kDtype, bool kStreaming>() -> EncodeBlocks {
                                   return &encode_one_by_one<encode_dense<kDtype, kStreaming>>;
                                 });
}

DecodeBlock dense_decoder(Dtype dtype, bool streaming) {
  return for_float<DecodeBlock>(dtype, streaming,
                                []<Dtype kDtype, bool kStreaming>() -> DecodeBlock {
                                  return &decode_dense<kDtype, kStreaming>;
                                });
}

EncodeBlocks upcast_encoder(const EncodeParams& params) {
  return params.streaming ? &encode_one_by_one<encode_upcast<true>>
                          : &encode_one_by_one<encode_upcast<false>>;
}

DecodeBlock upcast_decoder(bool streaming) {
  return streaming ? &decode_upcast<true> : &decode_upcast<false>;
}

}  // namespace memswap::cpu::vector

MEMSWAP_VECTOR_END
