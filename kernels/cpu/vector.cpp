// The table of the portable vector path. It has dense bfloat16, float16 and float32, upcast, bits
// and sparse bfloat16; everything else is the scalar code's.
#include "vector_bitmap.h"
#include "vector_exponents.h"

MEMSWAP_VECTOR_BEGIN

namespace memswap::cpu {
namespace vector {
namespace {

using frame::Dtype;
using frame::Shape;

// --- Dense -------------------------------------------------------------------------------------

template <Dtype kDtype>
struct Float {
  static constexpr frame::Split kSplit = frame::split_of(kDtype);
  static constexpr uint32_t kWidth = kSplit.width;
  static constexpr uint32_t kRestBits = kSplit.rest_bits;  // 0, or 3 in planes of 2 and 1
  static constexpr uint32_t kRestOffset = frame::kBlockElements * kSplit.byte_planes;
  static constexpr uint32_t kLowOffset = frame::rest_bytes(kSplit);
};

template <Dtype kDtype, bool kStreaming>
EncodedBlock encode_dense(const EncodeParams& params, const void* elements, uint32_t count,
                          uint8_t* slab, uint8_t* payload) {
  using Type = Float<kDtype>;
  const auto* from = static_cast<const uint8_t*>(elements);
  Bytes symbols;
  for (uint32_t i = 0; i < kVectors; ++i) {
    Vector v[Type::kWidth];
    for (uint32_t j = 0; j < Type::kWidth; ++j) {
      v[j] = rotate_left<Type::kWidth>(load(from + kLanes * (Type::kWidth * i + j)));
    }
    split_bytes<Type::kWidth>(v);
    for (uint32_t p = 0; p + 1 < Type::kWidth; ++p) {
      store_line<kStreaming>(slab + frame::kBlockElements * p + kLanes * i, v[p]);
    }
    symbols.vector[i] = v[Type::kWidth - 1];
  }
  if constexpr (Type::kRestBits != 0) {
    store_plane<0, 2, kStreaming>(slab + Type::kRestOffset, symbols);
    store_plane<2, 1, kStreaming>(slab + Type::kRestOffset + 2 * kPlane1Bytes, symbols);
    for (Vector& symbol : symbols.vector) {
      symbol >>= Type::kRestBits;
    }
  }
  const Choice choice = choose(symbols, params, Type::kSplit.exponent_bits);
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
    add_plane<0, 2>(top, slab + Type::kRestOffset);
    add_plane<2, 1>(top, slab + Type::kRestOffset + 2 * kPlane1Bytes);
  }
  auto* to = static_cast<uint8_t*>(out);
  for (uint32_t i = 0; i < kVectors; ++i) {
    Vector v[Type::kWidth];
    for (uint32_t p = 0; p + 1 < Type::kWidth; ++p) {
      v[p] = load(slab + frame::kBlockElements * p + kLanes * i);
    }
    v[Type::kWidth - 1] = top.vector[i];
    join_bytes<Type::kWidth>(v);
    for (uint32_t j = 0; j < Type::kWidth; ++j) {
      store_line<kStreaming>(to + kLanes * (Type::kWidth * i + j),
                             rotate_right<Type::kWidth>(v[j]));
    }
  }
  return true;
}

// --- Upcast ------------------------------------------------------------------------------------

struct alignas(64) HighHalves {
  uint16_t half[frame::kBlockElements];
};

template <bool kStreaming>
EncodedBlock encode_upcast(const EncodeParams& params, const void* elements, uint32_t count,
                           uint8_t* slab, uint8_t* payload) {
  const auto* from = static_cast<const uint8_t*>(elements);
  HighHalves high;
  uint32_t low_bits = 0;
  for (uint32_t e = 0; e < frame::kBlockElements; ++e) {
    const auto wide = load_as<uint32_t>(from + sizeof(uint32_t) * e);
    low_bits |= wide & 0xffff;
    high.half[e] = static_cast<uint16_t>(wide >> 16);
  }
  if (low_bits != 0) {
    return encode_scalar_block(params, elements, count, slab, payload);
  }
  return encode_dense<Dtype::kBf16, kStreaming>(params, high.half, count, slab, payload);
}

bool decode_upcast(void* out, const uint8_t* slab, const uint8_t* payload, uint32_t mode,
                   uint32_t units, uint8_t center, bool) {
  if (mode == frame::kLiteral) {
    return scalar_blocks().decoder(Dtype::kFp32, Shape::kUpcast, false)(out, slab, payload, mode,
                                                                        units, center, false);
  }
  HighHalves high;
  if (!decode_dense<Dtype::kBf16, false>(high.half, slab, payload, mode, units, center, false)) {
    return false;
  }
  auto* to = static_cast<uint8_t*>(out);
  for (uint32_t e = 0; e < frame::kBlockElements; ++e) {
    store_as(to + sizeof(uint32_t) * e, uint32_t{high.half[e]} << 16);
  }
  return true;
}

// --- Bits --------------------------------------------------------------------------------------

EncodedBlock encode_bits(const EncodeParams& params, const void* elements, uint32_t count,
                         uint8_t* slab, uint8_t* payload) {
  const auto* from = static_cast<const uint8_t*>(elements);
  Bitmap bitmap;
  Vector all{};
  for (uint32_t i = 0; i < kVectors; ++i) {
    const Vector bytes = load(from + kLanes * i);
    all |= bytes;
    store_bits(bitmap.byte + kLanes / 8 * i, lanes_where(bytes != 0));
  }
  if (sum_of(lanes_where(all > 1) & 1) != 0) {
    return encode_scalar_block(params, elements, count, slab, payload);
  }
  bool packed;
  uint8_t* end = encode_bitmap(bitmap, payload, packed);
  store_as<uint64_t>(end, 0);  // the rest of the last unit
  return {frame::kBitmap, units_of_bytes(static_cast<uint32_t>(end - payload)), 0, 0, 0, packed};
}

template <bool kStreaming>
bool decode_bits(void* out, const uint8_t* slab, const uint8_t* payload, uint32_t mode,
                 uint32_t units, uint8_t center, bool packed) {
  if (mode == frame::kLiteral) {
    return scalar_blocks().decoder(Dtype::kBits8, Shape::kBits, false)(out, slab, payload, mode,
                                                                       units, center, false);
  }
  if constexpr (kStreaming) {
    if (!is_line_aligned(out)) {
      return decode_bits<false>(out, slab, payload, mode, units, center, packed);
    }
  }
  const uint8_t* end = payload + units * frame::kUnitBytes;
  Bitmap bitmap;
  const uint8_t* last = decode_bitmap(bitmap, packed, payload, end);
  if (last == nullptr || end - last >= frame::kUnitBytes) {
    return false;
  }
  auto* to = static_cast<uint8_t*>(out);
  for (uint32_t i = 0; i < kVectors; ++i) {
    store_line<kStreaming>(to + kLanes * i, load_bits(bitmap.byte + kLanes / 8 * i) & 1);
  }
  return true;
}

// --- Sparse bfloat16 ---------------------------------------------------------------------------

EncodedBlock encode_sparse(const EncodeParams& params, const void* elements, uint32_t count,
                           uint8_t* slab, uint8_t* payload) {
  const auto* from = static_cast<const uint8_t*>(elements);
  Bitmap bitmap;
  Row rest, symbols, signs;
  uint8_t* rest_end = rest.byte;
  uint8_t* symbols_end = symbols.byte;
  uint8_t* signs_end = signs.byte;
  Vector any_negative{};
  for (uint32_t i = 0; i < kVectors; ++i) {
    Vector v[2] = {rotate_left<2>(load(from + 2 * kLanes * i)),
                   rotate_left<2>(load(from + 2 * kLanes * i + kLanes))};
    split_bytes<2>(v);
    // The rotated +0 is 0, and -0 is 1.
    const Vector nonzero = lanes_where(((v[0] & 254) | v[1]) != 0);
    store_bits(bitmap.byte + kLanes / 8 * i, nonzero);
    rest_end = append(rest_end, nonzero, v[0]);
    symbols_end = append(symbols_end, nonzero, v[1]);
    signs_end = append(signs_end, ~nonzero, v[0]);
    any_negative |= v[0] & ~nonzero;
  }
  const auto live = static_cast<uint32_t>(symbols_end - symbols.byte);
  const uint32_t missing_zeros = frame::kBlockElements - count;
  const uint32_t zeros = frame::kBlockElements - live;
  const bool has_negative_zero = sum_of(any_negative) != 0;

  const uint32_t vectors = (live + kLanes - 1) / kLanes;
  Bytes all;
  for (uint32_t i = 0; i < vectors; ++i) {
    all.vector[i] = load(symbols.byte + kLanes * i) & first_lanes(live - kLanes * i);
  }
  Statistics statistics = statistics_of(all, vectors);
  if (may_have_outliers(statistics)) {
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
  const uint32_t units =
      units_of_bytes(bitmap_bytes + live + code_bytes + sign_bytes + escape_bytes);
  if (units >= frame::max_payload_units(Dtype::kBf16, Shape::kSparse)) {
    return encode_scalar_block(params, elements, count, slab, payload);
  }
  __builtin_memcpy(end, rest.byte, live);
  end += live;
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

template <bool kStreaming>
bool decode_sparse(void* out, const uint8_t* slab, const uint8_t* payload, uint32_t mode,
                   uint32_t units, uint8_t center, bool packed) {
  if (mode == frame::kLiteral) {
    return scalar_blocks().decoder(Dtype::kBf16, Shape::kSparse, false)(out, slab, payload, mode,
                                                                        units, center, false);
  }
  if constexpr (kStreaming) {
    if (!is_line_aligned(out)) {
      return decode_sparse<false>(out, slab, payload, mode, units, center, packed);
    }
  }
  const uint8_t* end = payload + units * frame::kUnitBytes;
  Bitmap bitmap;
  const uint8_t* rest = decode_bitmap(bitmap, packed, payload, end);
  if (rest == nullptr) {
    return false;
  }
  const uint32_t live = bitmap.count();
  const uint32_t zeros = mode == frame::kSignedZeros ? frame::kBlockElements - live : 0;
  const uint8_t* codes = rest + live;
  const uint8_t* sign_bits = codes + bytes_of_bits(2 * live);
  const uint8_t* escape_streams = sign_bits + bytes_of_bits(zeros);
  if (escape_streams > end) {
    return false;
  }
  Vector escaped[kVectors];
  Row symbols, escapes, signs;
  uint32_t count = 0;
  for (uint32_t i = 0; i < live; i += kLanes) {
    const Vector code = load_symbols2(codes + i / 4);
    escaped[i / kLanes] = lanes_where(code == 0) & first_lanes(live - i);
    count += sum_of(escaped[i / kLanes] & 1);
    store(symbols.byte + i, center - code);
  }
  const uint8_t* last = decode_escapes2(escape_streams, end, count, center, escapes);
  if (last == nullptr || end - last >= frame::kUnitBytes) {
    return false;
  }
  const uint8_t* next_escape = escapes.byte;
  for (uint32_t i = 0; i < live; i += kLanes) {
    store(symbols.byte + i, expand(load(symbols.byte + i), escaped[i / kLanes], next_escape));
  }
  for (uint32_t i = 0; i < zeros; i += kLanes) {
    store(signs.byte + i, load_bits(sign_bits + i / 8) & 1);
  }
  auto* to = static_cast<uint8_t*>(out);
  const uint8_t* next_rest = rest;
  const uint8_t* next_symbol = symbols.byte;
  const uint8_t* next_sign = signs.byte;
  for (uint32_t i = 0; i < kVectors; ++i) {
    const Vector nonzero = load_bits(bitmap.byte + kLanes / 8 * i);
    Vector v[2] = {expand(Vector{}, nonzero, next_rest), expand(Vector{}, nonzero, next_symbol)};
    if (zeros != 0) {
      v[0] = expand(v[0], ~nonzero, next_sign);
    }
    join_bytes<2>(v);
    store_line<kStreaming>(to + 2 * kLanes * i, rotate_right<2>(v[0]));
    store_line<kStreaming>(to + 2 * kLanes * i + kLanes, rotate_right<2>(v[1]));
  }
  return true;
}

// --- The table ---------------------------------------------------------------------------------

EncodeBlocks dense_encoder(const EncodeParams& params) {
  switch (params.dtype) {
    case Dtype::kBf16:
      return params.streaming ? &encode_one_by_one<encode_dense<Dtype::kBf16, true>>
                              : &encode_one_by_one<encode_dense<Dtype::kBf16, false>>;
    case Dtype::kFp16:
      return params.streaming ? &encode_one_by_one<encode_dense<Dtype::kFp16, true>>
                              : &encode_one_by_one<encode_dense<Dtype::kFp16, false>>;
    case Dtype::kFp32:
      return params.streaming ? &encode_one_by_one<encode_dense<Dtype::kFp32, true>>
                              : &encode_one_by_one<encode_dense<Dtype::kFp32, false>>;
    default:
      return nullptr;
  }
}

DecodeBlock dense_decoder(Dtype dtype, bool streaming) {
  switch (dtype) {
    case Dtype::kBf16:
      return streaming ? &decode_dense<Dtype::kBf16, true> : &decode_dense<Dtype::kBf16, false>;
    case Dtype::kFp16:
      return streaming ? &decode_dense<Dtype::kFp16, true> : &decode_dense<Dtype::kFp16, false>;
    case Dtype::kFp32:
      return streaming ? &decode_dense<Dtype::kFp32, true> : &decode_dense<Dtype::kFp32, false>;
    default:
      return nullptr;
  }
}

EncodeBlocks encoder(const EncodeParams& params) {
  EncodeBlocks found = nullptr;
  if (params.shape == Shape::kDense) {
    found = dense_encoder(params);
  } else if (params.shape == Shape::kUpcast) {
    found = params.streaming ? &encode_one_by_one<encode_upcast<true>>
                             : &encode_one_by_one<encode_upcast<false>>;
  } else if (params.shape == Shape::kBits) {
    found = &encode_one_by_one<encode_bits>;
  } else if (params.shape == Shape::kSparse && params.dtype == Dtype::kBf16) {
    found = &encode_one_by_one<encode_sparse>;
  }
  return found != nullptr ? found : scalar_blocks().encoder(params);
}

DecodeBlock decoder(Dtype dtype, Shape shape, bool streaming) {
  DecodeBlock found = nullptr;
  if (shape == Shape::kDense) {
    found = dense_decoder(dtype, streaming);
  } else if (shape == Shape::kUpcast) {
    found = &decode_upcast;
  } else if (shape == Shape::kBits) {
    found = streaming ? &decode_bits<true> : &decode_bits<false>;
  } else if (shape == Shape::kSparse && dtype == Dtype::kBf16) {
    found = streaming ? &decode_sparse<true> : &decode_sparse<false>;
  }
  return found != nullptr ? found : scalar_blocks().decoder(dtype, shape, streaming);
}

uint32_t checksum(const void* data, size_t bytes) { return scalar_blocks().checksum(data, bytes); }

// Too few bytes at a time to be worth more.
void copy_around_caches(void* to, const void* from, size_t bytes) {
  __builtin_memcpy(to, from, bytes);
}

void make_stores_visible() { fence(); }

}  // namespace
}  // namespace vector

const BlockCodec& vector_blocks() {
  static constexpr BlockCodec kBlocks = {"vector",
                                         &vector::encoder,
                                         &vector::decoder,
                                         &vector::checksum,
                                         &vector::copy_around_caches,
                                         &vector::make_stores_visible};
  return kBlocks;
}

}  // namespace memswap::cpu

MEMSWAP_VECTOR_END
