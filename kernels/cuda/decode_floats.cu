// Decoders of floats: every layout but sparse.
#include "decode.cuh"

namespace memswap::cuda {

template <frame::Dtype kDtype>
struct FloatDecoder {
  using Parts = Float<kDtype>;
  static constexpr uint32_t kWidth = Parts::kWidth;
  // The rows of float64 take more registers than those of the others.
  static constexpr uint32_t kTiles = kDtype == frame::Dtype::kFp64 ? kLeastTiles : kTilesAtOnce;
  static constexpr bool kReportsHeaders = true;

  __device__ static constexpr bool takes(frame::Layout layout) {
    return layout != frame::Layout::kSparse;
  }

  __device__ static __forceinline__ bool decode(const BlockRecord& record, const DecodeFrame& frame,
                                                const Sink<kWidth>& sink, const uint8_t* slab,
                                                DecodeMemory& memory, const Move* expand,
                                                uint32_t warp, uint32_t lane, uint64_t& checksum) {
    if (frame.layout == frame::Layout::kDense) {
      return decode_dense_block<Parts>(record, frame, sink, slab, memory, expand, warp, lane,
                                       checksum);
    }
    if constexpr (kWidth == 1) {
      if (record.mode == frame::kBitmap) {
        return decode_bitmap(record, frame, sink, warp, lane, checksum);
      }
    }
    if (record.mode == frame::kReference) {
      return decode_ints(record, frame, sink, warp, lane, checksum);
    }
    if constexpr (kDtype == frame::Dtype::kFp32) {
      if (record.mode != frame::kLiteral) {
        return decode_dense_block<Float<frame::Dtype::kBf16>>(record, frame, sink, slab, memory,
                                                              expand, warp, lane, checksum);
      }
    }
    return decode_literal(record, frame, sink, slab, warp, lane, checksum);
  }

 private:
  // A dense block of BlockParts: of this dtype, or of bfloat16 for layout upcast.
  template <class BlockParts>
  __device__ static __forceinline__ bool decode_dense_block(
      const BlockRecord& record, const DecodeFrame& frame, const Sink<kWidth>& sink,
      const uint8_t* slab, DecodeMemory& memory, const Move* expand, uint32_t warp, uint32_t lane,
      uint64_t& checksum) {
    constexpr uint32_t kRestBytes = frame::rest_bytes(BlockParts::kSplit);
    const uint2 plane = *reinterpret_cast<const uint2*>(slab + kRestBytes + lane * 8);
    const uint32_t low_codes[2] = {plane.x, plane.y};
    // One plane is fetched before the exponents are decoded; more would cost registers.
    constexpr bool kEarly = BlockParts::kLowPlanes == 1;
    constexpr uint32_t kAtOnce = kEarly ? kRows : kRowsAtOnce<kWidth>;
    uint2 pairs[kAtOnce][BlockParts::kLowPlanes == 0 ? 1 : BlockParts::kLowPlanes];
    const auto load_low = [&](uint32_t first) {
#pragma unroll
      for (uint32_t row = first; row < first + kAtOnce; ++row) {
#pragma unroll
        for (int p = 0; p < BlockParts::kLowPlanes; ++p) {
          pairs[row - first][p] = load_bytes(slab + p * int{frame::kBlockElements}, row, lane);
        }
      }
    };
    if constexpr (kEarly) {
      load_low(0);
    }
    __syncwarp();  // the block before this one has been read
    if (record.units * frame::kUnitBytes > kDecodeStageBytes) {
      return false;
    }
    stage_payload(memory, record.payload, record.units, lane);
    __syncwarp();
    uint32_t e[8];
    if (!decode_dense(memory, expand, low_codes, record.mode, record.units, record.center, lane,
                      e)) {
      return false;
    }
    [[maybe_unused]] uint32_t rest[8];
    if constexpr (BlockParts::kRestBits != 0) {
      load_planes(slab + BlockParts::kLowPlanes * int{frame::kBlockElements}, rest,
                  BlockParts::kRestBits, lane);
    }
    // Written together, where registers allow it, for one look at how they are to be written.
    constexpr uint32_t kTogether = kWidth <= 2 ? kRows : 1;
#pragma unroll
    for (uint32_t first = 0; first < kRows; first += kTogether) {
      uint32_t rows[kTogether][kRowWords<kWidth>];
#pragma unroll
      for (uint32_t row = first; row < first + kTogether; ++row) {
        if constexpr (!kEarly) {
          if (row % kAtOnce == 0) {
            load_low(row);
          }
        }
        uint32_t low[BlockParts::kLowWords], top[2], parts[BlockParts::kWords];
#pragma unroll
        for (int p = 0; p < BlockParts::kLowPlanes; ++p) {
          low[2 * p] = pairs[row % kAtOnce][p].x;
          low[2 * p + 1] = pairs[row % kAtOnce][p].y;
        }
#pragma unroll
        for (uint32_t h = 0; h < 2; ++h) {
          const uint32_t i = 2 * row + h;
          top[h] = BlockParts::kRestBits == 0 ? e[i] : BlockParts::top(e[i], rest[i]);
        }
        BlockParts::join(low, top, parts);
        auto& words = rows[row - first];
#pragma unroll
        for (uint32_t i = 0; i < BlockParts::kWords; ++i) {
          if constexpr (BlockParts::kWidth == kWidth) {
            words[i] = parts[i];
          } else {
            words[2 * i] = parts[i] << 16;
            words[2 * i + 1] = parts[i] & 0xffff0000u;
          }
        }
      }
      finish_rows(sink, frame.verify, warp, first, lane, rows, checksum);
    }
    return true;
  }
};

DecodeKernel* float_decode_kernel(frame::Dtype dtype) {
  using frame::Dtype;
  switch (dtype) {
    case Dtype::kBf16:
      return decode_kernel<FloatDecoder<Dtype::kBf16>>();
    case Dtype::kFp16:
      return decode_kernel<FloatDecoder<Dtype::kFp16>>();
    case Dtype::kFp32:
      return decode_kernel<FloatDecoder<Dtype::kFp32>>();
    case Dtype::kFp64:
      return decode_kernel<FloatDecoder<Dtype::kFp64>>();
    case Dtype::kE4m3:
      return decode_kernel<FloatDecoder<Dtype::kE4m3>>();
    case Dtype::kE5m2:
      return decode_kernel<FloatDecoder<Dtype::kE5m2>>();
    default:
      return nullptr;
  }
}

}  // namespace memswap::cuda
