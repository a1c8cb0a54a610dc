// The table of the portable vector path.
#include "vector.h"

#include "vector_bytes.h"

namespace memswap::cpu {
namespace vector {
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
  return shape == Shape::kDense ? dense_tile_decoder(dtype, streaming) : nullptr;
}

// Too few bytes at a time to be worth more.
void copy_around_caches(void* to, const void* from, size_t bytes) {
  __builtin_memcpy(to, from, bytes);
}

void make_stores_visible() { fence(); }

}  // namespace
}  // namespace vector

const BlockCodec& vector_blocks() {
  static constexpr BlockCodec kBlocks = {"vector",
                                         &vector::encoder,
                                         &vector::decoder,
                                         &vector::checksum,
                                         &vector::copy_around_caches,
                                         &vector::make_stores_visible,
                                         &vector::tile_decoder};
  return kBlocks;
}

}  // namespace memswap::cpu
