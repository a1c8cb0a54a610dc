// The payload of a sparse block, from rows that an encoder has filled.
#pragma once

#include <algorithm>

#include "vector_bitmap.h"
#include "vector_floats.h"
#include "vector_literal.h"

MEMSWAP_VECTOR_BEGIN

namespace memswap::cpu::MEMSWAP_ISA {
namespace {

// The R bits of kLanes survivors that share the top byte with E, as the `i`th part of their
// streams.
template <class Type>
inline void take_rest(Vector top, uint32_t i, Row (&rest)[2]) {
  if constexpr (Type::kRestBits == 4) {
    store_symbols4(rest[0].byte + kLanes / 2 * i, top & 15);
  } else if constexpr (Type::kRestBits == 3) {
    store_symbols2(rest[0].byte + kLanes / 4 * i, top & 3);
    store_mask(rest[1].byte + kLanes / 8 * i, mask_of_bit<2>(top));
  }
}

// Writes `bytes` bytes, and up to a vector behind them. Returns the end.
inline uint8_t* append_row(uint8_t* out, const uint8_t* row, uint32_t bytes) {
  for (uint32_t i = 0; i < bytes; i += kLanes) {
    store(out + i, load(row + i));
  }
  return out + bytes;
}

// A sign for each zero, from a byte for each that has it in bit `kBit`.
template <uint32_t kBit>
inline uint8_t* append_signs(uint8_t* out, const AlignedRow& signs, uint32_t zeros) {
  for (uint32_t i = 0; i < zeros; i += kLanes) {
    store_mask(out + i / 8, mask_of_bit<kBit>(load(signs.byte + i)));
  }
  return out + bytes_of_bits(zeros);
}

// What is written of a block.
template <uint32_t kWidth>
struct SparseRows {
  uint32_t live;  // survivors
  const Bitmap& bitmap;
  const uint8_t* plane[kWidth];  // by byte of the rotated survivor
  const Row (&rest)[2];
  const Row& codes;
  bool has_negative_zero;
  const AlignedRow& signs;  // of the zeros, if there is a negative one
  uint8_t center;
  const Escapes& escapes;
  const Row& first;  // S1 of the escapes
  const Escapes& deeper;
};

// Block `b` of `count` elements, as a sparse block, or literally where that is shorter. `kSignBit`:
// which bit of `signs` is a sign.
template <frame::Dtype kDtype, uint32_t kSignBit>
[[gnu::always_inline]] inline EncodedBlock write_sparse(
    const EncodeParams& params, const uint8_t* elements, uint32_t count, uint32_t b,
    const SparseRows<Float<kDtype>::kWidth>& rows, uint8_t* payload) {
  using Type = Float<kDtype>;
  const uint32_t live = rows.live;
  // Missing elements are zeros, too.
  const uint32_t zeros = std::min(count - b * frame::kBlockElements, frame::kBlockElements) - live;

  // All but the escapes always fits: codes and signs are fewer bits than the symbols.
  bool packed;
  uint8_t* end = encode_bitmap(rows.bitmap, payload, packed);
  for (uint32_t p = 0; p < Type::kBytePlanes; ++p) {
    end = append_row(end, rows.plane[p], live);
  }
  if constexpr (Type::kRestBits != 0) {
    constexpr uint32_t kFirstBits = Type::kRestBits == 4 ? 4 : 2;
    end = append_row(end, rows.rest[0].byte, bytes_of_bits(kFirstBits * live));
  }
  if constexpr (Type::kRestBits == 3) {
    end = append_row(end, rows.rest[1].byte, bytes_of_bits(live));
  }
  end = append_row(end, rows.codes.byte, bytes_of_bits(2 * live));
  if (rows.has_negative_zero) {
    end = append_signs<kSignBit>(end, rows.signs, frame::kBlockElements - live);
  }
  const uint8_t* const limit =
      payload + (frame::max_payload_units(kDtype, frame::Layout::kSparse) - 1) * frame::kUnitBytes;
  if (rows.escapes.count != 0) {
    end = append_row(end, rows.first.byte, bytes_of_bits(2 * rows.escapes.count));
    end = encode_nibbles(kLq2Nibbles, rows.deeper, rows.center, end, limit);
  }
  if (end == nullptr || end > limit) {
    EncodedBlock literal =
        encode_literal<false>(params, elements + b * Type::kBlockBytes, count, nullptr, payload);
    literal.zeros = zeros;
    return literal;
  }
  store_as<uint64_t>(end, 0);  // the rest of the last unit
  const uint32_t units = units_of_bytes(static_cast<uint32_t>(end - payload));
  const uint32_t mode = rows.has_negative_zero ? frame::kSignedZeros : frame::kZeros;
  return {mode, units, zeros, rows.center, rows.center, packed};
}

}  // namespace
}  // namespace memswap::cpu::MEMSWAP_ISA

MEMSWAP_VECTOR_END
