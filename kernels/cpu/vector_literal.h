// Literal blocks: the first slab_bytes in the slab, the rest in the payload.
#pragma once

#include "vector_bytes.h"

MEMSWAP_VECTOR_BEGIN

namespace memswap::cpu::MEMSWAP_ISA {
namespace {
template <bool kStreaming>
inline EncodedBlock encode_literal(const uint8_t* elements, frame::Dtype dtype, frame::Shape shape,
                                   uint8_t* slab, uint8_t* payload) {
  const uint32_t slab_bytes = frame::slab_bytes(dtype, shape);
  const uint32_t rest_bytes = frame::kBlockElements * frame::width_of(dtype) - slab_bytes;
  copy_lines<kStreaming>(slab, elements, slab_bytes);
  copy_lines<false>(payload, elements + slab_bytes, rest_bytes);
  return {frame::kLiteral, rest_bytes / frame::kUnitBytes, 0, 0, 0};
}

// With kStreaming, `out` is a multiple of 64.
template <bool kStreaming>
inline bool decode_literal(uint8_t* out, frame::Dtype dtype, frame::Shape shape,
                           const uint8_t* slab, const uint8_t* payload, uint32_t units) {
  const uint32_t slab_bytes = frame::slab_bytes(dtype, shape);
  const uint32_t rest_bytes = frame::kBlockElements * frame::width_of(dtype) - slab_bytes;
  if (units * frame::kUnitBytes != rest_bytes) {
    return false;
  }
  copy_lines<kStreaming>(out, slab, slab_bytes);
  copy_lines<kStreaming>(out + slab_bytes, payload, rest_bytes);
  return true;
}
}  // namespace
}  // namespace memswap::cpu::MEMSWAP_ISA

MEMSWAP_VECTOR_END
