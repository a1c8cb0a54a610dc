// The table of the oracle, literal blocks (the whole of shape raw) and the checksum.
#include "scalar.h"

#include <string.h>

#include "planes.h"

namespace memswap::cpu {

namespace scalar {

using frame::Dtype;
using frame::Shape;

EncodedBlock encode_literal(const void* elements, Dtype dtype, Shape shape, uint8_t* slab,
                            uint8_t* payload) {
  const uint32_t slab_bytes = frame::slab_bytes(dtype, shape);
  const uint32_t rest_bytes = kElements * frame::width_of(dtype) - slab_bytes;
  const auto* bytes = static_cast<const uint8_t*>(elements);
  memcpy(slab, bytes, slab_bytes);
  memcpy(payload, bytes + slab_bytes, rest_bytes);
  return {frame::kLiteral, rest_bytes / frame::kUnitBytes, 0, 0, 0};
}

bool decode_literal(void* out, Dtype dtype, Shape shape, const uint8_t* slab,
                    const uint8_t* payload, uint32_t units) {
  const uint32_t slab_bytes = frame::slab_bytes(dtype, shape);
  const uint32_t rest_bytes = kElements * frame::width_of(dtype) - slab_bytes;
  if (units * frame::kUnitBytes != rest_bytes) {
    return false;
  }
  auto* bytes = static_cast<uint8_t*>(out);
  memcpy(bytes, slab, slab_bytes);
  memcpy(bytes + slab_bytes, payload, rest_bytes);
  return true;
}

namespace {

EncodedBlock encode_raw(const EncodeParams& params, const void* elements, uint32_t, uint8_t* slab,
                        uint8_t* payload) {
  return encode_literal(elements, params.dtype, Shape::kRaw, slab, payload);
}

template <Dtype dtype_of_width>
bool decode_raw(void* out, const uint8_t* slab, const uint8_t* payload, uint32_t, uint32_t units,
                uint8_t, bool) {
  return decode_literal(out, dtype_of_width, Shape::kRaw, slab, payload, units);
}

DecodeBlock raw_decoder(Dtype dtype) {
  switch (frame::width_of(dtype)) {
    case 1:
      return &decode_raw<Dtype::kBits8>;
    case 2:
      return &decode_raw<Dtype::kBits16>;
    case 4:
      return &decode_raw<Dtype::kBits32>;
    default:
      return &decode_raw<Dtype::kBits64>;
  }
}

EncodeBlocks encoder(const EncodeParams& params) {
  switch (params.shape) {
    case Shape::kDense:
      return dense_encoder(params.dtype);
    case Shape::kSparse:
      return sparse_encoder(params.dtype);
    case Shape::kBits:
      return &encode_one_by_one<encode_bits>;
    case Shape::kInts:
      return ints_encoder(params.dtype);
    case Shape::kUpcast:
      return &encode_one_by_one<encode_upcast>;
    case Shape::kRaw:
      break;
  }
  return &encode_one_by_one<encode_raw>;
}

DecodeBlock decoder(Dtype dtype, Shape shape, bool) {
  switch (shape) {
    case Shape::kDense:
      return dense_decoder(dtype);
    case Shape::kSparse:
      return sparse_decoder(dtype);
    case Shape::kBits:
      return &decode_bits;
    case Shape::kInts:
      return ints_decoder(dtype);
    case Shape::kUpcast:
      return &decode_upcast;
    case Shape::kRaw:
      break;
  }
  return raw_decoder(dtype);
}

uint32_t checksum(const void* data, size_t bytes) {
  const auto* at = static_cast<const uint8_t*>(data);
  uint64_t sum = 0;
  uint64_t weight = 1;
  while (bytes != 0) {
    const size_t step = bytes < sizeof(uint32_t) ? bytes : sizeof(uint32_t);
    uint32_t word = 0;
    memcpy(&word, at, step);
    sum += word * weight;
    weight += 2;
    at += step;
    bytes -= step;
  }
  return static_cast<uint32_t>(sum % frame::kChecksumPrime);
}

void copy_around_caches(void* to, const void* from, size_t bytes) { memcpy(to, from, bytes); }

void fence() {}

}  // namespace

}  // namespace scalar

const BlockCodec& scalar_blocks() {
  static constexpr BlockCodec kBlocks = {"scalar",
                                         &scalar::encoder,
                                         &scalar::decoder,
                                         &scalar::checksum,
                                         &scalar::copy_around_caches,
                                         &scalar::fence};
  return kBlocks;
}

}  // namespace memswap::cpu
