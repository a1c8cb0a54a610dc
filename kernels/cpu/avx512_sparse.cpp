// Shape sparse, with AVX-512: survivors are compressed byte plane by byte plane.
#include "avx512.h"
#include "avx512_exponents.h"
#include "avx512_floats.h"
#include "avx512_literal.h"

MEMSWAP_AVX512_BEGIN

namespace memswap::cpu::avx512 {
namespace {

using frame::Dtype;
using frame::Shape;

// Longest S1, S2 and E bytes of a block, and the vector behind them.
inline constexpr uint32_t kEscapeBytes = frame::kBlockElements / 8 * (2 + 4 + 8) + kLanes;

// What compressing a block leaves.
template <uint32_t kWidth>
struct Survivors {
  Row plane[kWidth];  // by byte of the rotated element; zeros behind the last survivor's vector
  uint64_t bitmap[kVectors];
  uint64_t negative[kVectors];  // which elements are -0
  uint32_t count;
  bool has_negative_zero;
};

template <uint32_t kWidth>
inline void compress(const uint8_t* elements, Survivors<kWidth>& survivors) {
  uint32_t count = 0;
  uint64_t any_negative = 0;
  for (uint32_t i = 0; i < kVectors; ++i) {
    Vector v[kWidth];
    for (uint32_t j = 0; j < kWidth; ++j) {
      v[j] = rotate_left<kWidth>(load(elements + kLanes * (kWidth * i + j)));
    }
    split_bytes<kWidth>(v);
    // The rotated +0 is 0, and -0 is 1.
    __mmask64 nonzero = _mm512_test_epi8_mask(v[0], broadcast(0xfe));
    for (uint32_t p = 1; p < kWidth; ++p) {
      nonzero |= _mm512_test_epi8_mask(v[p], v[p]);
    }
    survivors.bitmap[i] = nonzero;
    survivors.negative[i] = _mm512_test_epi8_mask(v[0], broadcast(1)) & ~nonzero;
    any_negative |= survivors.negative[i];
    for (uint32_t p = 0; p < kWidth; ++p) {
      append(survivors.plane[p].byte + count, nonzero, v[p]);
    }
    count += count_bits(nonzero);
  }
  for (Row& plane : survivors.plane) {
    store(plane.byte + count, _mm512_setzero_si512());
  }
  survivors.count = count;
  survivors.has_negative_zero = any_negative != 0;
}

// The streams of the R bits that share the top byte with E; what is left in `top` is E.
template <uint32_t kRestBits>
inline uint8_t* take_rest_streams(Row& top, uint32_t count, uint8_t* out) {
  uint8_t* second = out + bytes_of_bits((kRestBits == 4 ? 4 : 2) * count);
  for (uint32_t i = 0; i < count; i += kLanes) {
    const Vector byte = load(top.byte + i);
    if constexpr (kRestBits == 4) {
      store_symbols4(out + i / 2, _mm512_and_si512(byte, broadcast(15)));
    } else {
      store_symbols2(out + i / 4, _mm512_and_si512(byte, broadcast(3)));
    }
  }
  if constexpr (kRestBits == 3) {
    for (uint32_t i = 0; i < count; i += kLanes) {
      store64(second + i / 8, _mm512_test_epi8_mask(load(top.byte + i), broadcast(4)));
    }
    second += bytes_of_bits(count);
  }
  for (uint32_t i = 0; i < count; i += kLanes) {
    store(top.byte + i, shift_right<kRestBits>(load(top.byte + i)));
  }
  return second;
}

// Center c2 of the symbols in a row that zeros follow: a 0 does not count.
inline uint8_t center_of_row(const Row& row, uint32_t count, uint32_t symbol_bits) {
  Bytes symbols;
  const uint32_t vectors = (count + kLanes - 1) / kLanes;
  for (uint32_t i = 0; i < vectors; ++i) {
    symbols.vector[i] = load(row.byte + kLanes * i);
  }
  const uint32_t maximum = range_of(symbols, vectors).maximum;
  Crowd crowd{maximum, distances_of<true>(symbols, vectors, maximum)};
  if (symbol_bits == canonical::kOutlierBits && may_have_outliers(crowd.distances)) {
    const uint32_t low = crowded_window(symbols, vectors);
    crowd = low != 0 ? crowd_of(symbols, vectors, low) : crowd;
  }
  return center_of(crowd, 7);
}

// Writes the stream of L0 codes and lists the escapes.
inline void encode_codes(const Row& symbols, uint32_t count, uint8_t center, uint8_t* out,
                         Escapes& escapes) {
  const Vector centers = broadcast(center);
  uint8_t* end = escapes.symbol.byte;
  for (uint32_t i = 0; i < count; i += kLanes) {
    const Vector symbol = load(symbols.byte + i);
    const Vector value = _mm512_sub_epi8(centers, symbol);
    const __mmask64 live = first_lanes(count - i);
    const __mmask64 coded =
        _mm512_mask_cmplt_epu8_mask(live, _mm512_sub_epi8(value, broadcast(1)), broadcast(3));
    store_symbols2(out + i / 4, _mm512_maskz_mov_epi8(coded, value));
    end = append(end, live & ~coded, symbol);
  }
  escapes.count = static_cast<uint32_t>(end - escapes.symbol.byte);
}

// Appends runs of bits to a stream.
class BitAppender {
 public:
  explicit BitAppender(uint8_t* out) : out_(out) {}

  // The low `count` bits of `bits`, the others being 0; count is at most 64.
  void append(uint64_t bits, uint32_t count) {
    pending_ |= bits << filled_;
    if (filled_ + count >= 64) {
      store64(out_, pending_);
      out_ += 8;
      pending_ = filled_ == 0 ? 0 : bits >> (64 - filled_);
      filled_ += count;
      filled_ -= 64;
    } else {
      filled_ += count;
    }
  }

  uint8_t* finish() {
    store64(out_, pending_);
    return out_ + bytes_of_bits(filled_);
  }

 private:
  uint8_t* out_;
  uint64_t pending_ = 0;
  uint32_t filled_ = 0;
};

template <uint32_t kWidth>
inline uint8_t* encode_signs(const Survivors<kWidth>& survivors, uint8_t* out) {
  BitAppender stream(out);
  for (uint32_t i = 0; i < kVectors; ++i) {
    const uint64_t zeros = ~survivors.bitmap[i];
    stream.append(_pext_u64(survivors.negative[i], zeros), count_bits(zeros));
  }
  return stream.finish();
}

template <Dtype kDtype, bool kStreaming>
EncodedBlock encode_sparse(const EncodeParams&, const void* elements, uint32_t count, uint8_t* slab,
                           uint8_t* payload) {
  using Type = Float<kDtype>;
  const auto* from = static_cast<const uint8_t*>(elements);
  Survivors<Type::kWidth> survivors;
  compress<Type::kWidth>(from, survivors);
  const uint32_t live = survivors.count;
  // Missing elements are zeros, too.
  const uint32_t zeros = count - live;

  // All but the escapes always fits: the bitmap paid for codes and signs.
  uint8_t* end = payload;
  for (uint32_t p = 0; p < Type::kBytePlanes; ++p) {
    for (uint32_t i = 0; i < live; i += kLanes) {
      store(end + i, load(survivors.plane[p].byte + i));
    }
    end += live;
  }
  Row& symbols = survivors.plane[Type::kWidth - 1];
  if constexpr (Type::kRestBits != 0) {
    end = take_rest_streams<Type::kRestBits>(symbols, live, end);
  }
  const uint8_t center = center_of_row(symbols, live, Type::kSymbolBits);
  Escapes escapes;
  encode_codes(symbols, live, center, end, escapes);
  end += bytes_of_bits(2 * live);
  if (survivors.has_negative_zero) {
    end = encode_signs(survivors, end);
  }
  alignas(64) uint8_t escape_streams[kEscapeBytes];
  const uint8_t* escapes_end = encode_escapes2(escapes, center, escape_streams);
  const auto escape_bytes = static_cast<uint32_t>(escapes_end - escape_streams);

  const uint32_t units = units_of_bytes(static_cast<uint32_t>(end - payload) + escape_bytes);
  if (units >= frame::max_payload_units(kDtype, Shape::kSparse)) {
    EncodedBlock literal = encode_literal<kStreaming>(from, kDtype, Shape::kSparse, slab, payload);
    literal.zeros = zeros;
    return literal;
  }
  for (uint32_t i = 0; i < escape_bytes; i += kLanes) {
    store(end + i, load(escape_streams + i));
  }
  store64(end + escape_bytes, 0);  // the rest of the last unit
  copy_lines<kStreaming>(slab, reinterpret_cast<const uint8_t*>(survivors.bitmap),
                         frame::kBitmapBytes);
  const uint32_t mode = survivors.has_negative_zero ? frame::kSignedZeros : frame::kZeros;
  return {mode, units, zeros, center, center};
}

// --- Decoding ----------------------------------------------------------------------------------

// Takes a payload apart and knows where it ends.
class Reader {
 public:
  Reader(const uint8_t* payload, uint32_t units)
      : at_(payload), end_(payload + units * frame::kUnitBytes) {}

  // The next bytes, or NULL if there are not so many.
  const uint8_t* take(uint32_t bytes) {
    if (bytes > static_cast<size_t>(end_ - at_)) {
      return nullptr;
    }
    const uint8_t* part = at_;
    at_ += bytes;
    return part;
  }

  const uint8_t* end() const { return end_; }

 private:
  const uint8_t* at_;
  const uint8_t* end_;
};

// Joins the symbols in `top` with the R bits that share their byte.
template <uint32_t kRestBits>
inline void put_rest_streams(Row& top, uint32_t count, const uint8_t* first,
                             const uint8_t* second) {
  for (uint32_t i = 0; i < count; i += kLanes) {
    Vector byte = shift_left<kRestBits>(load(top.byte + i));
    if constexpr (kRestBits == 4) {
      byte = _mm512_ternarylogic_epi64(byte, load_symbols4(first + i / 2), broadcast(15), 0xf8);
    } else {
      byte = _mm512_ternarylogic_epi64(byte, load_symbols2(first + i / 4), broadcast(3), 0xf8);
      byte = _mm512_mask_add_epi8(byte, load64(second + i / 8), byte, broadcast(4));
    }
    store(top.byte + i, byte);
  }
}

// The symbols of the survivors, in a row. False if the payload does not end with their streams.
inline bool decode_codes(const uint8_t* codes, const uint8_t* escape_streams, const uint8_t* end,
                         uint32_t count, uint8_t center, Row& symbols) {
  __mmask64 escaped[kVectors];
  uint32_t escapes = 0;
  const Vector low = broadcast(3);
  for (uint32_t i = 0; i < count; i += kLanes) {
    const Vector code = _mm512_and_si512(load_symbols2(codes + i / 4), low);
    const __mmask64 mask = _mm512_testn_epi8_mask(code, code) & first_lanes(count - i);
    escaped[i / kLanes] = mask;
    escapes += count_bits(mask);
    store(symbols.byte + i, _mm512_sub_epi8(broadcast(center), code));
  }
  Row escape_symbols;
  const uint8_t* last = decode_escapes2(escape_streams, end, escapes, center, escape_symbols);
  if (last == nullptr || end - last >= frame::kUnitBytes) {
    return false;
  }
  const uint8_t* next = escape_symbols.byte;
  for (uint32_t i = 0; i < count; i += kLanes) {
    const __mmask64 mask = escaped[i / kLanes];
    store(symbols.byte + i, _mm512_mask_expand_epi8(load(symbols.byte + i), mask, load(next)));
    next += count_bits(mask);
  }
  return true;
}

// Where each survivor's and each zero's bytes come from.
template <uint32_t kWidth>
struct Sources {
  const uint8_t* plane[kWidth];
  uint64_t bitmap[kVectors];
  const uint8_t* signs;  // NULL: every zero is +0
};

// Up to 64 bits of a stream from bit `at` on; what is behind `count` bits is unspecified.
inline uint64_t bits_at(const uint8_t* stream, uint32_t at) {
  const uint64_t low = load64(stream + at / 8) >> (at % 8);
  const uint64_t high = stream[at / 8 + 8];
  return at % 8 == 0 ? low : low | high << (64 - at % 8);
}

template <uint32_t kWidth, bool kStreaming>
inline void expand(uint8_t* out, const Sources<kWidth>& sources) {
  uint32_t survivors = 0;
  uint32_t zeros = 0;
  for (uint32_t i = 0; i < kVectors; ++i) {
    const __mmask64 nonzero = sources.bitmap[i];
    Vector v[kWidth];
    for (uint32_t p = 0; p < kWidth; ++p) {
      v[p] = _mm512_maskz_expand_epi8(nonzero, load(sources.plane[p] + survivors));
    }
    if (sources.signs != nullptr) {
      const __mmask64 negative = _pdep_u64(bits_at(sources.signs, zeros), ~nonzero);
      v[0] = _mm512_mask_mov_epi8(v[0], negative, broadcast(1));
    }
    survivors += count_bits(nonzero);
    zeros += kLanes - count_bits(nonzero);
    join_bytes<kWidth>(v);
    for (uint32_t j = 0; j < kWidth; ++j) {
      store_line<kStreaming>(out + kLanes * (kWidth * i + j), rotate_right<kWidth>(v[j]));
    }
  }
}

template <Dtype kDtype, bool kStreaming>
bool decode_sparse(void* out, const uint8_t* slab, const uint8_t* payload, uint32_t mode,
                   uint32_t units, uint8_t center, bool) {
  using Type = Float<kDtype>;
  if constexpr (kStreaming) {
    if (!is_line_aligned(out)) {
      return decode_sparse<kDtype, false>(out, slab, payload, mode, units, center, false);
    }
  }
  auto* to = static_cast<uint8_t*>(out);
  if (mode == frame::kLiteral) {
    return decode_literal<kStreaming>(to, kDtype, Shape::kSparse, slab, payload, units);
  }
  Sources<Type::kWidth> sources;
  uint32_t live = 0;
  for (uint32_t i = 0; i < kVectors; ++i) {
    sources.bitmap[i] = load64(slab + 8 * i);
    live += count_bits(sources.bitmap[i]);
  }
  Reader reader(payload, units);
  for (uint32_t p = 0; p < Type::kBytePlanes; ++p) {
    sources.plane[p] = reader.take(live);
    if (sources.plane[p] == nullptr) {
      return false;
    }
  }
  const uint8_t* rest[2] = {nullptr, nullptr};
  if constexpr (Type::kRestBits != 0) {
    rest[0] = reader.take(bytes_of_bits((Type::kRestBits == 4 ? 4 : 2) * live));
    rest[1] = Type::kRestBits == 3 ? reader.take(bytes_of_bits(live)) : rest[0];
    if (rest[0] == nullptr || rest[1] == nullptr) {
      return false;
    }
  }
  const uint8_t* codes = reader.take(bytes_of_bits(2 * live));
  const uint32_t zeros = frame::kBlockElements - live;
  const uint8_t* signs = reader.take(mode == frame::kSignedZeros ? bytes_of_bits(zeros) : 0);
  const uint8_t* escape_streams = reader.take(0);
  if (codes == nullptr || signs == nullptr) {
    return false;
  }
  sources.signs = mode == frame::kSignedZeros ? signs : nullptr;
  Row symbols;
  if (!decode_codes(codes, escape_streams, reader.end(), live, center, symbols)) {
    return false;
  }
  if constexpr (Type::kRestBits != 0) {
    put_rest_streams<Type::kRestBits>(symbols, live, rest[0], rest[1]);
  }
  sources.plane[Type::kWidth - 1] = symbols.byte;
  expand<Type::kWidth, kStreaming>(to, sources);
  return true;
}

}  // namespace

EncodeBlocks sparse_encoder(const EncodeParams& params) {
  return for_float<EncodeBlocks>(params.dtype, params.streaming,
                                 []<Dtype kDtype, bool kStreaming>() -> EncodeBlocks {
                                   return &encode_one_by_one<encode_sparse<kDtype, kStreaming>>;
                                 });
}

DecodeBlock sparse_decoder(Dtype dtype, bool streaming) {
  return for_float<DecodeBlock>(dtype, streaming,
                                []<Dtype kDtype, bool kStreaming>() -> DecodeBlock {
                                  return &decode_sparse<kDtype, kStreaming>;
                                });
}

}  // namespace memswap::cpu::avx512

MEMSWAP_AVX512_END
