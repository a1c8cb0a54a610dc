// The oracle's shapes, one file each: plain code that reads like docs/format.md.
#pragma once

#include "block.h"

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

// Calls visit with the dtype as a constant, for the dtypes that are split into E and R.
template <typename Function, typename Visit>
Function for_float(frame::Dtype dtype, Visit visit) {
  using frame::Dtype;
  switch (dtype) {
    case Dtype::kBf16:
      return visit.template operator()<Dtype::kBf16>();
    case Dtype::kFp16:
      return visit.template operator()<Dtype::kFp16>();
    case Dtype::kFp32:
      return visit.template operator()<Dtype::kFp32>();
    case Dtype::kFp64:
      return visit.template operator()<Dtype::kFp64>();
    case Dtype::kE4m3:
      return visit.template operator()<Dtype::kE4m3>();
    case Dtype::kE5m2:
      return visit.template operator()<Dtype::kE5m2>();
    default:
      return nullptr;
  }
}

}  // namespace memswap::cpu::scalar
