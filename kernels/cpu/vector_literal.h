// Literal blocks: the first slab_bytes in the slab, the rest in the payload.
#pragma once

#include "vector_bytes.h"

MEMSWAP_VECTOR_BEGIN

namespace memswap::cpu::MEMSWAP_ISA {
namespace {
template <bool kStreaming>
inline EncodedBlock encode_literal(const EncodeParams& params, const void* elements, uint32_t,
                                   uint8_t* slab, uint8_t* payload) {
  const uint32_t slab_bytes = frame::slab_bytes(params.dtype, params.layout);
  const uint32_t rest_bytes = frame::kBlockElements * frame::width_of(params.dtype) - slab_bytes;
  const auto* from = static_cast<const uint8_t*>(elements);
  copy_lines<kStreaming>(slab, from, slab_bytes);
  copy_lines<false>(payload, from + slab_bytes, rest_bytes);
  return {frame::kLiteral, rest_bytes / frame::kUnitBytes, 0, 0, 0};
}

template <bool kStreaming>
inline bool decode_literal(const DecodeParams& params, uint8_t* out, const uint8_t* slab,
                           const uint8_t* payload, const CodedBlock& block) {
  const uint32_t slab_bytes = params.slab_bytes;
  const uint32_t rest_bytes = params.block_bytes - slab_bytes;
  if (block.units * frame::kUnitBytes != rest_bytes) {
    return false;
  }
  copy_lines<kStreaming>(out, slab, slab_bytes);
  copy_lines<kStreaming>(out + slab_bytes, payload, rest_bytes);
  return true;
}
}  // namespace
}  // namespace memswap::cpu::MEMSWAP_ISA

MEMSWAP_VECTOR_END
