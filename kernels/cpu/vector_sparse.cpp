// Shape sparse, with portable vectors.
#include "vector.h"
#include "vector_bitmap.h"
#include "vector_exponents.h"
#include "vector_floats.h"
#include "vector_literal.h"

MEMSWAP_VECTOR_BEGIN

namespace memswap::cpu::vector {
namespace {

using frame::Dtype;
using frame::Shape;

// The R bits that share a byte with E, as streams.
template <uint32_t kRestBits>
struct RestStreams {
  static constexpr uint32_t kFirstBits = kRestBits == 3 ? 2 : kRestBits;
  static constexpr uint32_t kSecondBits = kRestBits - kFirstBits;

  static uint32_t bytes(uint32_t live) {
    return bytes_of_bits(kFirstBits * live) + bytes_of_bits(kSecondBits * live);
  }

  // Of the bytes in `row`, of which those from `live` on are 0. Returns the end.
  static uint8_t* store(uint8_t* out, const Bytes& row, uint32_t live) {
    uint8_t* const second = out + bytes_of_bits(kFirstBits * live);
    for (uint32_t i = 0; kFirstBits != 0 && i < live; i += kLanes) {
      if constexpr (kFirstBits == 4) {
        store_symbols4(out + i / 2, row.vector[i / kLanes] & 15);
      } else {
        store_symbols2(out + i / 4, row.vector[i / kLanes] & 3);
      }
    }
    for (uint32_t i = 0; kSecondBits != 0 && i < live; i += kLanes) {
      store_bits(second + i / 8, lanes_where((row.vector[i / kLanes] & 4) != 0));
    }
    return second + bytes_of_bits(kSecondBits * live);
  }

  // Survivors `i` to `i + kLanes - 1`.
  static Vector load(const uint8_t* in, uint32_t live, uint32_t i) {
    Vector rest{};
    if constexpr (kFirstBits == 4) {
      rest = load_symbols4(in + i / 2);
    } else if constexpr (kFirstBits == 2) {
      rest = load_symbols2(in + i / 4);
    }
    if constexpr (kSecondBits != 0) {
      rest |= load_bits(in + bytes_of_bits(kFirstBits * live) + i / 8) & 4;
    }
    return rest;
  }
};

template <Dtype kDtype>
EncodedBlock encode_sparse(const EncodeParams&, const void* elements, uint32_t count, uint8_t* slab,
                           uint8_t* payload) {
  using Type = Float<kDtype>;
  using Rest = RestStreams<Type::kRestBits>;
  constexpr uint32_t kWidth = Type::kWidth;
  const auto* from = static_cast<const uint8_t*>(elements);
  Bitmap bitmap;
  Row planes[kWidth], signs;
  uint32_t live = 0;
  uint8_t* signs_end = signs.byte;
  Vector any_negative{};
  for (uint32_t i = 0; i < kVectors; ++i) {
    Vector v[kWidth];
    load_rotated<kWidth>(from + kLanes * kWidth * i, v);
    // The rotated +0 is 0, and -0 is 1.
    Vector magnitude = v[0] & 254;
    for (uint32_t p = 1; p < kWidth; ++p) {
      magnitude |= v[p];
    }
    const Vector nonzero = lanes_where(magnitude != 0);
    store_bits(bitmap.byte + kLanes / 8 * i, nonzero);
    uint8_t* end = nullptr;
    for (uint32_t p = 0; p < kWidth; ++p) {
      end = append(planes[p].byte + live, nonzero, v[p]);
    }
    live = static_cast<uint32_t>(end - planes[kWidth - 1].byte);
    signs_end = append(signs_end, ~nonzero, v[0]);
    any_negative |= v[0] & ~nonzero;
  }
  const uint32_t missing_zeros = frame::kBlockElements - count;
  const uint32_t zeros = frame::kBlockElements - live;
  const bool has_negative_zero = sum_of(any_negative) != 0;

  const uint32_t vectors = (live + kLanes - 1) / kLanes;
  Bytes top, all;
  for (uint32_t i = 0; i < vectors; ++i) {
    top.vector[i] = load(planes[kWidth - 1].byte + kLanes * i) & first_lanes(live - kLanes * i);
    all.vector[i] = top.vector[i] >> Type::kRestBits;
  }
  Statistics statistics = statistics_of(all, vectors);
  if (Type::kSymbolBits == canonical::kOutlierBits && may_have_outliers(statistics)) {
    const uint32_t low = crowded_window(all, vectors);
    if (low != 0) {
      count_crowd(all, vectors, low, statistics);
    }
  }
  const uint8_t center = center_of(statistics, 7);
  uint8_t codes[frame::kLowPlaneBytes + kLanes];
  Row values;
  uint8_t* values_end = values.byte;
  for (uint32_t i = 0; i < vectors; ++i) {
    const Vector value = center - all.vector[i];
    const Vector is_live = first_lanes(live - kLanes * i);
    const Vector coded = lanes_where(value - 1 < 3) & is_live;
    store_symbols2(codes + kLanes / 4 * i, value & coded);
    values_end = append(values_end, is_live & ~coded, value);
  }
  // S1, S2 and E bytes of 1024 escapes, and the vectors behind them.
  uint8_t escapes[frame::kBlockElements / 8 * (2 + 4 + 8) + kLanes];
  const uint8_t* escapes_end =
      encode_escapes2(values, static_cast<uint32_t>(values_end - values.byte), center, escapes);

  const auto escape_bytes = static_cast<uint32_t>(escapes_end - escapes);
  const uint32_t code_bytes = bytes_of_bits(2 * live);
  const uint32_t sign_bytes = has_negative_zero ? bytes_of_bits(zeros) : 0;
  bool packed;
  uint8_t* end = encode_bitmap(bitmap, payload, packed);
  const auto bitmap_bytes = static_cast<uint32_t>(end - payload);
  const uint32_t units = units_of_bytes(bitmap_bytes + live * Type::kBytePlanes +
                                        Rest::bytes(live) + code_bytes + sign_bytes + escape_bytes);
  if (units >= frame::max_payload_units(kDtype, Shape::kSparse)) {
    EncodedBlock literal = encode_literal<false>(from, kDtype, Shape::kSparse, slab, payload);
    literal.zeros = zeros - missing_zeros;
    return literal;
  }
  for (uint32_t p = 0; p < Type::kBytePlanes; ++p) {
    __builtin_memcpy(end, planes[p].byte, live);
    end += live;
  }
  end = Rest::store(end, top, live);
  __builtin_memcpy(end, codes, code_bytes);
  end += code_bytes;
  if (has_negative_zero) {
    for (uint32_t i = 0; i < zeros; i += kLanes) {
      const Vector sign = load(signs.byte + i) & first_lanes(zeros - i);
      store_bits(end + i / 8, lanes_where(sign != 0));
    }
    end += sign_bytes;
  }
  __builtin_memcpy(end, escapes, escape_bytes);
  store_as<uint64_t>(end + escape_bytes, 0);  // the rest of the last unit
  const uint32_t mode = has_negative_zero ? frame::kSignedZeros : frame::kZeros;
  return {mode, units, zeros - missing_zeros, center, center, packed};
}

template <Dtype kDtype, bool kStreaming>
bool decode_sparse(void* out, const uint8_t* slab, const uint8_t* payload, uint32_t mode,
                   uint32_t units, uint8_t center, bool packed) {
  using Type = Float<kDtype>;
  using Rest = RestStreams<Type::kRestBits>;
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
  const uint8_t* end = payload + units * frame::kUnitBytes;
  Bitmap bitmap;
  const uint8_t* planes = decode_bitmap(bitmap, packed, payload, end);
  if (planes == nullptr) {
    return false;
  }
  const uint32_t live = bitmap.count();
  const uint32_t zeros = mode == frame::kSignedZeros ? frame::kBlockElements - live : 0;
  const uint8_t* rest = planes + live * Type::kBytePlanes;
  const uint8_t* codes = rest + Rest::bytes(live);
  const uint8_t* sign_bits = codes + bytes_of_bits(2 * live);
  const uint8_t* escape_streams = sign_bits + bytes_of_bits(zeros);
  if (escape_streams > end) {
    return false;
  }
  Vector escaped[kVectors];
  Row tops, escapes, signs;
  uint32_t count = 0;
  for (uint32_t i = 0; i < live; i += kLanes) {
    const Vector code = load_symbols2(codes + i / 4);
    escaped[i / kLanes] = lanes_where(code == 0) & first_lanes(live - i);
    count += sum_of(escaped[i / kLanes] & 1);
    store(tops.byte + i, center - code);
  }
  const uint8_t* last = decode_escapes2(escape_streams, end, count, center, escapes);
  if (last == nullptr || end - last >= frame::kUnitBytes) {
    return false;
  }
  const uint8_t* next_escape = escapes.byte;
  for (uint32_t i = 0; i < live; i += kLanes) {
    const Vector symbol = expand(load(tops.byte + i), escaped[i / kLanes], next_escape);
    store(tops.byte + i, symbol << Type::kRestBits | Rest::load(rest, live, i));
  }
  for (uint32_t i = 0; i < zeros; i += kLanes) {
    store(signs.byte + i, load_bits(sign_bits + i / 8) & 1);
  }
  uint32_t taken = 0;
  const uint8_t* next_sign = signs.byte;
  for (uint32_t i = 0; i < kVectors; ++i) {
    const Vector nonzero = load_bits(bitmap.byte + kLanes / 8 * i);
    Vector v[kWidth];
    const uint8_t* next = nullptr;
    for (uint32_t p = 0; p < kWidth; ++p) {
      const uint8_t* plane = p < Type::kBytePlanes ? planes + p * live : tops.byte;
      next = plane + taken;
      v[p] = expand(Vector{}, nonzero, next);
    }
    taken = static_cast<uint32_t>(next - tops.byte);
    if (zeros != 0) {
      v[0] = expand(v[0], ~nonzero, next_sign);
    }
    store_rotated<kWidth, kStreaming>(to + kLanes * kWidth * i, v);
  }
  return true;
}

}  // namespace

EncodeBlocks sparse_encoder(const EncodeParams& params) {
  return for_float<EncodeBlocks>(params.dtype, false, []<Dtype kDtype, bool>() -> EncodeBlocks {
    return &encode_one_by_one<encode_sparse<kDtype>>;
  });
}

DecodeBlock sparse_decoder(Dtype dtype, bool streaming) {
  return for_float<DecodeBlock>(dtype, streaming,
                                []<Dtype kDtype, bool kStreaming>() -> DecodeBlock {
                                  return &decode_sparse<kDtype, kStreaming>;
                                });
}

}  // namespace memswap::cpu::vector

MEMSWAP_VECTOR_END
