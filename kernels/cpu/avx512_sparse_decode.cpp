// Frames to shape sparse, with AVX-512.
#include "avx512.h"
#include "avx512_bitmap.h"
#include "avx512_exponents.h"
#include "avx512_lanes.h"
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
  streams.live = live;
  streams.planes = at;
  at += Type::kBytePlanes * live;
  streams.rest[0] = at;
  if constexpr (Type::kRestBits != 0) {
    at += bytes_of_bits((Type::kRestBits == 4 ? 4 : 2) * live);
  }
  streams.rest[1] = at;
  if constexpr (Type::kRestBits == 3) {
    at += bytes_of_bits(live);
  }
  streams.codes = at;
  at += bytes_of_bits(2 * live);
  streams.signs = nullptr;
  if (mode == frame::kSignedZeros) {
    streams.signs = at;
    at += bytes_of_bits(frame::kBlockElements - live);
  }
  streams.escapes = at;
  return at <= streams.end;
}

// The survivors, one after another, to `out`: elements as they were.
template <Dtype kDtype, bool kStreaming>
inline void join_survivors(uint8_t* out, const Streams& streams, const Row& escapes) {
  using Type = Float<kDtype>;
  constexpr uint32_t kWidth = Type::kWidth;
  const Vector centers = broadcast(streams.center);
  const uint8_t* next_escape = escapes.byte;
  for (uint32_t i = 0; i < streams.vectors(); ++i) {
    const Vector code =
        _mm512_and_si512(load_symbols2(streams.codes + kLanes / 4 * i), broadcast(3));
    // Behind the last survivor there may be more escapes than there are: never beyond their row.
    const __mmask64 escaped =
        _mm512_testn_epi8_mask(code, code) & first_lanes(streams.live - kLanes * i);
    const Vector symbol =
        _mm512_mask_expand_epi8(_mm512_sub_epi8(centers, code), escaped, load(next_escape));
    next_escape += count_bits(escaped);
    Vector v[kWidth];
    for (uint32_t p = 0; p < Type::kBytePlanes; ++p) {
      v[p] = load(streams.planes + streams.live * p + kLanes * i);
    }
    Vector& top = v[kWidth - 1];
    top = symbol;
    if constexpr (Type::kRestBits == 4) {
      const Vector rest = load_symbols4(streams.rest[0] + kLanes / 2 * i);
      top = _mm512_ternarylogic_epi64(shift_left<4>(symbol), rest, broadcast(15), 0xf8);
    } else if constexpr (Type::kRestBits == 3) {
      const Vector rest = load_symbols2(streams.rest[0] + kLanes / 4 * i);
      top = _mm512_ternarylogic_epi64(shift_left<3>(symbol), rest, broadcast(3), 0xf8);
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
      Vector v = expand_lanes<kWidth>(lanes, load(survivors));
      survivors += kWidth * count_bits(lanes);
      if constexpr (kSigns) {
        v = with_negative_zeros<kWidth>(v, negative >> (kElements * j % 64));
      }
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
    prefetch(payload + i, kPrefetchBytes / 2);
  }
  Streams streams;
  if (!find_streams<kDtype>(streams, payload, mode, units, packed)) {
    return false;
  }
  streams.center = center;
  uint32_t escape_count = 0;
  for (uint32_t i = 0; i < streams.vectors(); ++i) {
    const Vector code =
        _mm512_and_si512(load_symbols2(streams.codes + kLanes / 4 * i), broadcast(3));
    escape_count +=
        count_bits(_mm512_testn_epi8_mask(code, code) & first_lanes(streams.live - kLanes * i));
  }
  Row escapes;
  const uint8_t* last =
      decode_escapes2(streams.escapes, streams.end, escape_count, center, escapes);
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
