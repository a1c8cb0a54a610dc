// Layouts ints, bits and raw, and the checksum, with portable vectors.
#include "vector.h"
#include "vector_bitmap.h"
#include "vector_literal.h"

MEMSWAP_VECTOR_BEGIN

namespace memswap::cpu::MEMSWAP_ISA {
namespace {

inline constexpr uint32_t kReferenceBytes = sizeof(uint64_t);

// --- Integers ----------------------------------------------------------------------------------

// `Element`: the type by which they compare.
template <typename Element>
inline void find_extent(const uint8_t* elements, Element& least, Element& most) {
  using Values = typename Elements<Element>::Vector;
  Values low = load_as<Values>(elements), high = low;
  for (uint32_t i = kLanes; i < frame::kBlockElements * sizeof(Element); i += kLanes) {
    const Values v = load_as<Values>(elements + i);
    low = v < low ? v : low;
    high = v > high ? v : high;
  }
  constexpr uint32_t kCount = kLanes / sizeof(Element);
  alignas(kLanes) Element lows[kCount], highs[kCount];
  store_as(lows, low);
  store_as(highs, high);
  for (uint32_t half = kCount / 2; half != 0; half /= 2) {
    for (uint32_t i = 0; i < half; ++i) {
      lows[i] = lows[i + half] < lows[i] ? lows[i + half] : lows[i];
      highs[i] = highs[i + half] > highs[i] ? highs[i + half] : highs[i];
    }
  }
  least = lows[0];
  most = highs[0];
}

// Writes the planes of `bits` bits, no more than 8 kPlanes, of the elements' offsets.
template <uint32_t kWidth, uint32_t kPlanes>
inline void encode_offsets(const uint8_t* elements, uint64_t reference, uint32_t bits,
                           uint8_t* planes) {
  using Values = typename Elements<UnsignedOf<kWidth>>::Vector;
  const Values references = Values{} + static_cast<UnsignedOf<kWidth>>(reference);
  const uint32_t byte_planes = bits / 8;
  Bytes rest;
  for (uint32_t i = 0; i < kVectors; ++i) {
    Vector offsets[kWidth];
    for (uint32_t j = 0; j < kWidth; ++j) {
      offsets[j] = reinterpret_cast<Vector>(load_as<Values>(elements + kLanes * (kWidth * i + j)) -
                                            references);
    }
    // Of eight bytes that need no more than four, the others are left out first.
    constexpr uint32_t kNarrow = kWidth == 8 && kPlanes <= 4 ? 4 : kWidth;
    Vector v[kNarrow];
    for (uint32_t j = 0; j < kNarrow; ++j) {
      if constexpr (kNarrow == kWidth) {
        v[j] = offsets[j];
      } else {
        v[j] = even_words(offsets[2 * j], offsets[2 * j + 1]);
      }
    }
    split_bytes<kNarrow, kPlanes>(v);
    for (uint32_t p = 0; p < kPlanes; ++p) {
      if (p < byte_planes) {
        store(planes + frame::kBlockElements * p + kLanes * i, v[p]);
      } else if (p == byte_planes) {
        rest.vector[i] = v[p];
      }
    }
  }
  if (bits % 8 != 0) {
    store_field<0>(planes + frame::kBlockElements * byte_planes, rest, bits % 8);
  }
}

template <uint32_t kWidth, uint32_t kPlanes, bool kStreaming>
inline void decode_offsets(uint8_t* out, uint64_t reference, uint32_t bits, const uint8_t* planes) {
  using Values = typename Elements<UnsignedOf<kWidth>>::Vector;
  const Values references = Values{} + static_cast<UnsignedOf<kWidth>>(reference);
  const uint32_t byte_planes = bits / 8;
  Bytes rest{};
  add_field<0>(rest, planes + frame::kBlockElements * byte_planes, bits % 8);
  for (uint32_t i = 0; i < kVectors; ++i) {
    constexpr uint32_t kNarrow = kWidth == 8 && kPlanes <= 4 ? 4 : kWidth;
    Vector v[kNarrow]{};
    for (uint32_t p = 0; p < kPlanes; ++p) {
      v[p] = p < byte_planes    ? load(planes + frame::kBlockElements * p + kLanes * i)
             : p == byte_planes ? rest.vector[i]
                                : Vector{};
    }
    join_bytes<kNarrow, kPlanes>(v);
    for (uint32_t j = 0; j < kWidth; ++j) {
      Vector offset;
      if constexpr (kNarrow == kWidth) {
        offset = v[j];
      } else {
        offset = j % 2 == 0 ? widen_low_words(v[j / 2]) : widen_high_words(v[j / 2]);
      }
      const Values value = reinterpret_cast<Values>(offset) + references;
      store_line<kStreaming>(out + kLanes * (kWidth * i + j), reinterpret_cast<Vector>(value));
    }
  }
}

// Calls visit with as many planes as bits need, as a constant: 1, 2, 4 or 8.
template <uint32_t kWidth, typename Visit>
inline void for_byte_planes(uint32_t bits, Visit visit) {
  if constexpr (kWidth > 1) {
    if (bits > 4 * kWidth) {
      visit.template operator()<kWidth>();
    } else {
      for_byte_planes<kWidth / 2>(bits, visit);
    }
  } else {
    visit.template operator()<1>();
  }
}

template <typename Element, bool kStreaming>
EncodedBlock encode_ints(const EncodeParams& params, const void* elements, uint32_t count,
                         uint8_t* slab, uint8_t* payload) {
  if (count != frame::kBlockElements) {
    // The zeros behind the last element are none of the minimum's business. One block per tensor.
    return encode_scalar_block(params, elements, count, slab, payload);
  }
  constexpr uint32_t kWidth = sizeof(Element);
  using Bits = UnsignedOf<kWidth>;
  const auto* from = static_cast<const uint8_t*>(elements);
  Element least, most;
  find_extent(from, least, most);
  const auto reference = static_cast<Bits>(least);
  const auto range = static_cast<Bits>(static_cast<Bits>(most) - reference);
  const uint32_t bits = range == 0 ? 0 : 64 - static_cast<uint32_t>(__builtin_clzll(range));
  if (bits == 8 * kWidth) {
    return encode_literal<kStreaming>(params, elements, count, slab, payload);
  }
  store_as<uint64_t>(payload, reference);
  if (bits != 0) {
    for_byte_planes<kWidth>(bits, [&]<uint32_t kPlanes>() {
      encode_offsets<kWidth, kPlanes>(from, reference, bits, payload + kReferenceBytes);
    });
  }
  const uint32_t units = units_of_bytes(kReferenceBytes + kPlane1Bytes * bits);
  return {frame::kReference, units, 0, static_cast<uint8_t>(bits), 0};
}

template <uint32_t kWidth, bool kStreaming>
bool decode_ints(const DecodeParams& params, uint8_t* out, const uint8_t* slab,
                 const uint8_t* payload, const CodedBlock& block) {
  if (block.mode == frame::kLiteral) {
    return decode_literal<kStreaming>(params, out, slab, payload, block);
  }
  const uint32_t bits = block.center;
  if (bits >= 8 * kWidth || block.units != units_of_bytes(kReferenceBytes + kPlane1Bytes * bits)) {
    return false;
  }
  const auto reference = load_as<uint64_t>(payload);
  for_byte_planes<kWidth>(bits, [&]<uint32_t kPlanes>() {
    decode_offsets<kWidth, kPlanes, kStreaming>(out, reference, bits, payload + kReferenceBytes);
  });
  return true;
}

// --- Bits and raw ------------------------------------------------------------------------------

EncodedBlock encode_bits(const EncodeParams& params, const void* elements, uint32_t count,
                         uint8_t* slab, uint8_t* payload) {
  const auto* from = static_cast<const uint8_t*>(elements);
  Bitmap bitmap;
  Vector all{};
  for (uint32_t i = 0; i < kVectors; ++i) {
    const Vector bytes = load(from + kLanes * i);
    all |= bytes;
    store_mask(bitmap.byte + kLanes / 8 * i, mask_of(nonzero(bytes)));
  }
  if (any(mask_of(less(broadcast(1), all)))) {
    return encode_literal<false>(params, elements, count, slab, payload);
  }
  bool packed;
  uint8_t* end = encode_bitmap(bitmap, payload, packed);
  store_as<uint64_t>(end, 0);  // the rest of the last unit
  return {frame::kBitmap, units_of_bytes(static_cast<uint32_t>(end - payload)), 0, 0, 0, packed};
}

template <bool kStreaming>
bool decode_bits(const DecodeParams& params, uint8_t* out, const uint8_t* slab,
                 const uint8_t* payload, const CodedBlock& block) {
  if (block.mode == frame::kLiteral) {
    return decode_literal<kStreaming>(params, out, slab, payload, block);
  }
  const uint8_t* end = payload + block.units * frame::kUnitBytes;
  Bitmap bitmap;
  const uint8_t* last = decode_bitmap(bitmap, block.packed, payload, end);
  if (last == nullptr || end - last >= frame::kUnitBytes) {
    return false;
  }
  for (uint32_t i = 0; i < kVectors; ++i) {
    store_line<kStreaming>(out + kLanes * i,
                           only(load_lanes(bitmap.byte + kLanes / 8 * i), broadcast(1)));
  }
  return true;
}

}  // namespace

EncodeBlocks ints_encoder(const EncodeParams& params) {
  const bool is_signed = frame::is_signed(params.dtype);
  return for_width<EncodeBlocks>(
      params.dtype, params.streaming, [&]<uint32_t kWidth, bool kStreaming>() -> EncodeBlocks {
        using Bits = UnsignedOf<kWidth>;
        return is_signed ? &encode_one_by_one<encode_ints<std::make_signed_t<Bits>, kStreaming>>
                         : &encode_one_by_one<encode_ints<Bits, kStreaming>>;
      });
}

DecodeBlocks ints_decoder(const DecodeParams& params) {
  return for_width<DecodeBlocks>(params.dtype, params.streaming,
                                 []<uint32_t kWidth, bool kStreaming>() -> DecodeBlocks {
                                   return &decode_one_by_one<decode_ints<kWidth, kStreaming>>;
                                 });
}

EncodeBlocks bits_encoder(const EncodeParams&) { return &encode_one_by_one<encode_bits>; }

DecodeBlocks bits_decoder(const DecodeParams& params) {
  return for_streaming<DecodeBlocks>(params.streaming, []<bool kStreaming>() -> DecodeBlocks {
    return &decode_one_by_one<decode_bits<kStreaming>>;
  });
}

EncodeBlocks raw_encoder(const EncodeParams& params) {
  return for_streaming<EncodeBlocks>(params.streaming, []<bool kStreaming>() -> EncodeBlocks {
    return &encode_one_by_one<encode_literal<kStreaming>>;
  });
}

DecodeBlocks raw_decoder(const DecodeParams& params) {
  return for_streaming<DecodeBlocks>(params.streaming, []<bool kStreaming>() -> DecodeBlocks {
    return &decode_one_by_one<decode_literal<kStreaming>>;
  });
}

// Words stand in pairs in 64-bit lanes: the even ones weigh 1, 5, 9, ..., the odd ones 2 more.
uint32_t checksum(const void* data, size_t bytes) {
  const auto* at = static_cast<const uint8_t*>(data);
  Words64 weight{}, even{}, odd{};
  for (uint32_t i = 0; i < kWords; ++i) {
    weight[i] = 1 + 4 * uint64_t{i};
  }
  const auto add_words = [&](Vector vector) {
    const Words64 words = reinterpret_cast<Words64>(vector);
    even += multiply_low_halves(words, weight);
    odd += multiply_low_halves(words >> 32, weight + 2);
    weight += 4 * kWords;
  };
  size_t done = 0;
  for (; done + kLanes <= bytes; done += kLanes) {
    add_words(load(at + done));
  }
  if (done < bytes) {
    Vector last{};
    __builtin_memcpy(&last, at + done, bytes - done);
    add_words(last);
  }
  uint64_t sum = 0;
  for (uint32_t i = 0; i < kWords; ++i) {
    sum += even[i] + odd[i];
  }
  return static_cast<uint32_t>(sum % frame::kChecksumPrime);
}

}  // namespace memswap::cpu::MEMSWAP_ISA

MEMSWAP_VECTOR_END
