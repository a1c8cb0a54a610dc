// A vector path's layouts. dense and sparse return NULL where the dtype is no float.
#pragma once

#include "vector_lanes.h"

namespace memswap::cpu::MEMSWAP_ISA {

EncodeBlocks dense_encoder(const EncodeParams& params);
DecodeBlocks dense_decoder(const DecodeParams& params);
EncodeBlocks upcast_encoder(const EncodeParams& params);
DecodeBlocks upcast_decoder(const DecodeParams& params);
EncodeBlocks sparse_encoder(const EncodeParams& params);
DecodeBlocks sparse_decoder(const DecodeParams& params);
EncodeBlocks bits_encoder(const EncodeParams& params);
DecodeBlocks bits_decoder(const DecodeParams& params);
EncodeBlocks ints_encoder(const EncodeParams& params);
DecodeBlocks ints_decoder(const DecodeParams& params);
EncodeBlocks raw_encoder(const EncodeParams& params);
DecodeBlocks raw_decoder(const DecodeParams& params);
bool high_halves(uint32_t width, const void* elements, uint8_t* high);
bool hides_survivors(uint32_t width, const void* elements);
uint32_t checksum(const void* data, size_t bytes);

}  // namespace memswap::cpu::MEMSWAP_ISA
