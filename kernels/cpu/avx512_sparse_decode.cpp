// Frames to shape sparse, with AVX-512.
#include "avx512.h"
#include "avx512_bitmap.h"
#include "avx512_exponents.h"
#include "avx512_floats.h"
#include "avx512_literal.h"

MEMSWAP_AVX512_BEGIN

namespace memswap::cpu::avx512 {
namespace {

using frame::Dtype;
using frame::Shape;

// Where a block's streams are.
struct Streams {
  Bitmap bitmap;
  uint32_t live;  // survivors
  uint8_t center;
  const uint8_t* planes;  // byte planes, one behind the other
  const uint8_t* rest[2];
  const uint8_t* codes;
  const uint8_t* signs;  // NULL: every zero is +0
  const uint8_t* escapes;
  const uint8_t* end;

  uint32_t vectors() const { return (live + kLanes - 1) / kLanes; }
};

// False if the payload ends before its streams; escapes are not looked at yet.
template <Dtype kDtype>
inline bool find_streams(Streams& streams, const uint8_t* payload, uint32_t mode, uint32_t units,
                         bool packed) {
  using Type = Float<kDtype>;
  streams.end = payload + units * frame::kUnitBytes;
  const uint8_t* at = decode_bitmap(streams.bitmap, packed, payload, streams.end);
  if (at == nullptr) {
    return false;
  }
  const uint32_t live = streams.bitmap.count();
  const uint32_t plane_bytes = Type::kBytePlanes * live;
  const uint32_t first_bytes =
      Type::kRestBits == 0 ? 0 : bytes_of_bits((Type::kRestBits == 4 ? 4 : 2) * live);
  const uint32_t second_bytes = Type::kRestBits == 3 ? bytes_of_bits(live) : 0;
  const uint32_t code_bytes = bytes_of_bits(2 * live);
  const bool has_signs = mode == frame::kSignedZeros;
  const uint32_t sign_bytes = has_signs ? bytes_of_bits(frame::kBlockElements - live) : 0;
  if (plane_bytes + first_bytes + second_bytes + code_bytes + sign_bytes >
      static_cast<size_t>(streams.end - at)) {
    return false;
  }
  streams.live = live;
  streams.planes = at;
  streams.rest[0] = streams.planes + plane_bytes;
  streams.rest[1] = streams.rest[0] + first_bytes;
  streams.codes = streams.rest[1] + second_bytes;
  streams.signs = has_signs ? streams.codes + code_bytes : nullptr;
  streams.escapes = streams.codes + code_bytes + sign_bytes;
  return true;
}

// The survivors, one after another, to `out`: elements as they were.
template <Dtype kDtype, bool kStreaming>
inline void join_survivors(uint8_t* out, const Streams& streams, const Row& escapes) {
  using Type = Float<kDtype>;
  constexpr uint32_t kWidth = Type::kWidth;
  const Vector table = code_table<InRotated<kDtype>>(streams.center);
  const uint8_t* next_escape = escapes.byte;
  for (uint32_t i = 0; i < streams.vectors(); ++i) {
    const Vector code = load_symbols2(streams.codes + kLanes / 4 * i);
    const __mmask64 escaped =
        _mm512_testn_epi8_mask(code, broadcast(3)) & first_lanes(streams.live - kLanes * i);
    const Vector symbol =
        _mm512_mask_expand_epi8(_mm512_permutexvar_epi8(code, table), escaped, load(next_escape));
    next_escape += count_bits(escaped);
    Vector v[kWidth];
    for (uint32_t p = 0; p < Type::kBytePlanes; ++p) {
      v[p] = load(streams.planes + streams.live * p + kLanes * i);
    }
    Vector& top = v[kWidth - 1];
    top = symbol;
    if constexpr (Type::kRestBits == 4) {
      const Vector rest = load_symbols4(streams.rest[0] + kLanes / 2 * i);
      top = _mm512_ternarylogic_epi64(symbol, rest, broadcast(15), 0xf8);
    } else if constexpr (Type::kRestBits == 3) {
      const Vector rest = load_symbols2(streams.rest[0] + kLanes / 4 * i);
      top = _mm512_ternarylogic_epi64(symbol, rest, broadcast(3), 0xf8);
      top = _mm512_mask_add_epi8(top, load64(streams.rest[1] + kLanes / 8 * i), top, broadcast(4));
    }
    join_bytes<kWidth>(v);
    for (uint32_t j = 0; j < kWidth; ++j) {
      store_line<kStreaming>(out + kLanes * (kWidth * i + j), rotate_right<kWidth>(v[j]));
    }
  }
}

// Up to 64 bits of a stream from bit `at` on; what is behind `count` bits is unspecified.
inline uint64_t bits_at(const uint8_t* stream, uint32_t at) {
  const uint64_t low = load64(stream + at / 8) >> (at % 8);
  const uint64_t high = stream[at / 8 + 8];
  return at % 8 == 0 ? low : low | high << (64 - at % 8);
}

template <uint32_t kWidth>
inline constexpr uint32_t kElementLanes = kLanes / kWidth;

// `others`, with the first elements of `value` in the lanes of a mask's low bits.
template <uint32_t kWidth>
inline Vector expand_lanes(Vector others, uint64_t lanes, Vector value) {
  if constexpr (kWidth == 1) {
    return _mm512_mask_expand_epi8(others, lanes, value);
  } else if constexpr (kWidth == 2) {
    return _mm512_mask_expand_epi16(others, static_cast<__mmask32>(lanes), value);
  } else if constexpr (kWidth == 4) {
    return _mm512_mask_expand_epi32(others, static_cast<__mmask16>(lanes), value);
  } else {
    return _mm512_mask_expand_epi64(others, static_cast<__mmask8>(lanes), value);
  }
}

// +0, and -0 in the chosen lanes.
template <uint32_t kWidth>
inline Vector zeros_with_signs(uint64_t negative) {
  if constexpr (kWidth == 1) {
    return _mm512_maskz_mov_epi8(negative, broadcast(0x80));
  } else if constexpr (kWidth == 2) {
    return _mm512_maskz_set1_epi16(static_cast<__mmask32>(negative), INT16_MIN);
  } else if constexpr (kWidth == 4) {
    return _mm512_maskz_set1_epi32(static_cast<__mmask16>(negative), INT32_MIN);
  } else {
    return _mm512_maskz_set1_epi64(static_cast<__mmask8>(negative), INT64_MIN);
  }
}

// The survivors in a row to their places among zeros.
template <uint32_t kWidth, bool kStreaming, bool kSigns>
inline void spread(uint8_t* out, const uint8_t* survivors, const Streams& streams) {
  constexpr uint32_t kElements = kElementLanes<kWidth>;
  uint32_t zeros = 0;
  for (uint32_t i = 0; i < kVectors; ++i) {
    const uint64_t word = streams.bitmap.word[i];
    uint64_t negative = 0;
    if constexpr (kSigns) {
      negative = _pdep_u64(bits_at(streams.signs, zeros), ~word);
      zeros += count_bits(~word);
    }
    for (uint32_t j = 0; j < kWidth; ++j) {
      const uint64_t lanes =
          kWidth == 1 ? word : word >> (kElements * j % 64) & ((uint64_t{1} << kElements % 64) - 1);
      Vector zero = opaque_zero();  // see [Note: compressing into a zero]
      if constexpr (kSigns) {
        zero = zeros_with_signs<kWidth>(negative >> (kElements * j % 64));
      }
      const Vector v = expand_lanes<kWidth>(zero, lanes, load(survivors));
      survivors += kWidth * count_bits(lanes);
      store_line<kStreaming>(out + kLanes * (kWidth * i + j), v);
    }
  }
}

template <Dtype kDtype, bool kStreaming>
bool decode_sparse(void* out, const uint8_t* slab, const uint8_t* payload, uint32_t mode,
                   uint32_t units, uint8_t center, bool packed) {
  using Type = Float<kDtype>;
  constexpr uint32_t kWidth = Type::kWidth;
  if constexpr (kStreaming) {
    if (!is_line_aligned(out)) {
      return decode_sparse<kDtype, false>(out, slab, payload, mode, units, center, packed);
    }
  }
  auto* to = static_cast<uint8_t*>(out);
  if (mode == frame::kLiteral) {
    return decode_literal<kStreaming>(to, kDtype, Shape::kSparse, slab, payload, units);
  }
  for (uint32_t i = 0; i < Type::kBlockBytes / 2; i += kLanes) {
    prefetch(payload + i, kPrefetchShortBytes);
  }
  Streams streams;
  if (!find_streams<kDtype>(streams, payload, mode, units, packed)) {
    return false;
  }
  streams.center = center;
  uint32_t escape_count = 0;
  for (uint32_t i = 0; i < streams.vectors(); ++i) {
    const Vector code = load_symbols2(streams.codes + kLanes / 4 * i);
    escape_count += count_bits(_mm512_testn_epi8_mask(code, broadcast(3)) &
                               first_lanes(streams.live - kLanes * i));
  }
  alignas(kRowAlignment) Row escapes;
  const uint8_t* last = decode_escapes2<InRotated<kDtype>>(streams.escapes, streams.end,
                                                           escape_count, center, escapes);
  if (last == nullptr || streams.end - last >= frame::kUnitBytes) {
    return false;
  }
  if (streams.live == frame::kBlockElements) {
    join_survivors<kDtype, kStreaming>(to, streams, escapes);
    return true;
  }
  alignas(64) uint8_t survivors[Type::kBlockBytes + kLanes];
  join_survivors<kDtype, false>(survivors, streams, escapes);
  if (streams.signs != nullptr) {
    spread<kWidth, kStreaming, true>(to, survivors, streams);
  } else {
    spread<kWidth, kStreaming, false>(to, survivors, streams);
  }
  return true;
}

}  // namespace

DecodeBlock sparse_decoder(Dtype dtype, bool streaming) {
  return for_float<DecodeBlock>(dtype, streaming,
                                []<Dtype kDtype, bool kStreaming>() -> DecodeBlock {
                                  return &decode_sparse<kDtype, kStreaming>;
                                });
}

}  // namespace memswap::cpu::avx512

MEMSWAP_AVX512_END
