// Layout sparse: a bitmap of what is not +-0, and the survivors' fields as streams behind it.
#include "bitmap.h"
#include "elements.h"
#include "exponents.h"
#include "planes.h"
#include "scalar.h"

namespace memswap::cpu::scalar {

namespace {

using frame::Dtype;
using frame::Layout;

// Rotated, +0 is 0 and -0 is 1.
template <typename Bits>
constexpr bool is_zero(Bits rotated) {
  return rotated <= 1;
}

template <Dtype dtype>
EncodedBlock encode_sparse(const EncodeParams& params, const void* elements, uint32_t count,
                           uint8_t* slab, uint8_t* payload) {
  using Element = Float<dtype>;
  using Bits = typename Element::Bits;
  Bits rotated[kElements];
  load_elements(rotated, elements);

  Bits survivors[kElements];
  uint8_t exponents[kElements];
  uint32_t survivor_count = 0;
  uint8_t is_survivor[kElements];
  bool has_negative_zero = false;
  for (uint32_t e = 0; e < kElements; ++e) {
    rotated[e] = Element::rotate(rotated[e]);
    is_survivor[e] = !is_zero(rotated[e]);
    if (is_survivor[e]) {
      exponents[survivor_count] = Element::exponent(rotated[e]);
      survivors[survivor_count++] = rotated[e];
    } else {
      has_negative_zero |= rotated[e] != 0;
    }
  }
  const uint32_t zero_count = kElements - survivor_count;
  const uint32_t zeros = zero_count - (kElements - count);  // the missing ones are zeros, too
  const uint8_t center = canonical_centers(exponents, survivor_count, Element::kExponentBits).lq2;

  const Bitmap bitmap = bitmap_of(is_survivor);
  uint32_t bytes = bitmap.payload_bytes() + bytes_of_bits(2 * survivor_count) +
                   lq2_escape_bytes(exponents, survivor_count, center) +
                   (has_negative_zero ? bytes_of_bits(zero_count) : 0);
  for_each_plane(Element::kRestBits,
                 [&](uint32_t, auto width) { bytes += bytes_of_bits(width * survivor_count); });
  if (units_of_bytes(bytes) >= frame::max_payload_units(dtype, Layout::kSparse)) {
    EncodedBlock literal = encode_literal(params, elements, count, slab, payload);
    literal.zeros = zeros;
    return literal;
  }

  uint8_t* end = put_bitmap(payload, bitmap);
  for_each_plane(Element::kRestBits, [&](uint32_t shift, auto width) {
    StreamWriter field(end);
    for (uint32_t i = 0; i < survivor_count; ++i) {
      field.put(static_cast<uint32_t>(survivors[i] >> shift) & ((1u << width) - 1), width);
    }
    end = field.finish();
  });
  StreamWriter codes(end);
  for (uint32_t i = 0; i < survivor_count; ++i) {
    codes.put(lq2_code(distance(center, exponents[i])), 2);
  }
  end = codes.finish();
  if (has_negative_zero) {
    StreamWriter signs(end);
    for (uint32_t e = 0; e < kElements; ++e) {
      if (is_zero(rotated[e])) {
        signs.put(static_cast<uint32_t>(rotated[e]), 1);
      }
    }
    end = signs.finish();
  }
  end = put_lq2_escapes(end, exponents, survivor_count, center);
  const uint32_t units = finish_payload(payload, end);
  return {has_negative_zero ? uint32_t{frame::kSignedZeros} : uint32_t{frame::kZeros},
          units,
          zeros,
          center,
          center,
          bitmap.packed()};
}

template <Dtype dtype>
bool decode_sparse(const DecodeParams& params, uint8_t* out, const uint8_t* slab,
                   const uint8_t* payload, const CodedBlock& block) {
  const auto [mode, units, center, packed] = block;
  if (mode == frame::kLiteral) {
    return decode_literal(params, out, slab, payload, block);
  }
  using Element = Float<dtype>;
  using Bits = typename Element::Bits;
  PayloadReader reader(payload, units);
  uint8_t is_survivor[kElements];
  if (!get_bitmap(reader, packed, is_survivor)) {
    return false;
  }
  uint32_t survivor_count = 0;
  for (const uint8_t one : is_survivor) {
    survivor_count += one;
  }

  Bits survivors[kElements] = {};
  bool complete = true;
  for_each_plane(Element::kRestBits, [&](uint32_t shift, auto width) {
    const uint8_t* field = reader.take_stream(survivor_count, width);
    if (field == nullptr) {
      complete = false;
      return;
    }
    for (uint32_t i = 0; i < survivor_count; ++i) {
      const auto symbol = static_cast<Bits>(stream_symbol(field, i, width));
      survivors[i] = static_cast<Bits>(survivors[i] | symbol << shift);
    }
  });
  const uint8_t* code_stream = reader.take_stream(survivor_count, 2);
  const uint32_t sign_count = mode == frame::kSignedZeros ? kElements - survivor_count : 0;
  const uint8_t* signs = reader.take_stream(sign_count, 1);
  if (!complete || code_stream == nullptr || signs == nullptr) {
    return false;
  }
  uint8_t codes[kElements];
  uint8_t exponents[kElements];
  for (uint32_t i = 0; i < survivor_count; ++i) {
    codes[i] = static_cast<uint8_t>(stream_symbol(code_stream, i, 2));
  }
  if (!get_lq2_exponents(reader, codes, survivor_count, center, exponents) || !reader.is_at_end()) {
    return false;
  }

  Bits elements[kElements];
  uint32_t next_survivor = 0;
  uint32_t next_zero = 0;
  for (uint32_t e = 0; e < kElements; ++e) {
    Bits rotated = 0;
    if (is_survivor[e]) {
      rotated = Element::join(exponents[next_survivor], survivors[next_survivor]);
      ++next_survivor;
    } else if (sign_count != 0) {
      rotated = static_cast<Bits>(stream_symbol(signs, next_zero++, 1));
    }
    elements[e] = Element::rotate_back(rotated);
  }
  store_elements(out, elements);
  return true;
}

}  // namespace

EncodeBlocks sparse_encoder(Dtype dtype) {
  return for_float<EncodeBlocks>(
      dtype, []<Dtype constant>() { return &encode_one_by_one<encode_sparse<constant>>; });
}

DecodeBlocks sparse_decoder(Dtype dtype) {
  return for_float<DecodeBlocks>(
      dtype, []<Dtype constant>() { return &decode_one_by_one<decode_sparse<constant>>; });
}

}  // namespace memswap::cpu::scalar
