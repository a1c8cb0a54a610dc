// Shapes ints, bits and raw, the checksum and the copy, with AVX-512. These move bytes more than
// they compute.
#include "avx512.h"
#include "avx512_bitmap.h"
#include "avx512_literal.h"
#include "by_dtype.h"

MEMSWAP_AVX512_BEGIN

namespace memswap::cpu::avx512 {
namespace {

using frame::Dtype;
using frame::Shape;

inline constexpr uint32_t kReferenceBytes = sizeof(uint64_t);

// --- Integers of kWidth bytes ------------------------------------------------------------------

template <uint32_t kWidth>
inline Vector broadcast_element(uint64_t value) {
  if constexpr (kWidth == 1) {
    return _mm512_set1_epi8(static_cast<char>(value));
  } else if constexpr (kWidth == 2) {
    return _mm512_set1_epi16(static_cast<short>(value));
  } else if constexpr (kWidth == 4) {
    return _mm512_set1_epi32(static_cast<int>(value));
  } else {
    return _mm512_set1_epi64(static_cast<long long>(value));
  }
}

template <uint32_t kWidth>
inline Vector add(Vector a, Vector b) {
  if constexpr (kWidth == 1) {
    return _mm512_add_epi8(a, b);
  } else if constexpr (kWidth == 2) {
    return _mm512_add_epi16(a, b);
  } else if constexpr (kWidth == 4) {
    return _mm512_add_epi32(a, b);
  } else {
    return _mm512_add_epi64(a, b);
  }
}

template <uint32_t kWidth>
inline Vector minimum(Vector a, Vector b) {
  if constexpr (kWidth == 1) {
    return _mm512_min_epu8(a, b);
  } else if constexpr (kWidth == 2) {
    return _mm512_min_epu16(a, b);
  } else if constexpr (kWidth == 4) {
    return _mm512_min_epu32(a, b);
  } else {
    return _mm512_min_epu64(a, b);
  }
}

template <uint32_t kWidth>
inline uint64_t least(Vector v) {
  if constexpr (kWidth == 8) {
    return _mm512_reduce_min_epu64(v);
  } else if constexpr (kWidth == 4) {
    return _mm512_reduce_min_epu32(v);
  } else {
    if constexpr (kWidth == 1) {  // as words: the lesser of each two bytes
      v = _mm512_min_epu8(v, _mm512_srli_epi16(v, 8));
      v = _mm512_and_si512(v, _mm512_set1_epi16(0xff));
    }
    const __m256i half =
        _mm256_min_epu16(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1));
    const __m128i quarter =
        _mm_min_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    return static_cast<uint16_t>(_mm_cvtsi128_si32(_mm_minpos_epu16(quarter)));
  }
}

struct Extent {
  uint64_t reference;  // the minimum's bits
  uint64_t range;      // maximum - minimum
};

// `bias`: what makes the elements compare as unsigned numbers, the sign bit or nothing.
template <uint32_t kWidth>
inline Extent extent_of(const uint8_t* elements, uint64_t bias) {
  constexpr uint64_t kMask = ~uint64_t{0} >> (64 - 8 * kWidth);
  const Vector flip = broadcast_element<kWidth>(bias);
  const Vector ones = broadcast(255);
  Vector low = ones;
  Vector negated_high = ones;
  for (uint32_t i = 0; i < kVectors * kWidth; ++i) {
    const Vector v = _mm512_xor_si512(load(elements + kLanes * i), flip);
    low = minimum<kWidth>(low, v);
    negated_high = minimum<kWidth>(negated_high, _mm512_xor_si512(v, ones));
  }
  const uint64_t least_value = least<kWidth>(low);
  const uint64_t most = ~least<kWidth>(negated_high) & kMask;
  return {least_value ^ bias, most - least_value};
}

// Offsets that need no more than 32 bits are worth narrowing first: half the shuffling.
template <uint32_t kWidth, uint32_t kNarrow>
inline void load_offsets(const uint8_t* elements, Vector negated_reference, Vector (&v)[kNarrow]) {
  if constexpr (kWidth == kNarrow) {
    for (uint32_t j = 0; j < kWidth; ++j) {
      v[j] = add<kWidth>(load(elements + kLanes * j), negated_reference);
    }
  } else {
    for (uint32_t j = 0; j < kNarrow; ++j) {
      const uint8_t* from = elements + 2 * kLanes * j;
      const Vector a = add<kWidth>(load(from), negated_reference);
      const Vector b = add<kWidth>(load(from + kLanes), negated_reference);
      v[j] = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi64_epi32(a)),
                                _mm512_cvtepi64_epi32(b), 1);
    }
  }
}

// Writes the planes of `bits` bits of the elements' offsets.
template <uint32_t kWidth, uint32_t kNarrow>
inline void encode_offsets(const uint8_t* elements, uint64_t reference, uint32_t bits,
                           uint8_t* planes) {
  const Vector negated_reference = broadcast_element<kWidth>(0 - reference);
  const uint32_t byte_planes = bits / 8;
  Bytes rest;
  for (uint32_t i = 0; i < kVectors; ++i) {
    Vector v[kNarrow];
    load_offsets<kWidth, kNarrow>(elements + kLanes * kWidth * i, negated_reference, v);
    split_bytes<kNarrow>(v);
    for (uint32_t p = 0; p < kNarrow; ++p) {
      if (p < byte_planes) {
        store(planes + frame::kBlockElements * p + kLanes * i, v[p]);
      } else if (p == byte_planes) {
        rest.vector[i] = v[p];
      }
    }
  }
  store_field<0>(planes + frame::kBlockElements * byte_planes, rest, bits % 8);
}

template <uint32_t kWidth, uint32_t kNarrow, bool kStreaming>
inline void decode_offsets(uint8_t* out, uint64_t reference, uint32_t bits, const uint8_t* planes) {
  const Vector references = broadcast_element<kWidth>(reference);
  const uint32_t byte_planes = bits / 8;
  Bytes rest = no_bytes();
  add_field<0>(rest, planes + frame::kBlockElements * byte_planes, bits % 8);
  for (uint32_t i = 0; i < kVectors; ++i) {
    Vector v[kNarrow];
    for (uint32_t p = 0; p < kNarrow; ++p) {
      v[p] = p < byte_planes    ? load(planes + frame::kBlockElements * p + kLanes * i)
             : p == byte_planes ? rest.vector[i]
                                : _mm512_setzero_si512();
    }
    join_bytes<kNarrow>(v);
    uint8_t* to = out + kLanes * kWidth * i;
    for (uint32_t j = 0; j < kNarrow; ++j) {
      if constexpr (kWidth == kNarrow) {
        store_line<kStreaming>(to + kLanes * j, add<kWidth>(v[j], references));
      } else {
        const Vector low = _mm512_cvtepu32_epi64(_mm512_castsi512_si256(v[j]));
        const Vector high = _mm512_cvtepu32_epi64(_mm512_extracti64x4_epi64(v[j], 1));
        store_line<kStreaming>(to + 2 * kLanes * j, add<kWidth>(low, references));
        store_line<kStreaming>(to + 2 * kLanes * j + kLanes, add<kWidth>(high, references));
      }
    }
  }
}

template <uint32_t kWidth, bool kStreaming>
EncodedBlock encode_ints(const EncodeParams& params, const void* elements, uint32_t count,
                         uint8_t* slab, uint8_t* payload) {
  if (count != frame::kBlockElements) {
    // The zeros behind the last element are none of the minimum's business. One block per tensor.
    return encode_scalar_block(params, elements, count, slab, payload);
  }
  const auto* from = static_cast<const uint8_t*>(elements);
  const uint64_t bias = frame::is_signed(params.dtype) ? uint64_t{1} << (8 * kWidth - 1) : 0;
  const Extent extent = extent_of<kWidth>(from, bias);
  const uint32_t bits = 64 - static_cast<uint32_t>(_lzcnt_u64(extent.range));
  if (bits == 8 * kWidth) {
    return encode_literal<kStreaming>(from, params.dtype, Shape::kInts, slab, payload);
  }
  store64(payload, extent.reference);
  uint8_t* planes = payload + kReferenceBytes;
  if (kWidth == 8 && bits < 32) {
    encode_offsets<kWidth, kWidth == 8 ? 4 : kWidth>(from, extent.reference, bits, planes);
  } else if (bits != 0) {
    encode_offsets<kWidth, kWidth>(from, extent.reference, bits, planes);
  }
  const uint32_t units = units_of_bytes(kReferenceBytes + kPlane1Bytes * bits);
  return {frame::kReference, units, 0, static_cast<uint8_t>(bits), 0};
}

template <Dtype kDtypeOfWidth, bool kStreaming>
bool decode_ints(void* out, const uint8_t* slab, const uint8_t* payload, uint32_t mode,
                 uint32_t units, uint8_t center, bool) {
  constexpr uint32_t kWidth = frame::width_of(kDtypeOfWidth);
  if constexpr (kStreaming) {
    if (!is_line_aligned(out)) {
      return decode_ints<kDtypeOfWidth, false>(out, slab, payload, mode, units, center, false);
    }
  }
  auto* to = static_cast<uint8_t*>(out);
  if (mode == frame::kLiteral) {
    return decode_literal<kStreaming>(to, kDtypeOfWidth, Shape::kInts, slab, payload, units);
  }
  const uint32_t bits = center;
  if (bits >= 8 * kWidth || units != units_of_bytes(kReferenceBytes + kPlane1Bytes * bits)) {
    return false;
  }
  const uint64_t reference = load64(payload);
  const uint8_t* planes = payload + kReferenceBytes;
  if (bits == 0) {
    for (uint32_t i = 0; i < kVectors * kWidth; ++i) {
      store_line<kStreaming>(to + kLanes * i, broadcast_element<kWidth>(reference));
    }
  } else if (kWidth == 8 && bits < 32) {
    decode_offsets<kWidth, kWidth == 8 ? 4 : kWidth, kStreaming>(to, reference, bits, planes);
  } else {
    decode_offsets<kWidth, kWidth, kStreaming>(to, reference, bits, planes);
  }
  return true;
}

// --- Bits and raw ------------------------------------------------------------------------------

EncodedBlock encode_bits(const EncodeParams& params, const void* elements, uint32_t, uint8_t* slab,
                         uint8_t* payload) {
  const auto* from = static_cast<const uint8_t*>(elements);
  Bitmap bitmap;
  Vector all = _mm512_setzero_si512();
  for (uint32_t i = 0; i < kVectors; ++i) {
    const Vector bytes = load(from + kLanes * i);
    all = _mm512_or_si512(all, bytes);
    bitmap.word[i] = _mm512_test_epi8_mask(bytes, bytes);
  }
  if (_mm512_test_epi8_mask(all, broadcast(0xfe)) != 0) {
    return encode_literal<false>(from, params.dtype, Shape::kBits, slab, payload);
  }
  bool packed;
  uint8_t* end = encode_bitmap(bitmap, payload, packed);
  store64(end, 0);  // the rest of the last unit
  return {frame::kBitmap, units_of_bytes(static_cast<uint32_t>(end - payload)), 0, 0, 0, packed};
}

template <bool kStreaming>
bool decode_bits(void* out, const uint8_t* slab, const uint8_t* payload, uint32_t mode,
                 uint32_t units, uint8_t center, bool packed) {
  if constexpr (kStreaming) {
    if (!is_line_aligned(out)) {
      return decode_bits<false>(out, slab, payload, mode, units, center, packed);
    }
  }
  auto* to = static_cast<uint8_t*>(out);
  if (mode == frame::kLiteral) {
    return decode_literal<kStreaming>(to, Dtype::kBits8, Shape::kBits, slab, payload, units);
  }
  const uint8_t* end = payload + units * frame::kUnitBytes;
  Bitmap bitmap;
  const uint8_t* last = decode_bitmap(bitmap, packed, payload, end);
  if (last == nullptr || end - last >= frame::kUnitBytes) {
    return false;
  }
  for (uint32_t i = 0; i < kVectors; ++i) {
    store_line<kStreaming>(to + kLanes * i, _mm512_maskz_mov_epi8(bitmap.word[i], broadcast(1)));
  }
  return true;
}

template <bool kStreaming>
EncodedBlock encode_raw(const EncodeParams& params, const void* elements, uint32_t, uint8_t* slab,
                        uint8_t* payload) {
  return encode_literal<kStreaming>(static_cast<const uint8_t*>(elements), params.dtype,
                                    Shape::kRaw, slab, payload);
}

template <Dtype kDtypeOfWidth, bool kStreaming>
bool decode_raw(void* out, const uint8_t* slab, const uint8_t* payload, uint32_t, uint32_t units,
                uint8_t, bool) {
  auto* to = static_cast<uint8_t*>(out);
  return kStreaming && is_line_aligned(out)
             ? decode_literal<true>(to, kDtypeOfWidth, Shape::kRaw, slab, payload, units)
             : decode_literal<false>(to, kDtypeOfWidth, Shape::kRaw, slab, payload, units);
}

}  // namespace

EncodeBlocks ints_encoder(const EncodeParams& params) {
  return for_width<EncodeBlocks>(
      params.dtype, params.streaming, []<Dtype kDtype, bool kStreaming>() -> EncodeBlocks {
        return &encode_one_by_one<encode_ints<frame::width_of(kDtype), kStreaming>>;
      });
}

DecodeBlock ints_decoder(Dtype dtype, bool streaming) {
  return for_width<DecodeBlock>(dtype, streaming,
                                []<Dtype kDtype, bool kStreaming>() -> DecodeBlock {
                                  return &decode_ints<kDtype, kStreaming>;
                                });
}

EncodeBlocks bits_encoder(const EncodeParams&) { return &encode_one_by_one<encode_bits>; }

DecodeBlock bits_decoder(bool streaming) {
  return streaming ? &decode_bits<true> : &decode_bits<false>;
}

EncodeBlocks raw_encoder(const EncodeParams& params) {
  return params.streaming ? &encode_one_by_one<encode_raw<true>>
                          : &encode_one_by_one<encode_raw<false>>;
}

DecodeBlock raw_decoder(Dtype dtype, bool streaming) {
  return for_width<DecodeBlock>(dtype, streaming,
                                []<Dtype kDtype, bool kStreaming>() -> DecodeBlock {
                                  return &decode_raw<kDtype, kStreaming>;
                                });
}

// Words stand in pairs in 64-bit lanes: the even ones weigh 1, 5, 9, ..., the odd ones 2 more.
uint32_t checksum(const void* data, size_t bytes) {
  constexpr uint64_t kPrime = 4294967291;  // docs/format.md section 4
  const auto* at = static_cast<const uint8_t*>(data);
  const Vector two = _mm512_set1_epi64(2);
  const Vector step = _mm512_set1_epi64(2 * kLanes / sizeof(uint32_t));
  Vector weight = _mm512_setr_epi64(1, 5, 9, 13, 17, 21, 25, 29);
  Vector even = _mm512_setzero_si512();
  Vector odd = _mm512_setzero_si512();
  const auto add_words = [&](Vector words) {
    even = _mm512_add_epi64(even, _mm512_mul_epu32(words, weight));
    odd = _mm512_add_epi64(
        odd, _mm512_mul_epu32(_mm512_srli_epi64(words, 32), _mm512_add_epi64(weight, two)));
    weight = _mm512_add_epi64(weight, step);
  };
  size_t done = 0;
  for (; done + kLanes <= bytes; done += kLanes) {
    add_words(load(at + done));
  }
  if (done < bytes) {
    const __mmask64 live = first_lanes(static_cast<uint32_t>(bytes - done));
    add_words(_mm512_maskz_loadu_epi8(live, at + done));
  }
  const auto sum = static_cast<uint64_t>(_mm512_reduce_add_epi64(_mm512_add_epi64(even, odd)));
  return static_cast<uint32_t>(sum % kPrime);
}

void copy_around_caches(void* to, const void* from, size_t bytes) {
  auto* out = static_cast<uint8_t*>(to);
  const auto* in = static_cast<const uint8_t*>(from);
  const auto copy_some = [&](size_t some) {
    const __mmask64 lanes = first_lanes(static_cast<uint32_t>(some));
    _mm512_mask_storeu_epi8(out, lanes, _mm512_maskz_loadu_epi8(lanes, in));
    out += some;
    in += some;
    bytes -= some;
  };
  const size_t before_line = (0 - reinterpret_cast<uintptr_t>(to)) % kLanes;
  copy_some(before_line < bytes ? before_line : bytes);
  for (; bytes >= kLanes; bytes -= kLanes) {
    store_line<true>(out, load(in));
    out += kLanes;
    in += kLanes;
  }
  copy_some(bytes);
}

}  // namespace memswap::cpu::avx512

MEMSWAP_AVX512_END
