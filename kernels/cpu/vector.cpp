// The table of a vector path: every shape of every dtype has vector code, except that the last
// block of shape ints, where it is not full, goes to the scalar function.
#include "vector.h"

#include "vector_bytes.h"

namespace memswap::cpu {
namespace MEMSWAP_ISA {
namespace {

using frame::Dtype;
using frame::Shape;

EncodeBlocks encoder(const EncodeParams& params) {
  switch (params.shape) {
    case Shape::kDense:
      return dense_encoder(params);
    case Shape::kSparse:
      return sparse_encoder(params);
    case Shape::kBits:
      return bits_encoder(params);
    case Shape::kInts:
      return ints_encoder(params);
    case Shape::kUpcast:
      return upcast_encoder(params);
    case Shape::kRaw:
      break;
  }
  return raw_encoder(params);
}

DecodeBlock decoder(Dtype dtype, Shape shape, bool streaming) {
  switch (shape) {
    case Shape::kDense:
      return dense_decoder(dtype, streaming);
    case Shape::kSparse:
      return sparse_decoder(dtype, streaming);
    case Shape::kBits:
      return bits_decoder(streaming);
    case Shape::kInts:
      return ints_decoder(dtype, streaming);
    case Shape::kUpcast:
      return upcast_decoder(streaming);
    case Shape::kRaw:
      break;
  }
  return raw_decoder(dtype, streaming);
}

DecodeBlocks tile_decoder(Dtype dtype, Shape shape, bool streaming) {
  switch (shape) {
    case Shape::kDense:
      return dense_tile_decoder(dtype, streaming);
    case Shape::kSparse:
      return sparse_tile_decoder(dtype, streaming);
    default:
      return nullptr;
  }
}

}  // namespace

const BlockCodec& blocks() {
  static constexpr BlockCodec kBlocks = {MEMSWAP_ISA_NAME,    &encoder, &decoder,     &checksum,
                                         &copy_around_caches, &fence,   &tile_decoder};
  return kBlocks;
}

}  // namespace MEMSWAP_ISA

const BlockCodec& MEMSWAP_ISA_BLOCKS() { return MEMSWAP_ISA::blocks(); }

}  // namespace memswap::cpu
