// Floats as R planes and symbols E, and back (docs/format.md section 2).
#pragma once

#include "avx512_exponents.h"
#include "by_dtype.h"

MEMSWAP_AVX512_BEGIN

namespace memswap::cpu::avx512 {
namespace {

// A matrix of bits that moves `count` bits of each byte, from `from` to `to`, and clears the
// others.
constexpr uint64_t bit_moves(uint32_t from, uint32_t to, uint32_t count) {
  uint64_t matrix = 0;
  for (uint32_t i = 0; i < count; ++i) {
    matrix |= uint64_t{1} << (8 * (7 - to - i) + from + i);
  }
  return matrix;
}
template <uint64_t kMatrix>
inline Vector move_bits(Vector value) {
  return _mm512_gf2p8affine_epi64_epi8(value, _mm512_set1_epi64(static_cast<int64_t>(kMatrix)), 0);
}

template <uint32_t kWidth>
inline Vector rotate_left(Vector value) {
  if constexpr (kWidth == 1) {
    return move_bits<bit_moves(7, 0, 1) | bit_moves(0, 1, 7)>(value);
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
    return move_bits<bit_moves(0, 7, 1) | bit_moves(1, 0, 7)>(value);
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

// See [Note: placed symbols]: above R in the top byte of a rotated element.
template <frame::Dtype kDtype>
struct InRotated {
  static Vector of(Vector symbols) {
    if constexpr (Float<kDtype>::kRestBits != 0) {
      return shift_left<Float<kDtype>::kRestBits>(symbols);
    } else {
      return symbols;
    }
  }
};

// The same, but in the elements of one byte between sign and mantissa: those are not rotated.
template <frame::Dtype kDtype>
struct InDense : InRotated<kDtype> {};
template <frame::Dtype kDtype>
  requires(Float<kDtype>::kWidth == 1)
struct InDense<kDtype> {
  static Vector of(Vector symbols) {
    using Type = Float<kDtype>;
    return move_bits<bit_moves(0, Type::kRestBits - 1, Type::kSymbolBits)>(symbols);
  }
};

// Calls visit with 0, 1, 2 and 3 as constants: shifts by a constant are cheaper.
template <typename Visit>
inline void for_quarters(Visit visit) {
  visit.template operator()<0>();
  visit.template operator()<1>();
  visit.template operator()<2>();
  visit.template operator()<3>();
}

// How far ahead a decoder asks for what it reads: in the byte planes, and in the short planes of a
// slab, of which a block reads few lines. Measured.
inline constexpr uint32_t kPrefetchBytes = 8192;
inline constexpr uint32_t kPrefetchShortBytes = 2048;

// --- Elements of one byte ------------------------------------------------------------------------

// What a byte float's sign, exponent and mantissa become without a rotation in between: the lowest
// kBits bits of R at bit kAt, and the reverse.
template <uint32_t kBits, uint32_t kAt>
inline Vector rest_of_byte(Vector element) {
  return move_bits<bit_moves(7, kAt, 1) | bit_moves(0, kAt + 1, kBits - 1)>(element);
}
template <uint32_t kBits, uint32_t kAt>
inline Vector byte_of_rest(Vector plane) {
  return move_bits<bit_moves(kAt, 7, 1) | bit_moves(kAt + 1, 0, kBits - 1)>(plane);
}
template <uint32_t kRestBits>
inline Vector symbol_of_byte(Vector element) {
  return move_bits<bit_moves(kRestBits - 1, 0, 8 - kRestBits)>(element);
}
// Writes a block's planes, that of 1 bit to plane1, and returns its symbols.
template <uint32_t kRestBits, bool kStreaming>
inline void split_byte_floats(const uint8_t* elements, uint8_t* planes, uint8_t* plane1,
                              Bytes& symbols) {
  if constexpr (kRestBits == 4) {
    for (uint32_t i = 0; i < kVectors / 2; ++i) {
      const Vector a = load(elements + kLanes * i);
      const Vector b = load(elements + kLanes * (kVectors / 2 + i));
      symbols.vector[i] = symbol_of_byte<4>(a);
      symbols.vector[kVectors / 2 + i] = symbol_of_byte<4>(b);
      store_line<kStreaming>(planes + kLanes * i,
                             _mm512_or_si512(rest_of_byte<4, 0>(a), rest_of_byte<4, 4>(b)));
    }
  } else {
    static_assert(kRestBits == 3);
    for (uint32_t i = 0; i < kVectors / 4; ++i) {
      Vector quarter[4];
      for (uint32_t q = 0; q < 4; ++q) {
        const uint32_t at = kVectors / 4 * q + i;
        quarter[q] = load(elements + kLanes * at);
        symbols.vector[at] = symbol_of_byte<3>(quarter[q]);
        store64(plane1 + 8 * at, _mm512_test_epi8_mask(quarter[q], broadcast(2)));
      }
      const Vector low =
          _mm512_or_si512(rest_of_byte<2, 0>(quarter[0]), rest_of_byte<2, 2>(quarter[1]));
      const Vector high =
          _mm512_or_si512(rest_of_byte<2, 4>(quarter[2]), rest_of_byte<2, 6>(quarter[3]));
      store_line<kStreaming>(planes + kLanes * i, _mm512_or_si512(low, high));
    }
  }
}

// Elements of their R planes and symbols.
template <frame::Dtype kDtype, bool kStreaming, Code kCode>
inline void join_byte_floats(uint8_t* elements, const uint8_t* planes, const Symbols& symbols) {
  SymbolCursor<kCode, InDense<kDtype>> cursor(symbols);
  for_quarters([&]<uint32_t kQuarter>() {
    for (uint32_t i = 0; i < kVectors / 4; ++i) {
      const uint32_t at = kVectors / 4 * kQuarter + i;
      Vector rest;
      if constexpr (Float<kDtype>::kRestBits == 4) {
        constexpr uint32_t kHalf = kQuarter / 2;
        rest = byte_of_rest<4, 4 * kHalf>(load(planes + kLanes * (at - kVectors / 2 * kHalf)));
      } else {
        static_assert(Float<kDtype>::kRestBits == 3);
        const uint8_t* const plane1 = planes + frame::kLowPlaneBytes;
        rest = byte_of_rest<2, 2 * kQuarter>(load(planes + kLanes * i));
        rest = _mm512_mask_add_epi8(rest, load64(plane1 + 8 * at), rest, broadcast(2));
      }
      const Vector element = _mm512_or_si512(cursor.template take<kQuarter>(i), rest);
      store_line<kStreaming>(elements + kLanes * at, element);
    }
  });
}

// --- Elements of two bytes and more --------------------------------------------------------------

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

// Moves the bits of R in the top byte into their planes, that of 1 bit to plane1, and leaves the
// symbols.
template <uint32_t kRestBits, bool kStreaming>
inline void take_rest(Bytes& top, uint8_t* planes, uint8_t* plane1) {
  if constexpr (kRestBits == 3) {
    store_plane2<0, kStreaming>(planes, top);
    store_plane1<2>(plane1, top);
  }
  if constexpr (kRestBits != 0) {
    for (Vector& byte : top.vector) {
      byte = shift_right<kRestBits>(byte);
    }
  }
}

template <uint32_t kRestBits>
inline void load_rest(Bytes& rest, const uint8_t* planes) {
  if constexpr (kRestBits == 3) {
    load_plane2(rest, planes);
    add_plane1<2>(rest, planes + frame::kLowPlaneBytes);
  }
}

template <frame::Dtype kDtype, bool kStreaming, Code kCode>
inline void join_floats(uint8_t* elements, const uint8_t* planes, const Symbols& symbols) {
  using Type = Float<kDtype>;
  constexpr uint32_t kWidth = Type::kWidth;
  // Whole blocks, and in each the lines in the order of their addresses, not that of their use.
  constexpr uint32_t kBlocksAhead = (kPrefetchBytes + Type::kSlabBytes / 2) / Type::kSlabBytes;
  constexpr uint32_t kAhead = kBlocksAhead * Type::kSlabBytes;
  Bytes rest;
  load_rest<Type::kRestBits>(rest, planes + frame::kBlockElements * Type::kBytePlanes);
  SymbolCursor<kCode, InDense<kDtype>> cursor(symbols);
  for_quarters([&]<uint32_t kQuarter>() {
    for (uint32_t quarter_i = 0; quarter_i < kVectors / 4; ++quarter_i) {
      const uint32_t i = kVectors / 4 * kQuarter + quarter_i;
      Vector v[kWidth];
      for (uint32_t p = 0; p < Type::kBytePlanes; ++p) {
        v[p] = load(planes + frame::kBlockElements * p + kLanes * i);
        prefetch(planes + kLanes * (Type::kBytePlanes * i + p), kAhead);
      }
      v[kWidth - 1] = cursor.template take<kQuarter>(quarter_i);
      if constexpr (Type::kRestBits != 0) {
        v[kWidth - 1] = _mm512_or_si512(v[kWidth - 1], rest.vector[i]);
      }
      join_bytes<kWidth>(v);
      for (uint32_t j = 0; j < kWidth; ++j) {
        store_line<kStreaming>(elements + kLanes * (kWidth * i + j), rotate_right<kWidth>(v[j]));
      }
    }
  });
}

}  // namespace
}  // namespace memswap::cpu::avx512

MEMSWAP_AVX512_END
