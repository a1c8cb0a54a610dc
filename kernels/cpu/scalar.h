// The oracle's shapes, one file each: plain code that reads like docs/format.md.
#pragma once

#include "block.h"
#include "by_dtype.h"

namespace memswap::cpu::scalar {

// Each returns NULL where the shape does not fit the dtype.
EncodeBlocks dense_encoder(frame::Dtype dtype);
DecodeBlock dense_decoder(frame::Dtype dtype);
EncodeBlocks sparse_encoder(frame::Dtype dtype);
DecodeBlock sparse_decoder(frame::Dtype dtype);
EncodeBlocks ints_encoder(frame::Dtype dtype);
DecodeBlock ints_decoder(frame::Dtype dtype);

EncodedBlock encode_upcast(const EncodeParams& params, const void* elements, uint32_t count,
                           uint8_t* slab, uint8_t* payload);
bool decode_upcast(void* out, const uint8_t* slab, const uint8_t* payload, uint32_t mode,
                   uint32_t units, uint8_t center, bool packed);
EncodedBlock encode_bits(const EncodeParams& params, const void* elements, uint32_t count,
                         uint8_t* slab, uint8_t* payload);
bool decode_bits(void* out, const uint8_t* slab, const uint8_t* payload, uint32_t mode,
                 uint32_t units, uint8_t center, bool packed);

// Literal blocks, of any shape: the first slab_bytes in the slab, the rest in the payload.
EncodedBlock encode_literal(const void* elements, frame::Dtype dtype, frame::Shape shape,
                            uint8_t* slab, uint8_t* payload);
bool decode_literal(void* out, frame::Dtype dtype, frame::Shape shape, const uint8_t* slab,
                    const uint8_t* payload, uint32_t units);

}  // namespace memswap::cpu::scalar
