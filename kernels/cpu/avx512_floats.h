// Floats as R planes and symbols E, and back (docs/format.md section 2).
#pragma once

#include "avx512_exponents.h"

MEMSWAP_AVX512_BEGIN

namespace memswap::cpu::avx512 {
namespace {

template <uint32_t kWidth>
inline Vector rotate_left(Vector value) {
  if constexpr (kWidth == 1) {
    const __mmask64 sign = _mm512_movepi8_mask(value);
    const Vector doubled = _mm512_add_epi8(value, value);
    return _mm512_mask_add_epi8(doubled, sign, doubled, broadcast(1));
  } else if constexpr (kWidth == 2) {
    return _mm512_shldi_epi16(value, value, 1);
  } else if constexpr (kWidth == 4) {
    return _mm512_rol_epi32(value, 1);
  } else {
    return _mm512_rol_epi64(value, 1);
  }
}

template <uint32_t kWidth>
inline Vector rotate_right(Vector value) {
  if constexpr (kWidth == 1) {
    const __mmask64 sign = _mm512_test_epi8_mask(value, broadcast(1));
    const Vector halved = shift_right<1>(value);
    return _mm512_mask_add_epi8(halved, sign, halved, broadcast(128));
  } else if constexpr (kWidth == 2) {
    return _mm512_shrdi_epi16(value, value, 1);
  } else if constexpr (kWidth == 4) {
    return _mm512_ror_epi32(value, 1);
  } else {
    return _mm512_ror_epi64(value, 1);
  }
}

// How a float's rotated bytes are laid out: byte planes below, then a byte of kRestBits bits of R
// and E above them.
template <frame::Dtype kDtype>
struct Float {
  static constexpr frame::Split kSplit = frame::split_of(kDtype);
  static constexpr uint32_t kWidth = kSplit.width;
  static constexpr uint32_t kBlockBytes = frame::kBlockElements * kWidth;
  static constexpr uint32_t kBytePlanes = kSplit.byte_planes;
  static constexpr uint32_t kRestBits = kSplit.rest_bits;
  static constexpr uint32_t kSymbolBits = kSplit.exponent_bits;
  static constexpr uint32_t kRestBytes = frame::rest_bytes(kSplit);
  static constexpr uint32_t kSlabBytes = frame::slab_bytes(kDtype, frame::Shape::kDense);
  static_assert(kBytePlanes == kWidth - 1 && kRestBits + kSymbolBits == 8);
};

// How far ahead a decoder asks for what it reads: in the byte planes, and in the short planes of a
// slab, of which a block reads few lines. Measured.
inline constexpr uint32_t kPrefetchBytes = 8192;
inline constexpr uint32_t kPrefetchShortBytes = 2048;

// Writes a block's byte planes and returns the byte above them.
template <frame::Dtype kDtype, bool kStreaming>
inline void split_floats(const uint8_t* elements, uint8_t* planes, Bytes& top) {
  constexpr uint32_t kWidth = Float<kDtype>::kWidth;
  for (uint32_t i = 0; i < kVectors; ++i) {
    Vector v[kWidth];
    for (uint32_t j = 0; j < kWidth; ++j) {
      const uint8_t* from = elements + kLanes * (kWidth * i + j);
      v[j] = rotate_left<kWidth>(load(from));
    }
    split_bytes<kWidth>(v);
    for (uint32_t p = 0; p + 1 < kWidth; ++p) {
      store_line<kStreaming>(planes + frame::kBlockElements * p + kLanes * i, v[p]);
    }
    top.vector[i] = v[kWidth - 1];
  }
}

// Moves the bits of R in the top byte into their planes and leaves the symbols.
template <uint32_t kRestBits, bool kStreaming>
inline void take_rest(Bytes& top, uint8_t* planes) {
  if constexpr (kRestBits == 4) {
    store_plane4<0, kStreaming>(planes, top);
  } else if constexpr (kRestBits == 3) {
    store_plane2<0, kStreaming>(planes, top);
    store_plane1<2>(planes + frame::kLowPlaneBytes, top);
  }
  if constexpr (kRestBits != 0) {
    for (Vector& byte : top.vector) {
      byte = shift_right<kRestBits>(byte);
    }
  }
}

template <uint32_t kRestBits>
inline void load_rest(Bytes& rest, const uint8_t* planes) {
  if constexpr (kRestBits == 4) {
    rest = no_bytes();
    add_plane4<0>(rest, planes);
  } else if constexpr (kRestBits == 3) {
    load_plane2(rest, planes);
    add_plane1<2>(rest, planes + frame::kLowPlaneBytes);
  }
}

// Elements of their R planes and symbols.
template <frame::Dtype kDtype, bool kStreaming, bool kEscapes>
inline void join_floats(uint8_t* elements, const uint8_t* planes, const Symbols& symbols) {
  using Type = Float<kDtype>;
  constexpr uint32_t kWidth = Type::kWidth;
  Bytes rest;
  load_rest<Type::kRestBits>(rest, planes + frame::kBlockElements * Type::kBytePlanes);
  SymbolCursor<kEscapes> cursor(symbols);
  for (uint32_t i = 0; i < kVectors; ++i) {
    Vector v[kWidth];
    for (uint32_t p = 0; p < Type::kBytePlanes; ++p) {
      const uint8_t* from = planes + frame::kBlockElements * p + kLanes * i;
      prefetch(from, kPrefetchBytes);
      v[p] = load(from);
    }
    v[kWidth - 1] = cursor.take(i);
    if constexpr (Type::kRestBits != 0) {
      v[kWidth - 1] = _mm512_or_si512(shift_left<Type::kRestBits>(v[kWidth - 1]), rest.vector[i]);
    }
    join_bytes<kWidth>(v);
    for (uint32_t j = 0; j < kWidth; ++j) {
      store_line<kStreaming>(elements + kLanes * (kWidth * i + j), rotate_right<kWidth>(v[j]));
    }
  }
}

// Calls visit with dtype and streaming as constants, for the dtypes that are split into E and R.
template <typename Function, typename Visit>
inline Function for_float(frame::Dtype dtype, bool streaming, Visit visit) {
  using frame::Dtype;
  const auto with = [&]<Dtype kDtype>() -> Function {
    return streaming ? visit.template operator()<kDtype, true>()
                     : visit.template operator()<kDtype, false>();
  };
  switch (dtype) {
    case Dtype::kBf16:
      return with.template operator()<Dtype::kBf16>();
    case Dtype::kFp16:
      return with.template operator()<Dtype::kFp16>();
    case Dtype::kFp32:
      return with.template operator()<Dtype::kFp32>();
    case Dtype::kFp64:
      return with.template operator()<Dtype::kFp64>();
    case Dtype::kE4m3:
      return with.template operator()<Dtype::kE4m3>();
    case Dtype::kE5m2:
      return with.template operator()<Dtype::kE5m2>();
    default:
      return nullptr;
  }
}

}  // namespace
}  // namespace memswap::cpu::avx512

MEMSWAP_AVX512_END
