// Encoders of layouts dense and upcast.
#include "encode.cuh"

namespace memswap::cuda {

// For what is loaded early, beside what dtypes take that have parts of bytes: with nvcc 13.0's
// allocation for sm_100 and later they would spill.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
inline constexpr bool kHasRegisters = false;
#else
inline constexpr bool kHasRegisters = true;
#endif

template <frame::Dtype kDtype>
struct DenseCoder {
  using Parts = Float<kDtype>;
  static constexpr uint32_t kStages = 2;
  using Memory = EncodeMemory<kDenseStageBytes, kStages>;
  static constexpr uint32_t kWidth = Parts::kWidth;
  static constexpr uint32_t kSlabBytes = frame::slab_bytes(kDtype, frame::Layout::kDense);
  static constexpr bool kHasPayload = true;
  static constexpr bool kMayBeLiteral = false;
  static constexpr uint32_t kTiles = kTilesAtOnce;
  static constexpr bool kLoadsEarly = kHasRegisters || kWidth > 2 || kDtype == frame::Dtype::kBf16;
  static constexpr bool kFetchesNext = true;

  __device__ static __forceinline__ Coded encode(const EncodeJob& job, const Source<kWidth>& source,
                                                 FirstRows<kWidth>& rows, uint8_t* slab,
                                                 Memory& memory, uint32_t stage,
                                                 const SymbolTables& tables, uint32_t warp,
                                                 uint32_t lane, BlockSummary& summary) {
    uint32_t e[8];
    [[maybe_unused]] uint32_t rest[8];
    for_rows<kLoadsEarly>(job, source, rows, warp, lane, summary, [&](uint32_t row, auto& words) {
      uint32_t low[Parts::kLowWords], top[2];
      Parts::split(words, low, top);
#pragma unroll
      for (int p = 0; p < Parts::kLowPlanes; ++p) {
        store_bytes(slab + p * int{frame::kBlockElements}, row, lane, low[2 * p], low[2 * p + 1]);
      }
#pragma unroll
      for (uint32_t h = 0; h < 2; ++h) {
        e[2 * row + h] = Parts::exponents(top[h]);
        rest[2 * row + h] = Parts::rest(top[h]);
      }
    });
    if constexpr (Parts::kRestBits != 0) {
      store_planes(slab + Parts::kLowPlanes * frame::kBlockElements, rest, Parts::kRestBits, lane);
    }
    return encode_dense<Parts::kSplit.exponent_bits>(
        streams_of(memory, stage, tables, lane), e, job.fast, job.center,
        frame::kBlockElements - source.count, summary, slab + kSlabBytes - frame::kLowPlaneBytes);
  }
};

struct UpcastCoder {
  using Parts = Float<frame::Dtype::kBf16>;
  static constexpr uint32_t kWidth = 4;
  static constexpr uint32_t kSlabBytes =
      frame::slab_bytes(frame::Dtype::kFp32, frame::Layout::kUpcast);
  static constexpr uint32_t kStages = 2;
  using Memory = EncodeMemory<kDenseStageBytes, kStages>;
  static constexpr bool kHasPayload = true;
  static constexpr bool kMayBeLiteral = true;
  static constexpr uint32_t kTiles = kTilesAtOnce;
  static constexpr bool kLoadsEarly = true;
  static constexpr bool kFetchesNext = true;

  __device__ static __forceinline__ Coded encode(const EncodeJob& job, const Source<kWidth>& source,
                                                 FirstRows<kWidth>& rows, uint8_t* slab,
                                                 Memory& memory, uint32_t stage,
                                                 const SymbolTables& tables, uint32_t warp,
                                                 uint32_t lane, BlockSummary& summary) {
    uint32_t e[8], mantissas[8], low_halves = 0;
    for_rows<kLoadsEarly>(job, source, rows, warp, lane, summary, [&](uint32_t row, auto& words) {
      uint32_t high[Parts::kWords], low[2], top[2];
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        high[i] = __byte_perm(words[2 * i], words[2 * i + 1], 0x7632);
        low_halves |= words[2 * i] | words[2 * i + 1];
      }
      Parts::split(high, low, top);
#pragma unroll
      for (uint32_t h = 0; h < 2; ++h) {
        mantissas[2 * row + h] = low[h];
        e[2 * row + h] = top[h];
      }
    });
    if (__any_sync(kAllLanes, (low_halves & 0xffffu) != 0)) {
      return literal<kWidth, kSlabBytes>();
    }
#pragma unroll
    for (uint32_t row = 0; row < kRows; ++row) {
      store_bytes(slab, row, lane, mantissas[2 * row], mantissas[2 * row + 1]);
    }
    return encode_dense<8>(streams_of(memory, stage, tables, lane), e, job.fast, job.center,
                           frame::kBlockElements - source.count, summary,
                           slab + kSlabBytes - frame::kLowPlaneBytes);
  }
};

EncodeKernel* dense_encode_kernel(frame::Dtype dtype, frame::Layout layout) {
  using frame::Dtype;
  if (layout == frame::Layout::kUpcast) {
    return encode_kernel<UpcastCoder>();
  }
  switch (dtype) {
    case Dtype::kBf16:
      return encode_kernel<DenseCoder<Dtype::kBf16>>();
    case Dtype::kFp16:
      return encode_kernel<DenseCoder<Dtype::kFp16>>();
    case Dtype::kFp32:
      return encode_kernel<DenseCoder<Dtype::kFp32>>();
    case Dtype::kFp64:
      return encode_kernel<DenseCoder<Dtype::kFp64>>();
    case Dtype::kE4m3:
      return encode_kernel<DenseCoder<Dtype::kE4m3>>();
    case Dtype::kE5m2:
      return encode_kernel<DenseCoder<Dtype::kE5m2>>();
    default:
      return nullptr;
  }
}

}  // namespace memswap::cuda
