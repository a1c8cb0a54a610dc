// Layouts dense and upcast.
#include <algorithm>
#include <bit>

#include "elements.h"
#include "exponents.h"
#include "planes.h"
#include "scalar.h"

namespace memswap::cpu::scalar {

namespace {

using frame::Dtype;

constexpr uint32_t kHighBitPlaneBytes = kElements / 8;  // of LQ3's codes

constexpr uint32_t fw_mode(uint32_t bits) { return frame::kFw2 + bits - 2; }

constexpr uint32_t fw_payload_units(uint32_t bits) {
  return kElements / 8 * (bits - 2) / frame::kUnitBytes;
}

// What one of the three codes would take.
struct Choice {
  uint32_t mode;
  uint32_t units;
  uint8_t center;
};

Choice lq2_choice(const uint8_t* exponents, uint8_t center) {
  return {frame::kLq2, units_of_bytes(lq2_escape_bytes(exponents, kElements, center)), center};
}

Choice lq3_choice(const uint8_t* exponents, uint8_t center) {
  const uint32_t bytes = kHighBitPlaneBytes + lq3_escape_bytes(exponents, kElements, center);
  return {frame::kLq3, units_of_bytes(bytes), center};
}

Choice fw_choice(const uint8_t* exponents) {
  const auto [min, max] = std::minmax_element(exponents, exponents + kElements);
  const auto range = static_cast<uint32_t>(*max - *min);
  const uint32_t bits = std::max<uint32_t>(2, static_cast<uint32_t>(std::bit_width(range)));
  return {fw_mode(bits), fw_payload_units(bits), *max};
}

void put_exponents(const Choice& choice, const uint8_t* exponents, uint8_t* low_plane,
                   uint8_t* payload) {
  uint8_t codes[kElements];
  uint8_t* end = payload;
  for (uint32_t e = 0; e < kElements; ++e) {
    const uint8_t v = distance(choice.center, exponents[e]);
    codes[e] = static_cast<uint8_t>(choice.mode == frame::kLq2   ? lq2_code(v)
                                    : choice.mode == frame::kLq3 ? lq3_code(v)
                                                                 : v);
  }
  put_planes(low_plane, codes, 0, 2);
  if (choice.mode == frame::kLq2) {
    end = put_lq2_escapes(end, exponents, kElements, choice.center);
  } else if (choice.mode == frame::kLq3) {
    end = put_planes(end, codes, 2, 1);
    end = put_lq3_escapes(end, exponents, kElements, choice.center);
  } else {
    end = put_planes(end, codes, 2, choice.mode - frame::kFw2);
  }
  finish_payload(payload, end);
}

bool get_exponents(const CodedBlock& block, const uint8_t* low_plane, const uint8_t* payload,
                   uint8_t* exponents) {
  const auto [mode, units, center, packed] = block;
  PayloadReader reader(payload, units);
  uint8_t codes[kElements] = {};
  get_planes(low_plane, codes, 0, 2);
  if (mode == frame::kLq2) {
    return get_lq2_exponents(reader, codes, kElements, center, exponents) && reader.is_at_end();
  }
  if (mode == frame::kLq3) {
    const uint8_t* high_bits = reader.take(kHighBitPlaneBytes);
    if (high_bits == nullptr) {
      return false;
    }
    get_planes(high_bits, codes, 2, 1);
    return get_lq3_exponents(reader, codes, kElements, center, exponents) && reader.is_at_end();
  }
  const uint32_t more_bits = mode - frame::kFw2;
  const uint8_t* planes = reader.take(kElements / 8 * more_bits);
  if (planes == nullptr || !reader.is_at_end()) {
    return false;
  }
  get_planes(planes, codes, 2, more_bits);
  for (uint32_t e = 0; e < kElements; ++e) {
    exponents[e] = distance(center, codes[e]);
  }
  return true;
}

template <Dtype dtype>
EncodedBlock encode_dense(const EncodeParams& params, const void* elements, uint32_t count,
                          uint8_t* slab, uint8_t* payload) {
  using Element = Float<dtype>;
  typename Element::Bits rotated[kElements];
  uint8_t exponents[kElements];
  load_elements(rotated, elements);
  for (uint32_t e = 0; e < kElements; ++e) {
    rotated[e] = Element::rotate(rotated[e]);
    exponents[e] = Element::exponent(rotated[e]);
  }
  uint8_t* low_plane = put_planes(slab, rotated, 0, Element::kRestBits);

  Choice best;
  uint8_t center2;
  if (params.fast) {
    center2 = params.center;
    // With all bits of E nothing is out of reach: the distance counts modulo 2^kExponentBits.
    best = {fw_mode(Element::kExponentBits), fw_payload_units(Element::kExponentBits), center2};
    const Choice lq2 = lq2_choice(exponents, center2);
    if (lq2.units < best.units) {
      best = lq2;
    }
  } else {
    const Centers centers = canonical_centers(exponents, kElements, Element::kExponentBits);
    center2 = centers.lq2;
    best = fw_choice(exponents);
    if (centers.crowded) {
      for (const Choice& other :
           {lq2_choice(exponents, centers.lq2), lq3_choice(exponents, centers.lq3)}) {
        if (other.units < best.units) {
          best = other;
        }
      }
    }
  }
  put_exponents(best, exponents, low_plane, payload);
  const auto zeros = static_cast<uint32_t>(std::count(exponents, exponents + count, 0));
  return {best.mode, best.units, zeros, best.center, center2};
}

template <Dtype dtype>
bool decode_dense(const DecodeParams&, uint8_t* out, const uint8_t* slab, const uint8_t* payload,
                  const CodedBlock& block) {
  using Element = Float<dtype>;
  typename Element::Bits elements[kElements] = {};
  uint8_t exponents[kElements];
  const uint8_t* low_plane = get_planes(slab, elements, 0, Element::kRestBits);
  if (!get_exponents(block, low_plane, payload, exponents)) {
    return false;
  }
  for (uint32_t e = 0; e < kElements; ++e) {
    elements[e] = Element::rotate_back(Element::join(exponents[e], elements[e]));
  }
  store_elements(out, elements);
  return true;
}

}  // namespace

EncodedBlock encode_upcast(const EncodeParams& params, const void* elements, uint32_t count,
                           uint8_t* slab, uint8_t* payload) {
  uint32_t wide[kElements];
  uint16_t high[kElements];
  load_elements(wide, elements);
  uint32_t low_bits = 0;
  for (uint32_t e = 0; e < kElements; ++e) {
    high[e] = static_cast<uint16_t>(wide[e] >> 16);
    low_bits |= wide[e] & 0xffff;
  }
  if (low_bits != 0) {
    return encode_literal(params, elements, count, slab, payload);
  }
  return encode_dense<Dtype::kBf16>(params, high, count, slab, payload);
}

bool decode_upcast(const DecodeParams& params, uint8_t* out, const uint8_t* slab,
                   const uint8_t* payload, const CodedBlock& block) {
  if (block.mode == frame::kLiteral) {
    return decode_literal(params, out, slab, payload, block);
  }
  uint16_t high[kElements];
  if (!decode_dense<Dtype::kBf16>(params, reinterpret_cast<uint8_t*>(high), slab, payload, block)) {
    return false;
  }
  uint32_t wide[kElements];
  for (uint32_t e = 0; e < kElements; ++e) {
    wide[e] = uint32_t{high[e]} << 16;
  }
  store_elements(out, wide);
  return true;
}

EncodeBlocks dense_encoder(Dtype dtype) {
  return for_float<EncodeBlocks>(
      dtype, []<Dtype constant>() { return &encode_one_by_one<encode_dense<constant>>; });
}

DecodeBlocks dense_decoder(Dtype dtype) {
  return for_float<DecodeBlocks>(
      dtype, []<Dtype constant>() { return &decode_one_by_one<decode_dense<constant>>; });
}

}  // namespace memswap::cpu::scalar
