// The table of a vector path: every layout of every dtype has vector code, except that the last
// block of layout ints, where it is not full, goes to the scalar function.
#include "vector.h"

#include "vector_bytes.h"

namespace memswap::cpu {
namespace MEMSWAP_ISA {
namespace {

using frame::Layout;

EncodeBlocks encoder(const EncodeParams& params) {
  switch (params.layout) {
    case Layout::kDense:
      return dense_encoder(params);
    case Layout::kSparse:
      return sparse_encoder(params);
    case Layout::kBits:
      return bits_encoder(params);
    case Layout::kInts:
      return ints_encoder(params);
    case Layout::kUpcast:
      return upcast_encoder(params);
    case Layout::kRaw:
      break;
  }
  return raw_encoder(params);
}

DecodeBlocks decoder(const DecodeParams& params) {
  switch (params.layout) {
    case Layout::kDense:
      return dense_decoder(params);
    case Layout::kSparse:
      return sparse_decoder(params);
    case Layout::kBits:
      return bits_decoder(params);
    case Layout::kInts:
      return ints_decoder(params);
    case Layout::kUpcast:
      return upcast_decoder(params);
    case Layout::kRaw:
      break;
  }
  return raw_decoder(params);
}

}  // namespace

const BlockCodec& blocks() {
  static constexpr BlockCodec kBlocks = {
      MEMSWAP_ISA_NAME,    &encoder, &decoder, &high_halves, &hides_survivors, &checksum,
      &copy_around_caches, &fence};
  return kBlocks;
}

}  // namespace MEMSWAP_ISA

const BlockCodec& MEMSWAP_ISA_BLOCKS() { return MEMSWAP_ISA::blocks(); }

}  // namespace memswap::cpu
