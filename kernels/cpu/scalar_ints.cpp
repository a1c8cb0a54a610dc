// Shapes ints and bits.
#include <algorithm>
#include <bit>
#include <type_traits>

#include "bitmap.h"
#include "elements.h"
#include "planes.h"
#include "scalar.h"

namespace memswap::cpu::scalar {

namespace {

using frame::Dtype;
using frame::Shape;

// Value: the type by which elements compare; Bits: the same width, unsigned.
template <typename Value>
EncodedBlock encode_ints(const EncodeParams& params, const void* elements, uint32_t count,
                         uint8_t* slab, uint8_t* payload) {
  using Bits = std::make_unsigned_t<Value>;
  Value values[kElements];
  load_elements(values, elements);
  const auto [min, max] = std::minmax_element(values, values + count);
  const auto reference = static_cast<Bits>(*min);
  const auto range = static_cast<Bits>(static_cast<Bits>(*max) - reference);
  const auto bits = static_cast<uint32_t>(std::bit_width(range));
  if (bits == 8 * sizeof(Bits)) {
    return encode_literal(elements, params.dtype, Shape::kInts, slab, payload);
  }
  Bits offsets[kElements] = {};
  for (uint32_t e = 0; e < count; ++e) {
    offsets[e] = static_cast<Bits>(static_cast<Bits>(values[e]) - reference);
  }
  const uint64_t extended = reference;
  memcpy(payload, &extended, sizeof(extended));
  uint8_t* end = put_planes(payload + sizeof(extended), offsets, 0, bits);
  return {frame::kReference, finish_payload(payload, end), 0, static_cast<uint8_t>(bits), 0};
}

template <typename Bits, Dtype dtype_of_width>
bool decode_ints(void* out, const uint8_t* slab, const uint8_t* payload, uint32_t mode,
                 uint32_t units, uint8_t center, bool) {
  if (mode == frame::kLiteral) {
    return decode_literal(out, dtype_of_width, Shape::kInts, slab, payload, units);
  }
  const uint32_t bits = center;
  if (bits >= 8 * sizeof(Bits)) {
    return false;
  }
  PayloadReader reader(payload, units);
  const uint8_t* reference = reader.take(sizeof(uint64_t));
  const uint8_t* planes = reader.take(kElements / 8 * bits);
  if (reference == nullptr || planes == nullptr || !reader.is_at_end()) {
    return false;
  }
  uint64_t extended;
  memcpy(&extended, reference, sizeof(extended));
  Bits elements[kElements] = {};
  get_planes(planes, elements, 0, bits);
  for (Bits& element : elements) {
    element = static_cast<Bits>(element + extended);
  }
  store_elements(out, elements);
  return true;
}

}  // namespace

EncodeBlocks ints_encoder(Dtype dtype) {
  const bool is_signed = frame::is_signed(dtype);
  switch (frame::width_of(dtype)) {
    case 1:
      return is_signed ? &encode_one_by_one<encode_ints<int8_t>>
                       : &encode_one_by_one<encode_ints<uint8_t>>;
    case 2:
      return is_signed ? &encode_one_by_one<encode_ints<int16_t>>
                       : &encode_one_by_one<encode_ints<uint16_t>>;
    case 4:
      return is_signed ? &encode_one_by_one<encode_ints<int32_t>>
                       : &encode_one_by_one<encode_ints<uint32_t>>;
    default:
      return is_signed ? &encode_one_by_one<encode_ints<int64_t>>
                       : &encode_one_by_one<encode_ints<uint64_t>>;
  }
}

DecodeBlock ints_decoder(Dtype dtype) {
  switch (frame::width_of(dtype)) {
    case 1:
      return &decode_ints<uint8_t, Dtype::kBits8>;
    case 2:
      return &decode_ints<uint16_t, Dtype::kBits16>;
    case 4:
      return &decode_ints<uint32_t, Dtype::kBits32>;
    default:
      return &decode_ints<uint64_t, Dtype::kBits64>;
  }
}

EncodedBlock encode_bits(const EncodeParams& params, const void* elements, uint32_t, uint8_t* slab,
                         uint8_t* payload) {
  uint8_t values[kElements];
  load_elements(values, elements);
  if (std::any_of(values, values + kElements, [](uint8_t value) { return value > 1; })) {
    return encode_literal(elements, params.dtype, Shape::kBits, slab, payload);
  }
  const Bitmap bitmap = bitmap_of(values);
  const uint32_t units = finish_payload(payload, put_bitmap(payload, bitmap));
  return {frame::kBitmap, units, 0, 0, 0, bitmap.packed()};
}

bool decode_bits(void* out, const uint8_t* slab, const uint8_t* payload, uint32_t mode,
                 uint32_t units, uint8_t, bool packed) {
  if (mode == frame::kLiteral) {
    return decode_literal(out, Dtype::kBits8, Shape::kBits, slab, payload, units);
  }
  PayloadReader reader(payload, units);
  uint8_t values[kElements];
  if (!get_bitmap(reader, packed, values) || !reader.is_at_end()) {
    return false;
  }
  store_elements(out, values);
  return true;
}

}  // namespace memswap::cpu::scalar
