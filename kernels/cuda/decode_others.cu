// Decoders of what is no float: layouts bits, ints and raw.
#include "decode.cuh"

namespace memswap::cuda {

template <uint32_t kElementBytes>
struct OtherDecoder {
  static constexpr uint32_t kWidth = kElementBytes;
  static constexpr uint32_t kTiles = kTilesAtOnce;
  static constexpr bool kReportsHeaders = true;

  __device__ static constexpr bool takes(frame::Layout) { return true; }

  __device__ static __forceinline__ bool decode(const BlockRecord& record, const DecodeFrame& frame,
                                                const Sink<kWidth>& sink, const uint8_t* slab,
                                                DecodeMemory&, const Move*, uint32_t warp,
                                                uint32_t lane, uint64_t& checksum) {
    if constexpr (kWidth == 1) {
      if (record.mode == frame::kBitmap) {
        return decode_bitmap(record, frame, sink, warp, lane, checksum);
      }
    }
    if (record.mode == frame::kReference) {
      return decode_ints(record, frame, sink, warp, lane, checksum);
    }
    return decode_literal(record, frame, sink, slab, warp, lane, checksum);
  }
};

DecodeKernel* other_decode_kernel(frame::Dtype dtype) {
  switch (frame::width_of(dtype)) {
    case 1:
      return decode_kernel<OtherDecoder<1>>();
    case 2:
      return decode_kernel<OtherDecoder<2>>();
    case 4:
      return decode_kernel<OtherDecoder<4>>();
    default:
      return decode_kernel<OtherDecoder<8>>();
  }
}

}  // namespace memswap::cuda
