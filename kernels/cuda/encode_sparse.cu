// Encoders of layout sparse: survivors are compacted and coded as a block of their own.
#include "encode.cuh"

namespace memswap::cuda {

template <frame::Dtype kDtype>
struct SparseCoder {
  using Parts = Float<kDtype>;
  static constexpr uint32_t kWidth = Parts::kWidth;
  static constexpr uint32_t kSlabBytes = 0;
  static constexpr bool kHasPayload = true;
  static constexpr bool kMayBeLiteral = true;
  static constexpr uint32_t kTiles = kTilesAtOnce;
  static constexpr bool kLoadsEarly = false;  // a row at a time, and each twice
  static constexpr bool kFetchesNext = true;
  static constexpr uint32_t kLiteralBytes = frame::kBlockElements * kWidth;
  // Many byte planes would take the room of other tiles: they are written when their place is
  // known.
  static constexpr bool kPlanesLater = Parts::kLowPlanes > 3;
  static constexpr uint32_t kStagedPlanes = kPlanesLater ? 0 : Parts::kLowPlanes;
  // The bitmap, R, the codes, the signs and the two packed streams at their longest: a block that
  // turns out to be literal has been written until there. A byte E that does not fit is left out.
  static constexpr uint32_t kStreamBytes =
      2 * frame::kBitmapBytes + frame::rest_bytes(Parts::kSplit) -
      (Parts::kLowPlanes - kStagedPlanes) * frame::kBlockElements + frame::kLowPlaneBytes + 256 +
      512;
  static constexpr uint32_t kStageBytes = (kStreamBytes + 16 + 15) / 16 * 16;
  static constexpr uint32_t kStages = 1;
  using Memory = EncodeMemory<kStageBytes, kStages>;

  __device__ static __forceinline__ Coded encode(const EncodeJob& job, const Source<kWidth>& source,
                                                 FirstRows<kWidth>&, uint8_t*, Memory& memory,
                                                 uint32_t, const SymbolTables& tables,
                                                 uint32_t warp, uint32_t lane,
                                                 BlockSummary& summary) {
    uint64_t sum = 0;
    uint32_t masks = 0,
             negatives = 0;  // survivors, and zeros with a sign; byte q: row q
#pragma unroll 1             // four rows at once would take too many registers
    for (uint32_t row = 0; row < kRows; ++row) {
      uint32_t words[Parts::kWords], low[Parts::kLowWords], top[2];
      load_row(source, row, lane, words);
      if (job.checked) {
        sum += checksum_row<kWidth>(words, warp, row, lane);
      }
      Parts::split(words, low, top);
#pragma unroll
      for (uint32_t h = 0; h < 2; ++h) {
        // Rotated, the sign is the lowest bit of all.
        const uint32_t lowest = Parts::kLowPlanes == 0 ? top[h] : low[h];
        uint32_t magnitude = lowest & 0xfefefefeu;
        if constexpr (Parts::kLowPlanes != 0) {
          magnitude |= top[h];
        }
#pragma unroll
        for (int p = 1; p < Parts::kLowPlanes; ++p) {
          magnitude |= low[2 * p + h];
        }
        const uint32_t here = gather_flags(not_zero(magnitude) >> 7);
        masks |= here << (8 * row + 4 * h);
        negatives |= (gather_flags(lowest & 0x01010101u) & ~here) << (8 * row + 4 * h);
      }
    }
    keep_checksum(job, sum, lane, summary);
    const Ranks ranks = rank_rows(count_rows(masks), lane);
    const uint32_t survivors = ranks.total;
    if (lane == 0) {
      summary.zeros = source.count - survivors;
    }
    clear_stage<kStageBytes>(memory.stages[0], lane);
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) {
      memory.symbols[i * kLanes + lane] = 0;
    }
    __syncwarp();

    uint8_t* stage = reinterpret_cast<uint8_t*>(memory.stages[0]);
    const WrittenBitmap bitmap = write_bitmap(stage, masks, lane);
    scatter<true, !kPlanesLater>(source, masks, ranks, stage + bitmap.bytes,
                                 reinterpret_cast<uint8_t*>(memory.symbols), lane);
    __syncwarp();

    // From here on the survivors are the elements: place i of 1024, the first ones there.
    uint32_t e[8], valid = 0;
    const uint32_t bytes_later = (Parts::kLowPlanes - kStagedPlanes) * survivors;
    uint32_t behind = bitmap.bytes + kStagedPlanes * survivors;
    {
      uint32_t rest[8];
#pragma unroll
      for (uint32_t row = 0; row < kRows; ++row) {
        const uint2 top = reinterpret_cast<const uint2*>(memory.symbols)[row * kLanes + lane];
        e[2 * row] = Parts::exponents(top.x);
        e[2 * row + 1] = Parts::exponents(top.y);
        rest[2 * row] = Parts::rest(top.x);
        rest[2 * row + 1] = Parts::rest(top.y);
        const uint32_t place = row * kRowElements + lane * kLaneColumns;
        const uint32_t here = survivors > place ? min(survivors - place, kLaneColumns) : 0;
        valid |= ((1u << here) - 1) << (8 * row);
      }
      behind = write_rest(stage, rest, survivors, behind, lane);
    }
    const Exponents all = measure(e);  // missing survivors have E = 0, which counts nowhere
    const uint32_t codes = behind;
    const uint32_t signs = codes + (2 * survivors + 7) / 8;
    const bool has_signs = __any_sync(kAllLanes, negatives != 0);
    const uint32_t begin = signs + (has_signs ? (frame::kBlockElements - survivors + 7) / 8 : 0);
    __syncwarp();  // bytes were stored into words to which bits are added now
    if (has_signs) {
      write_signs(memory.stages[0], signs, masks, negatives, ranks, lane);
    }
    uint32_t low[2];
    Coded coded;
    Crowd crowd = crowd_of(all);
    if constexpr (Parts::kSplit.exponent_bits == canonical::kOutlierBits) {
      if (is_spread(crowd)) {
        find_window(e, lane, crowd);
      }
    }
    coded.center = center_of(crowd, canonical::kLq2Eighths);
    const bool is_near = Near{all.max, all.min}.holds(coded.center);
    const EncodeStreams streams = streams_of(memory, 0, tables, lane);
    behind = encode_lq2<true>(streams, e, is_near, coded.center, valid, begin, ~0u, low).end;
    coded.mode = has_signs ? frame::kSignedZeros : frame::kZeros;
    coded.units = (behind + bytes_later + 7) / 8;
    coded.masks = masks;
    coded.packed = bitmap.is_packed;
    if (coded.units >= kLiteralBytes / frame::kUnitBytes) {
      return literal<kWidth, kSlabBytes>();
    }
    if (lane == 0) {
      summary.hint = coded.center;
    }
#pragma unroll
    for (uint32_t row = 0; row < kRows; ++row) {
#pragma unroll
      for (uint32_t h = 0; h < 2; ++h) {
        const uint32_t at = codes + row * 64 + lane * 2 + h;
        if (at < signs) {
          stage[at] = static_cast<uint8_t>(pack_pairs(pairs_of_row(low[h], row)));
        }
      }
    }
    return coded;
  }

  __device__ static __forceinline__ void write(const EncodeJob& job, uint32_t block,
                                               const Coded& coded, const Memory& memory,
                                               uint8_t* to, uint32_t lane) {
    if constexpr (!kPlanesLater) {
      write_staged(coded.units, memory.stages[0], to, lane);
      return;
    }
    const Ranks ranks = rank_rows(count_rows(coded.masks), lane);
    const uint8_t* staged = reinterpret_cast<const uint8_t*>(memory.stages[0]);
    const uint32_t bitmap = coded.packed ? packed_bytes(coded.masks) : frame::kBitmapBytes;
    const uint32_t planes = Parts::kLowPlanes * ranks.total;
    for (uint32_t i = lane; i < bitmap; i += kLanes) {
      to[i] = staged[i];
    }
    for (uint32_t i = bitmap + lane; i < coded.units * frame::kUnitBytes - planes; i += kLanes) {
      to[planes + i] = staged[i];  // behind the streams the stage is clear
    }
    const Source<kWidth> source(job.input, job.elements, block);
    scatter<false, true>(source, coded.masks, ranks, to + bitmap, nullptr, lane);
  }

 private:
  // Top bytes one after another to `tops`, low bytes to their planes.
  template <bool kTops, bool kLow>
  __device__ static __forceinline__ void scatter(const Source<kWidth>& source, uint32_t masks,
                                                 const Ranks& ranks, uint8_t* planes, uint8_t* tops,
                                                 uint32_t lane) {
#pragma unroll 1
    for (uint32_t row = 0; row < kRows; ++row) {
      uint32_t words[Parts::kWords], low[Parts::kLowWords], top[2];
      load_row(source, row, lane, words);
      Parts::split(words, low, top);
      uint32_t rank = ranks.first(row);
#pragma unroll
      for (uint32_t i = 0; i < kLaneColumns; ++i) {
        if (masks >> (8 * row + i) & 1) {
          const uint32_t shift = 8 * (i % 4);
          if constexpr (kTops) {
            tops[rank] = static_cast<uint8_t>(top[i / 4] >> shift);
          }
#pragma unroll
          for (int p = 0; kLow && p < Parts::kLowPlanes; ++p) {
            planes[p * ranks.total + rank] = static_cast<uint8_t>(low[2 * p + i / 4] >> shift);
          }
          ++rank;
        }
      }
    }
  }

  // The streams of the R planes that are no byte planes. Returns the byte behind them.
  __device__ static __forceinline__ uint32_t write_rest(uint8_t* stage, const uint32_t (&rest)[8],
                                                        uint32_t survivors, uint32_t begin,
                                                        uint32_t lane) {
    const uint32_t two = begin + (Parts::kRestBits & 4 ? (4 * survivors + 7) / 8 : 0);
    const uint32_t one = two + (Parts::kRestBits & 2 ? (2 * survivors + 7) / 8 : 0);
    const uint32_t end = one + (Parts::kRestBits & 1 ? (survivors + 7) / 8 : 0);
#pragma unroll
    for (uint32_t row = 0; row < kRows; ++row) {
#pragma unroll
      for (uint32_t h = 0; h < 2; ++h) {
        const uint32_t word = rest[2 * row + h];
        if constexpr ((Parts::kRestBits & 4) != 0) {
          const uint32_t nibbles = (word | word >> 4) & 0x00ff00ffu;
          const uint32_t at = begin + row * 128 + lane * 4 + 2 * h;
          if (at < two) {
            stage[at] = static_cast<uint8_t>(nibbles);
          }
          if (at + 1 < two) {
            stage[at + 1] = static_cast<uint8_t>(nibbles >> 16);
          }
        }
        if constexpr ((Parts::kRestBits & 2) != 0) {
          const uint32_t at = two + row * 64 + lane * 2 + h;
          if (at < one) {
            stage[at] = static_cast<uint8_t>(pack_pairs(word & 0x03030303u));
          }
        }
      }
      if constexpr ((Parts::kRestBits & 1) != 0) {
        constexpr uint32_t kShift = Parts::kRestBits & 6;
        const uint32_t at = one + row * 32 + lane;
        if (at < end) {
          stage[at] =
              static_cast<uint8_t>(gather_flags(rest[2 * row] >> kShift & 0x01010101u) |
                                   gather_flags(rest[2 * row + 1] >> kShift & 0x01010101u) << 4);
        }
      }
    }
    return end;
  }

  // One bit for every zero; only those of -0 are set.
  __device__ static __forceinline__ void write_signs(uint32_t* stage, uint32_t begin,
                                                     uint32_t masks, uint32_t negatives,
                                                     const Ranks& ranks, uint32_t lane) {
#pragma unroll
    for (uint32_t row = 0; row < kRows; ++row) {
      const uint32_t survivors = masks >> (8 * row) & 0xffu;
      uint32_t left = negatives >> (8 * row) & 0xffu;
#pragma unroll 1
      while (left != 0) {
        const uint32_t i = __ffs(left) - 1;
        left &= left - 1;
        const uint32_t before = ranks.first(row) + __popc(survivors & ((1u << i) - 1));
        const uint32_t bit = 8 * begin + row * kRowElements + lane * kLaneColumns + i - before;
        atomicOr(&stage[bit / 32], 1u << (bit % 32));
      }
    }
  }
};

EncodeKernel* sparse_encode_kernel(frame::Dtype dtype) {
  using frame::Dtype;
  switch (dtype) {
    case Dtype::kBf16:
      return encode_kernel<SparseCoder<Dtype::kBf16>>();
    case Dtype::kFp16:
      return encode_kernel<SparseCoder<Dtype::kFp16>>();
    case Dtype::kFp32:
      return encode_kernel<SparseCoder<Dtype::kFp32>>();
    case Dtype::kFp64:
      return encode_kernel<SparseCoder<Dtype::kFp64>>();
    case Dtype::kE4m3:
      return encode_kernel<SparseCoder<Dtype::kE4m3>>();
    case Dtype::kE5m2:
      return encode_kernel<SparseCoder<Dtype::kE5m2>>();
    default:
      return nullptr;
  }
}

}  // namespace memswap::cuda
