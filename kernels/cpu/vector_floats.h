// Floats as R planes and symbols E, and back (docs/format.md section 2).
#pragma once

#include "vector_exponents.h"

MEMSWAP_VECTOR_BEGIN

namespace memswap::cpu::MEMSWAP_ISA {
namespace {

// How a float's rotated bytes are laid out: byte planes below, then a byte of kRestBits bits of R
// and E above them.
template <frame::Dtype kDtype>
struct Float {
  static constexpr frame::Split kSplit = frame::split_of(kDtype);
  static constexpr uint32_t kWidth = kSplit.width;
  static constexpr uint32_t kBlockBytes = frame::kBlockElements * kWidth;
  static constexpr uint32_t kBytePlanes = kSplit.byte_planes;
  static constexpr uint32_t kRestBits = kSplit.rest_bits;  // 0, 4, or 3 in fields of 2 and 1
  static constexpr uint32_t kSymbolBits = kSplit.exponent_bits;
  static constexpr uint32_t kRestBytes = frame::rest_bytes(kSplit);
  static constexpr uint32_t kSlabBytes = frame::slab_bytes(kDtype, frame::Layout::kDense);
  static_assert(kBytePlanes + 1 == kWidth && kRestBits + kSymbolBits == 8);
};

// See [Note: placed symbols]: above R in the top byte of a rotated element.
template <frame::Dtype kDtype>
struct InRotated {
  static Vector of(Vector symbols) {
    using Type = Float<kDtype>;
    if constexpr (Type::kRestBits != 0) {
      return move_bits<0, Type::kRestBits, Type::kSymbolBits>(symbols);
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
    return move_bits<0, Type::kRestBits - 1, Type::kSymbolBits>(symbols);
  }
};

// kLanes elements, rotated, as byte planes.
template <uint32_t kWidth>
[[gnu::always_inline]] inline void load_rotated(const uint8_t* elements, Vector (&v)[kWidth]) {
  for (uint32_t j = 0; j < kWidth; ++j) {
    v[j] = rotate_left<kWidth>(load(elements + kLanes * j));
  }
  split_bytes<kWidth>(v);
}

template <uint32_t kWidth, bool kStreaming>
[[gnu::always_inline]] inline void store_rotated(uint8_t* elements, Vector (&v)[kWidth]) {
  join_bytes<kWidth>(v);
  for (uint32_t j = 0; j < kWidth; ++j) {
    store_line<kStreaming>(elements + kLanes * j, rotate_right<kWidth>(v[j]));
  }
}

// How far ahead a decoder that asks for lines does so: in slabs by whole blocks, so that all of a
// slab is asked for once, and in payloads. See [Note: asking ahead].
inline constexpr uint32_t kPrefetchBytes = 8192;
inline constexpr uint32_t kPrefetchShortBytes = 2048;
template <typename Type>
inline constexpr uint32_t kSlabsAhead =
    (kPrefetchBytes + Type::kSlabBytes / 2) / Type::kSlabBytes * Type::kSlabBytes;

// Where its byte planes are asked for: at once before the symbols are read, while nothing is
// written, or line by line while the elements are, which is as good for fewer planes and better for
// more. Measured with AVX-512: float32 is decoded 1.05 times as fast, float64 0.93 times.
template <typename Type>
inline constexpr bool kPlanesAtOnce = Type::kWidth == 4;

// Where its short planes are asked for, when the symbols are read. Between byte planes that are
// asked for line by line, which is far ahead of that, the processor finds them by itself: asked for
// as far ahead, bfloat16 was decoded at 0.8 of the rate from memory.
template <typename Type>
inline constexpr uint32_t kShortPlanesAhead =
    kPlanesAtOnce<Type> || Type::kBytePlanes == 0 ? kSlabsAhead<Type> : kPrefetchShortBytes;

// --- Dense elements of one byte ------------------------------------------------------------------

// Writes a block's planes, that of 1 bit to plane1, and its symbols.
template <frame::Dtype kDtype, bool kStreaming>
inline Range split_byte_floats(const uint8_t* elements, uint8_t* planes, uint8_t* plane1,
                               Bytes& symbols) {
  using Type = Float<kDtype>;
  constexpr uint32_t kPlaneBits = Type::kRestBits == 4 ? 4 : 2;
  constexpr uint32_t kPlaneVectors = kVectors * kPlaneBits / 8;
  RangeFinder<Type::kSymbolBits> finder;
  constexpr uint32_t kRounds = finder.kGroup / (8 / kPlaneBits);  // of a group
  static_assert(kPlaneVectors % kRounds == 0);
  for (uint32_t i = 0; i < kPlaneVectors; ++i) {
    Vector merged{};
    for_quarters([&]<uint32_t kPart>() {
      if constexpr (kPart < 8 / kPlaneBits) {
        const uint32_t at = kPlaneVectors * kPart + i;
        const Vector element = load(elements + kLanes * at);
        const Vector symbol = move_bits<Type::kRestBits - 1, 0, Type::kSymbolBits>(element);
        symbols.vector[at] = symbol;
        finder.add(symbol);
        merged |= rest_of_byte<kPlaneBits, kPlaneBits * kPart>(element);
        if constexpr (Type::kRestBits == 3) {
          store_mask(plane1 + kLanes / 8 * at, mask_of_bit<1>(element));
        }
      }
    });
    store_line<kStreaming>(planes + kLanes * i, merged);
    if ((i + 1) % kRounds == 0) {
      finder.end_group();
    }
  }
  return finder.range();
}

// The part of a byte float that its symbol is not, of vector i of the quarter.
template <uint32_t kRestBits, uint32_t kQuarter>
[[gnu::always_inline]] inline Vector rest_of_planes(const uint8_t* planes, uint32_t i) {
  const uint32_t at = kVectors / 4 * kQuarter + i;
  if constexpr (kRestBits == 4) {
    constexpr uint32_t kHalf = kQuarter / 2;
    return rest_in_byte<4, 4 * kHalf>(load(planes + kLanes * (at - kVectors / 2 * kHalf)));
  } else {
    static_assert(kRestBits == 3);
    return rest3_in_byte<2 * kQuarter>(
        load(planes + kLanes * i), load_lanes(planes + frame::kLowPlaneBytes + kLanes / 8 * at));
  }
}

// Elements of their R planes and symbols.
template <frame::Dtype kDtype, bool kStreaming, Code kCode>
inline void join_byte_floats(uint8_t* elements, const uint8_t* planes, const Symbols& symbols,
                             bool asks_pages) {
  SymbolCursor<kCode, InDense<kDtype>> cursor(symbols);
  for_quarters([&]<uint32_t kQuarter>() {
    if (asks_pages) {
      constexpr uint32_t kQuarterBytes = Float<kDtype>::kSlabBytes / 4;
      ask_pages(planes + kQuarterBytes * kQuarter, kQuarterBytes);
    }
    for (uint32_t i = 0; i < kVectors / 4; ++i) {
      const uint32_t at = kVectors / 4 * kQuarter + i;
      const Vector rest = rest_of_planes<Float<kDtype>::kRestBits, kQuarter>(planes, i);
      store_line<kStreaming>(elements + kLanes * at, cursor.template take<kQuarter>(i) | rest);
    }
  });
}

// --- Dense elements of two bytes and more --------------------------------------------------------

// Writes a block's planes, that of 1 bit to plane1, and its symbols.
template <frame::Dtype kDtype, bool kStreaming>
inline Range split_floats(const uint8_t* elements, uint8_t* planes, uint8_t* plane1,
                          Bytes& symbols) {
  using Type = Float<kDtype>;
  constexpr uint32_t kWidth = Type::kWidth;
  RangeFinder<Type::kSymbolBits> finder;
  // Lines that are written around the caches in halves leave so where more are begun than a
  // processor gathers. Fewer planes do better without (measured).
  constexpr uint32_t kLineVectors = kStreaming && Type::kBytePlanes > 4 ? kLineBytes / kLanes : 1;
  for (uint32_t i = 0; i < kVectors; i += kLineVectors) {
    Vector v[kLineVectors][kWidth];
    for (uint32_t j = 0; j < kLineVectors; ++j) {
      load_rotated<kWidth>(elements + kLanes * kWidth * (i + j), v[j]);
      symbols.vector[i + j] = v[j][Type::kBytePlanes];
      if constexpr (Type::kRestBits == 0) {
        finder.add(v[j][Type::kBytePlanes]);
      }
    }
    for (uint32_t p = 0; p < Type::kBytePlanes; ++p) {
      for (uint32_t j = 0; j < kLineVectors; ++j) {
        store_line<kStreaming>(planes + frame::kBlockElements * p + kLanes * (i + j), v[j][p]);
      }
    }
  }
  if constexpr (Type::kRestBits != 0) {
    static_assert(Type::kRestBits == 3);
    constexpr uint32_t kRounds = finder.kGroup / 4;  // of a group
    static_assert(kVectors / 4 % kRounds == 0);
    uint8_t* const plane2 = planes + frame::kBlockElements * Type::kBytePlanes;
    for (uint32_t i = 0; i < kVectors / 4; ++i) {
      Vector merged{};
      for_quarters([&]<uint32_t kQuarter>() {
        const uint32_t at = kVectors / 4 * kQuarter + i;
        const Vector top = symbols.vector[at];
        const Vector symbol = move_bits<3, 0, 5>(top);
        symbols.vector[at] = symbol;
        finder.add(symbol);
        merged |= move_bits<0, 2 * kQuarter, 2>(top);
        store_mask(plane1 + kLanes / 8 * at, mask_of_bit<2>(top));
      });
      store_line<kStreaming>(plane2 + kLanes * i, merged);
      if ((i + 1) % kRounds == 0) {
        finder.end_group();
      }
    }
  }
  return finder.range();
}

template <frame::Dtype kDtype, bool kStreaming, Code kCode>
inline void join_floats(uint8_t* elements, const uint8_t* planes, const Symbols& symbols,
                        bool asks_pages) {
  using Type = Float<kDtype>;
  constexpr uint32_t kWidth = Type::kWidth;
  const uint8_t* const plane2 = planes + frame::kBlockElements * Type::kBytePlanes;
  SymbolCursor<kCode, InDense<kDtype>> cursor(symbols);
  for_quarters([&]<uint32_t kQuarter>() {
    for (uint32_t quarter_i = 0; quarter_i < kVectors / 4; ++quarter_i) {
      const uint32_t i = kVectors / 4 * kQuarter + quarter_i;
      Vector v[kWidth];
      for (uint32_t p = 0; p < Type::kBytePlanes; ++p) {
        v[p] = load(planes + frame::kBlockElements * p + kLanes * i);
      }
      if (asks_pages) {
        constexpr uint32_t kPartBytes = Type::kSlabBytes / kVectors;
        ask_pages(planes + kPartBytes * i, kPartBytes);
      } else if constexpr (!kPlanesAtOnce<Type>) {  // in the order of addresses; half a line each
        for (uint32_t p = 0; p < Type::kBytePlanes; p += 64 / kLanes) {
          prefetch(planes + kLanes * (Type::kBytePlanes * i + p), kSlabsAhead<Type>);
        }
      }
      v[kWidth - 1] = cursor.template take<kQuarter>(quarter_i);
      if constexpr (Type::kRestBits != 0) {
        static_assert(Type::kRestBits == 3);
        v[kWidth - 1] |= move_bits<2 * kQuarter, 0, 2>(load(plane2 + kLanes * quarter_i));
        v[kWidth - 1] =
            set_bit<2>(v[kWidth - 1], load_lanes(plane2 + frame::kLowPlaneBytes + kLanes / 8 * i));
      }
      store_rotated<kWidth, kStreaming>(elements + kLanes * kWidth * i, v);
    }
  });
}

}  // namespace
}  // namespace memswap::cpu::MEMSWAP_ISA

MEMSWAP_VECTOR_END
