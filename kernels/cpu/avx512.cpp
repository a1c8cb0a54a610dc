// The table of the AVX-512 path: every shape of every dtype has vector code, except that the last
// block of shape ints, where it is not full, goes to the scalar function.
#include "avx512.h"

#include <immintrin.h>

namespace memswap::cpu {

namespace {

using frame::Dtype;
using frame::Shape;

EncodeBlocks encoder(const EncodeParams& params) {
  switch (params.shape) {
    case Shape::kDense:
      return avx512::dense_encoder(params);
    case Shape::kSparse:
      return avx512::sparse_encoder(params);
    case Shape::kBits:
      return avx512::bits_encoder(params);
    case Shape::kInts:
      return avx512::ints_encoder(params);
    case Shape::kUpcast:
      return avx512::upcast_encoder(params);
    case Shape::kRaw:
      break;
  }
  return avx512::raw_encoder(params);
}

DecodeBlock decoder(Dtype dtype, Shape shape, bool streaming) {
  switch (shape) {
    case Shape::kDense:
      return avx512::dense_decoder(dtype, streaming);
    case Shape::kSparse:
      return avx512::sparse_decoder(dtype, streaming);
    case Shape::kBits:
      return avx512::bits_decoder(streaming);
    case Shape::kInts:
      return avx512::ints_decoder(dtype, streaming);
    case Shape::kUpcast:
      return avx512::upcast_decoder(streaming);
    case Shape::kRaw:
      break;
  }
  return avx512::raw_decoder(dtype, streaming);
}

DecodeBlocks tile_decoder(Dtype dtype, Shape shape, bool streaming) {
  switch (shape) {
    case Shape::kDense:
      return avx512::dense_tile_decoder(dtype, streaming);
    case Shape::kSparse:
      return avx512::sparse_tile_decoder(dtype, streaming);
    default:
      return nullptr;
  }
}

// Stores that bypass the caches are ordered by nothing else.
void fence() { _mm_sfence(); }

}  // namespace

const BlockCodec& avx512_blocks() {
  static constexpr BlockCodec kBlocks = {
      "avx512", &encoder,     &decoder, &avx512::checksum, &avx512::copy_around_caches,
      &fence,   &tile_decoder};
  return kBlocks;
}

}  // namespace memswap::cpu
