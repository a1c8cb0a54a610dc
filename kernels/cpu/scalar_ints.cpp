// Layouts ints and bits.
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
    return encode_literal(params, elements, count, slab, payload);
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

template <typename Bits>
bool decode_ints(const DecodeParams& params, uint8_t* out, const uint8_t* slab,
                 const uint8_t* payload, const CodedBlock& block) {
  if (block.mode == frame::kLiteral) {
    return decode_literal(params, out, slab, payload, block);
  }
  const uint32_t bits = block.center;
  if (bits >= 8 * sizeof(Bits)) {
    return false;
  }
  PayloadReader reader(payload, block.units);
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
  return for_width<EncodeBlocks>(dtype, [&]<uint32_t width>() {
    using Bits = UnsignedOf<width>;
    return frame::is_signed(dtype) ? &encode_one_by_one<encode_ints<std::make_signed_t<Bits>>>
                                   : &encode_one_by_one<encode_ints<Bits>>;
  });
}

DecodeBlocks ints_decoder(Dtype dtype) {
  return for_width<DecodeBlocks>(
      dtype, []<uint32_t width>() { return &decode_one_by_one<decode_ints<UnsignedOf<width>>>; });
}

EncodedBlock encode_bits(const EncodeParams& params, const void* elements, uint32_t count,
                         uint8_t* slab, uint8_t* payload) {
  uint8_t values[kElements];
  load_elements(values, elements);
  if (std::any_of(values, values + kElements, [](uint8_t value) { return value > 1; })) {
    return encode_literal(params, elements, count, slab, payload);
  }
  const Bitmap bitmap = bitmap_of(values);
  const uint32_t units = finish_payload(payload, put_bitmap(payload, bitmap));
  return {frame::kBitmap, units, 0, 0, 0, bitmap.packed()};
}

bool decode_bits(const DecodeParams& params, uint8_t* out, const uint8_t* slab,
                 const uint8_t* payload, const CodedBlock& block) {
  if (block.mode == frame::kLiteral) {
    return decode_literal(params, out, slab, payload, block);
  }
  PayloadReader reader(payload, block.units);
  uint8_t values[kElements];
  if (!get_bitmap(reader, block.packed, values) || !reader.is_at_end()) {
    return false;
  }
  store_elements(out, values);
  return true;
}

}  // namespace memswap::cpu::scalar
