// A vector path's shapes. dense and sparse return NULL where the dtype is no float.
#pragma once

#include "vector_lanes.h"

namespace memswap::cpu::MEMSWAP_ISA {

EncodeBlocks dense_encoder(const EncodeParams& params);
DecodeBlock dense_decoder(frame::Dtype dtype, bool streaming);
DecodeBlocks dense_tile_decoder(frame::Dtype dtype, bool streaming);
EncodeBlocks upcast_encoder(const EncodeParams& params);
DecodeBlock upcast_decoder(bool streaming);
EncodeBlocks sparse_encoder(const EncodeParams& params);
DecodeBlock sparse_decoder(frame::Dtype dtype, bool streaming);
DecodeBlocks sparse_tile_decoder(frame::Dtype dtype, bool streaming);
EncodeBlocks bits_encoder(const EncodeParams& params);
DecodeBlock bits_decoder(bool streaming);
EncodeBlocks ints_encoder(const EncodeParams& params);
DecodeBlock ints_decoder(frame::Dtype dtype, bool streaming);
EncodeBlocks raw_encoder(const EncodeParams& params);
DecodeBlock raw_decoder(frame::Dtype dtype, bool streaming);
uint32_t checksum(const void* data, size_t bytes);

}  // namespace memswap::cpu::MEMSWAP_ISA
