// The table of the oracle, literal blocks (the whole of layout raw) and the checksum.
#include "scalar.h"

#include <string.h>

#include "planes.h"

namespace memswap::cpu {

namespace scalar {

using frame::Layout;

EncodedBlock encode_literal(const EncodeParams& params, const void* elements, uint32_t,
                            uint8_t* slab, uint8_t* payload) {
  const uint32_t slab_bytes = frame::slab_bytes(params.dtype, params.layout);
  const uint32_t rest_bytes = kElements * frame::width_of(params.dtype) - slab_bytes;
  const auto* bytes = static_cast<const uint8_t*>(elements);
  memcpy(slab, bytes, slab_bytes);
  memcpy(payload, bytes + slab_bytes, rest_bytes);
  return {frame::kLiteral, rest_bytes / frame::kUnitBytes, 0, 0, 0};
}

bool decode_literal(const DecodeParams& params, uint8_t* out, const uint8_t* slab,
                    const uint8_t* payload, const CodedBlock& block) {
  const uint32_t slab_bytes = params.slab_bytes;
  const uint32_t rest_bytes = params.block_bytes - slab_bytes;
  if (block.units * frame::kUnitBytes != rest_bytes) {
    return false;
  }
  memcpy(out, slab, slab_bytes);
  memcpy(out + slab_bytes, payload, rest_bytes);
  return true;
}

namespace {

EncodeBlocks encoder(const EncodeParams& params) {
  switch (params.layout) {
    case Layout::kDense:
      return dense_encoder(params.dtype);
    case Layout::kSparse:
      return sparse_encoder(params.dtype);
    case Layout::kBits:
      return &encode_one_by_one<encode_bits>;
    case Layout::kInts:
      return ints_encoder(params.dtype);
    case Layout::kUpcast:
      return &encode_one_by_one<encode_upcast>;
    case Layout::kRaw:
      break;
  }
  return &encode_one_by_one<encode_literal>;
}

DecodeBlocks decoder(const DecodeParams& params) {
  switch (params.layout) {
    case Layout::kDense:
      return dense_decoder(params.dtype);
    case Layout::kSparse:
      return sparse_decoder(params.dtype);
    case Layout::kBits:
      return &decode_one_by_one<decode_bits>;
    case Layout::kInts:
      return ints_decoder(params.dtype);
    case Layout::kUpcast:
      return &decode_one_by_one<decode_upcast>;
    case Layout::kRaw:
      break;
  }
  return &decode_one_by_one<decode_literal>;
}

bool high_halves(uint32_t width, const void* elements, uint8_t* high) {
  const auto* bytes = static_cast<const uint8_t*>(elements);
  bool others_are_zero = true;
  for (uint32_t i = 0; i < kElements; ++i, bytes += width) {
    memcpy(high + sizeof(uint16_t) * i, bytes + width - sizeof(uint16_t), sizeof(uint16_t));
    for (uint32_t j = 0; j < width - sizeof(uint16_t); ++j) {
      others_are_zero &= bytes[j] == 0;
    }
  }
  return others_are_zero;
}

bool hides_survivors(uint32_t width, const void* elements) {
  const auto* bytes = static_cast<const uint8_t*>(elements);
  bool is_hidden = false;
  for (uint32_t i = 0; i < kElements; ++i, bytes += width) {
    uint64_t bits = 0;
    memcpy(&bits, bytes, width);
    const uint64_t others = bits & ((uint64_t{1} << (8 * width - 16)) - 1);
    is_hidden |= others != 0 && (bits >> (8 * width - 16) & 0x7fff) == 0;
  }
  return is_hidden;
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
                                         &scalar::high_halves,
                                         &scalar::hides_survivors,
                                         &scalar::checksum,
                                         &scalar::copy_around_caches,
                                         &scalar::fence};
  return kBlocks;
}

}  // namespace memswap::cpu
