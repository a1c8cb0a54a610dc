// The oracle's layouts, one file each: plain code that reads like docs/format.md.
#pragma once

#include "block.h"
#include "by_dtype.h"

namespace memswap::cpu::scalar {

// Each returns NULL where the layout does not fit the dtype.
EncodeBlocks dense_encoder(frame::Dtype dtype);
DecodeBlocks dense_decoder(frame::Dtype dtype);
EncodeBlocks sparse_encoder(frame::Dtype dtype);
DecodeBlocks sparse_decoder(frame::Dtype dtype);
EncodeBlocks ints_encoder(frame::Dtype dtype);
DecodeBlocks ints_decoder(frame::Dtype dtype);

EncodedBlock encode_upcast(const EncodeParams& params, const void* elements, uint32_t count,
                           uint8_t* slab, uint8_t* payload);
bool decode_upcast(const DecodeParams& params, uint8_t* out, const uint8_t* slab,
                   const uint8_t* payload, const CodedBlock& block);
EncodedBlock encode_bits(const EncodeParams& params, const void* elements, uint32_t count,
                         uint8_t* slab, uint8_t* payload);
bool decode_bits(const DecodeParams& params, uint8_t* out, const uint8_t* slab,
                 const uint8_t* payload, const CodedBlock& block);

// Literal blocks, of any layout: the first slab_bytes in the slab, the rest in the payload.
EncodedBlock encode_literal(const EncodeParams& params, const void* elements, uint32_t count,
                            uint8_t* slab, uint8_t* payload);
bool decode_literal(const DecodeParams& params, uint8_t* out, const uint8_t* slab,
                    const uint8_t* payload, const CodedBlock& block);

}  // namespace memswap::cpu::scalar
