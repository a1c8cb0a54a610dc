// What is made of a target's vectors: rows, byte planes, bit planes and fields.
#pragma once

#if defined(MEMSWAP_VECTOR_AVX512)
#include "vector_avx512.h"
#else
#include "vector_expansion.h"
#endif

MEMSWAP_VECTOR_BEGIN

namespace memswap::cpu::MEMSWAP_ISA {
namespace {

inline constexpr uint32_t kVectors = frame::kBlockElements / kLanes;  // of a byte per element
inline constexpr uint32_t kPlane1Bytes = frame::kBlockElements / 8;

struct Bytes {
  Vector vector[kVectors];
};

// Room for a block's symbols in a row, and for what moving whole vectors touches behind them.
struct alignas(64) Row {
  uint8_t byte[frame::kBlockElements + 64];
};

// [Note: rows within a page]
// A load or store that crosses the end of a page takes long (Zen 5: a store 23 cycles), and a row
// is read or written by some that begin at any of its bytes. Where a stack begins is drawn by
// chance for each process: without this alignment an AVX-512 encoder loses up to 40 % in one out of
// three.
inline constexpr uint32_t kRowAlignment = 2048;
static_assert(sizeof(Row) <= kRowAlignment && kPageBytes % kRowAlignment == 0);

struct alignas(kRowAlignment) AlignedRow : Row {};

// Calls visit with 0, 1, 2 and 3 as constants: shifts by a constant are cheaper.
template <typename Visit>
[[gnu::always_inline]] inline void for_quarters(Visit visit) {
  visit.template operator()<0>();
  visit.template operator()<1>();
  visit.template operator()<2>();
  visit.template operator()<3>();
}

// kLanes elements of kWidth bytes, in kWidth vectors, to byte planes and back. Of the planes only
// the first kPlanes matter: others are not made, and are 0 when they are joined.
template <uint32_t kWidth, uint32_t kPlanes = kWidth>
[[gnu::always_inline]] inline void split_bytes(Vector (&v)[kWidth]) {
  if constexpr (kWidth > 1) {
    constexpr uint32_t kHalf = kWidth / 2;
    Vector even[kHalf], odd[kHalf];
    for (uint32_t i = 0; i < kHalf; ++i) {
      even[i] = even_bytes(v[2 * i], v[2 * i + 1]);
      if constexpr (kPlanes > 1) {
        odd[i] = odd_bytes(v[2 * i], v[2 * i + 1]);
      }
    }
    split_bytes<kHalf, (kPlanes + 1) / 2>(even);
    if constexpr (kPlanes > 1) {
      split_bytes<kHalf, kPlanes / 2>(odd);
    }
    for (uint32_t i = 0; 2 * i < kPlanes; ++i) {
      v[2 * i] = even[i];
    }
    for (uint32_t i = 0; 2 * i + 1 < kPlanes; ++i) {
      v[2 * i + 1] = odd[i];
    }
  }
}
template <uint32_t kWidth, uint32_t kPlanes = kWidth>
[[gnu::always_inline]] inline void join_bytes(Vector (&v)[kWidth]) {
  if constexpr (kWidth > 1) {
    constexpr uint32_t kHalf = kWidth / 2;
    Vector even[kHalf]{}, odd[kHalf]{};
    for (uint32_t i = 0; 2 * i < kPlanes; ++i) {
      even[i] = v[2 * i];
    }
    for (uint32_t i = 0; 2 * i + 1 < kPlanes; ++i) {
      odd[i] = v[2 * i + 1];
    }
    join_bytes<kHalf, (kPlanes + 1) / 2>(even);
    if constexpr (kPlanes > 1) {
      join_bytes<kHalf, kPlanes / 2>(odd);
    }
    for (uint32_t i = 0; i < kHalf; ++i) {
      v[2 * i] = interleave_low(even[i], odd[i]);
      v[2 * i + 1] = interleave_high(even[i], odd[i]);
    }
  }
}

// [Note: tables of symbols]
// Where a look-up reaches as many entries as there are symbols, what depends on a symbol alone is
// found once for each of them, and then looked up for each of a block's 1024: a function of several
// instructions becomes one.
struct SymbolNumbers {
  alignas(kLanes) uint8_t number[kLanes];
};
constexpr SymbolNumbers make_symbol_numbers() {
  SymbolNumbers numbers{};
  for (uint32_t i = 0; i < kLanes; ++i) {
    numbers.number[i] = static_cast<uint8_t>(i % kTableSymbols);
  }
  return numbers;
}
inline constexpr SymbolNumbers kSymbolNumbers = make_symbol_numbers();

template <uint32_t kSymbolBits, typename Function>
class OfSymbols {
  static constexpr bool kIsTable = 1u << kSymbolBits <= kTableSymbols;

 public:
  [[gnu::always_inline]] explicit OfSymbols(Function function)
      : function_(function), table_(kIsTable ? function(load(kSymbolNumbers.number)) : Vector{}) {}
  [[gnu::always_inline]] Vector operator()(Vector symbols) const {
    return kIsTable ? look_up_symbols(table_, symbols) : function_(symbols);
  }

 private:
  Function function_;
  Vector table_;
};
template <uint32_t kSymbolBits, typename Function>
[[gnu::always_inline]] inline OfSymbols<kSymbolBits, Function> of_symbols(Function function) {
  return OfSymbols<kSymbolBits, Function>(function);
}

// --- Planes of the bits from kShift on (docs/format.md section 2) --------------------------------

template <uint32_t kShift, uint32_t kWidth>
inline void store_plane(uint8_t* plane, const Bytes& bytes) {
  if constexpr (kWidth == 1) {
    for (uint32_t i = 0; i < kVectors; ++i) {
      store_mask(plane + kLanes / 8 * i, mask_of_bit<kShift>(bytes.vector[i]));
    }
  } else {
    constexpr uint32_t kParts = 8 / kWidth;
    constexpr uint32_t kPlaneVectors = kVectors / kParts;
    for (uint32_t i = 0; i < kPlaneVectors; ++i) {
      Vector merged{};
      for_quarters([&]<uint32_t kPart>() {
        if constexpr (kPart < kParts) {
          const Vector value = bytes.vector[kPlaneVectors * kPart + i];
          merged |= move_bits<kShift, kWidth * kPart, kWidth>(value);
        }
      });
      store(plane + kLanes * i, merged);
    }
  }
}

// Sets the bits that were 0.
template <uint32_t kShift, uint32_t kWidth>
inline void add_plane(Bytes& bytes, const uint8_t* plane) {
  if constexpr (kWidth == 1) {
    for (uint32_t i = 0; i < kVectors; ++i) {
      bytes.vector[i] = set_bit<kShift>(bytes.vector[i], load_lanes(plane + kLanes / 8 * i));
    }
  } else {
    constexpr uint32_t kParts = 8 / kWidth;
    constexpr uint32_t kPlaneVectors = kVectors / kParts;
    for (uint32_t i = 0; i < kPlaneVectors; ++i) {
      const Vector merged = load(plane + kLanes * i);
      for_quarters([&]<uint32_t kPart>() {
        if constexpr (kPart < kParts) {
          bytes.vector[kPlaneVectors * kPart + i] |=
              move_bits<kWidth * kPart, kShift, kWidth>(merged);
        }
      });
    }
  }
}

// Visits the planes of a field of `bits` bits, fewer than 8, from bit kShift on: of 4, 2 and 1.
template <uint32_t kShift, uint32_t kWidth = 4, typename Byte, typename Visit>
[[gnu::always_inline]] inline void for_planes(Byte* planes, uint32_t bits, Visit visit) {
  if constexpr (kWidth != 0) {
    if ((bits & kWidth) == 0) {
      for_planes<kShift, kWidth / 2>(planes, bits, visit);
    } else if constexpr (kShift + kWidth <= 8) {
      visit.template operator()<kShift, kWidth>(planes);
      for_planes<kShift + kWidth, kWidth / 2>(planes + kWidth * kPlane1Bytes, bits, visit);
    }
  }
}

template <uint32_t kShift>
inline void store_field(uint8_t* planes, const Bytes& codes, uint32_t bits) {
  for_planes<kShift>(planes, bits, [&]<uint32_t kFrom, uint32_t kWidth>(uint8_t* plane) {
    store_plane<kFrom, kWidth>(plane, codes);
  });
}
// The reverse; the bits were 0.
template <uint32_t kShift>
inline void add_field(Bytes& codes, const uint8_t* planes, uint32_t bits) {
  for_planes<kShift>(planes, bits, [&]<uint32_t kTo, uint32_t kWidth>(const uint8_t* plane) {
    add_plane<kTo, kWidth>(codes, plane);
  });
}

inline constexpr uint32_t bytes_of_bits(uint32_t bits) { return (bits + 7) / 8; }
inline constexpr uint32_t units_of_bytes(uint32_t bytes) {
  return (bytes + frame::kUnitBytes - 1) / frame::kUnitBytes;
}

// `bytes`: a multiple of 128.
template <bool kStreaming>
inline void copy_lines(uint8_t* to, const uint8_t* from, uint32_t bytes) {
  for (uint32_t i = 0; i < bytes; i += kLanes) {
    store_line<kStreaming>(to + i, load(from + i));
  }
}

}  // namespace
}  // namespace memswap::cpu::MEMSWAP_ISA

MEMSWAP_VECTOR_END
