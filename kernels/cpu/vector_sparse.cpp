// Layout sparse to frames, with portable vectors.
#include "vector.h"
#include "vector_bitmap.h"
#include "vector_floats.h"
#include "vector_literal.h"

MEMSWAP_VECTOR_BEGIN

namespace memswap::cpu::MEMSWAP_ISA {
namespace {

using frame::Dtype;
using frame::Layout;

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
      store_mask(second + i / 8, mask_of_bit<2>(row.vector[i / kLanes]));
    }
    return second + bytes_of_bits(kSecondBits * live);
  }
};

// Of kLanes elements in kWidth vectors, lanes of a byte that are 255 for all ones, and 0 for 0.
template <uint32_t kWidth>
[[gnu::always_inline]] inline Vector narrow_conditions(const Vector (&conditions)[kWidth]) {
  if constexpr (kWidth == 1) {
    return conditions[0];
  } else {
    Vector half[kWidth / 2];
    for (uint32_t i = 0; i < kWidth / 2; ++i) {
      half[i] = narrow(conditions[2 * i], conditions[2 * i + 1]);
    }
    return narrow_conditions<kWidth / 2>(half);
  }
}

// Likewise, the byte of each that has the sign.
template <uint32_t kWidth>
[[gnu::always_inline]] inline Vector top_bytes(const Vector (&elements)[kWidth]) {
  if constexpr (kWidth == 1) {
    return elements[0];
  } else {
    Vector odd[kWidth / 2];
    for (uint32_t i = 0; i < kWidth / 2; ++i) {
      odd[i] = odd_bytes(elements[2 * i], elements[2 * i + 1]);
    }
    return top_bytes<kWidth / 2>(odd);
  }
}

// A block's elements that are not zero, in a row, and zeros behind them.
template <uint32_t kWidth>
class Survivors {
 public:
  Survivors(const uint8_t* elements, const EncodeParams& params) {
    using Words = typename Elements<UnsignedOf<kWidth>>::Vector;
    uint8_t* end = bytes_;
    Vector negative_zeros{};
    for (uint32_t i = 0; i < kVectors; ++i) {
      const uint8_t* const from = elements + kLanes * kWidth * i;
      ask_lines(from, kLanes * kWidth, params.ahead(kLinesAhead));
      Vector zero[kWidth];
      for (uint32_t j = 0; j < kWidth; ++j) {
        const Vector element = load(from + kLanes * j);
        const Words words = reinterpret_cast<Words>(element);
        zero[j] = reinterpret_cast<Vector>(words + words == 0);
        negative_zeros |= element & zero[j];
      }
      uint8_t* const chosen = bitmap_.byte + kLanes / 8 * i;
      store_mask(chosen, ~mask_of(narrow_conditions(zero)));
      if constexpr (kWidth == 1) {
        end = append(end, chosen, load(from));
      } else {
        for (uint32_t j = 0; j < kLanes / 8; ++j) {
          end = append_elements<kWidth>(end, chosen[j], from + 8 * kWidth * j);
        }
      }
    }
    for (uint32_t j = 0; j < kWidth; ++j) {
      store(end + kLanes * j, Vector{});
    }
    count_ = static_cast<uint32_t>(end - bytes_) / kWidth;
    has_negative_zero_ = any(mask_of(negative_zeros));
  }

  // By which elements they are.
  const Bitmap& bitmap() const { return bitmap_; }
  uint32_t count() const { return count_; }
  // Whether another element is.
  bool has_negative_zero() const { return has_negative_zero_; }

  // kLanes of them from `i` on, rotated, as byte planes.
  void load_planes(uint32_t i, Vector (&v)[kWidth]) const {
    load_rotated<kWidth>(bytes_ + kWidth * i, v);
  }

 private:
  // Bytes ahead. Measured: see [Note: asking ahead].
  static constexpr uint32_t kLinesAhead = 8192;

  Bitmap bitmap_;
  uint32_t count_;
  bool has_negative_zero_;
  alignas(64) uint8_t bytes_[frame::kBlockElements * kWidth + kLanes * kWidth];
};

// A bit for each zero, set where it is negative.
template <uint32_t kWidth>
inline void store_signs(uint8_t* out, const uint8_t* elements, const Bitmap& bitmap) {
  Row tops;
  uint8_t* end = tops.byte;
  for (uint32_t i = 0; i < kVectors; ++i) {
    Vector v[kWidth];
    for (uint32_t j = 0; j < kWidth; ++j) {
      v[j] = load(elements + kLanes * (kWidth * i + j));
    }
    end = append(end, ~load_mask(bitmap.byte + kLanes / 8 * i), top_bytes(v));
  }
  store(end, Vector{});
  for (const uint8_t* from = tops.byte; from < end; from += kLanes, out += kLanes / 8) {
    store_mask(out, mask_of_bit<7>(load(from)));
  }
}

template <Dtype kDtype>
EncodedBlock encode_sparse(const EncodeParams& params, const void* elements, uint32_t count,
                           uint8_t* slab, uint8_t* payload) {
  using Type = Float<kDtype>;
  using Rest = RestStreams<Type::kRestBits>;
  constexpr uint32_t kWidth = Type::kWidth;
  const auto* from = static_cast<const uint8_t*>(elements);
  const Survivors<kWidth> survivors(from, params);
  const uint32_t live = survivors.count();
  const bool has_negative_zero = survivors.has_negative_zero();
  const uint32_t missing_zeros = frame::kBlockElements - count;
  const uint32_t zeros = frame::kBlockElements - live;

  const uint32_t vectors = (live + kLanes - 1) / kLanes;
  const uint32_t behind = vectors * kLanes - live;
  Row planes[kWidth];  // one more than byte planes, of which there may be none
  Bytes top, all;      // with the bits of R, and without
  Vector highest{};
  for (uint32_t i = 0; i < vectors; ++i) {
    Vector v[kWidth];
    survivors.load_planes(kLanes * i, v);
    for (uint32_t p = 0; p < Type::kBytePlanes; ++p) {
      store(planes[p].byte + kLanes * i, v[p]);
    }
    top.vector[i] = v[kWidth - 1];
    all.vector[i] = move_bits<Type::kRestBits, 0, Type::kSymbolBits>(v[kWidth - 1]);
    highest = maximum(highest, all.vector[i]);
  }
  const Crowd crowd = crowd_of_survivors<Type::kSymbolBits>(all, vectors, highest_of(highest));
  const uint8_t center = center_of(crowd, canonical::kLq2Eighths);
  if (behind != 0) {  // these have code 0 and become the last escapes, which do not count
    all.vector[vectors - 1] |= only(~first_lanes(kLanes - behind), broadcast(center));
  }
  const Vector first = broadcast(static_cast<uint8_t>(center - 1u));
  uint8_t codes[frame::kLowPlaneBytes + kLanes];
  Escapes escapes, deeper;
  uint8_t* escapes_end = escapes.symbol.byte;
  for (uint32_t i = 0; i < vectors; ++i) {
    const Vector below_limit = minimum(first - all.vector[i], broadcast(3));
    store_symbols2(codes + kLanes / 4 * i, (below_limit + 1) & 3);
    escapes_end = append(escapes_end, mask_of(equal(below_limit, broadcast(3))), all.vector[i]);
  }
  escapes.end_at(escapes_end - behind, center);
  // S1, S2 and E bytes of 1024 escapes, and the vectors behind them.
  uint8_t streams[frame::kBlockElements / 8 * (2 + 4 + 8) + kLanes];
  const uint8_t* streams_end =
      encode_escapes2(escapes, center, streams, streams + sizeof(streams) - kLanes, deeper);

  const auto escape_bytes = static_cast<uint32_t>(streams_end - streams);
  const uint32_t code_bytes = bytes_of_bits(2 * live);
  const uint32_t sign_bytes = has_negative_zero ? bytes_of_bits(zeros) : 0;
  bool packed;
  uint8_t* end = encode_bitmap(survivors.bitmap(), payload, packed);
  const auto bitmap_bytes = static_cast<uint32_t>(end - payload);
  const uint32_t units = units_of_bytes(bitmap_bytes + live * Type::kBytePlanes +
                                        Rest::bytes(live) + code_bytes + sign_bytes + escape_bytes);
  if (units >= frame::max_payload_units(kDtype, Layout::kSparse)) {
    EncodedBlock literal = encode_literal<false>(params, elements, count, slab, payload);
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
    store_signs<kWidth>(end, from, survivors.bitmap());
    end += sign_bytes;
  }
  __builtin_memcpy(end, streams, escape_bytes);
  store_as<uint64_t>(end + escape_bytes, 0);  // the rest of the last unit
  const uint32_t mode = has_negative_zero ? frame::kSignedZeros : frame::kZeros;
  return {mode, units, zeros - missing_zeros, center, center, packed};
}

}  // namespace

EncodeBlocks sparse_encoder(const EncodeParams& params) {
  return for_float<EncodeBlocks>(params.dtype, false, []<Dtype kDtype, bool>() -> EncodeBlocks {
    return &encode_one_by_one<encode_sparse<kDtype>, false>;
  });
}

}  // namespace memswap::cpu::MEMSWAP_ISA

MEMSWAP_VECTOR_END
