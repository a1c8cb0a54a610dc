// Encoders of layouts bits, ints and raw.
#include "encode.cuh"

namespace memswap::cuda {

// Where the slab is the whole block, or the payload is made when its place is known.
struct NoMemory {};

// A bitmap, which may be longer while it is packed.
struct alignas(16) BitmapMemory {
  uint32_t stage[(frame::kBitmapBytes + frame::kUnitBytes) / 4];
  __device__ __forceinline__ uint8_t* bytes() { return reinterpret_cast<uint8_t*>(stage); }
};

template <uint32_t kElementBytes>
struct RawCoder {
  static constexpr uint32_t kWidth = kElementBytes;
  static constexpr uint32_t kSlabBytes = frame::kBlockElements * kWidth;
  static constexpr bool kHasPayload = false;
  static constexpr uint32_t kTiles = kTilesAtOnce;
  static constexpr bool kLoadsEarly = true;
  static constexpr bool kFetchesNext = true;
  static constexpr uint32_t kStages = 1;
  using Memory = NoMemory;

  __device__ static __forceinline__ Coded encode(const EncodeJob& job, const Source<kWidth>& source,
                                                 FirstRows<kWidth>& rows, uint8_t* slab, Memory&,
                                                 uint32_t, const SymbolTables&, uint32_t warp,
                                                 uint32_t lane, BlockSummary& summary) {
    for_rows<kLoadsEarly>(job, source, rows, warp, lane, summary, [&](uint32_t row, auto& words) {
      uint8_t* to = slab + (row * kRowElements + lane * kLaneColumns) * kWidth;
#pragma unroll
      for (uint32_t i = 0; i < kRowWords<kWidth>; i += 2) {
        store_pair(to + 4 * i, words[i], words[i + 1]);
      }
    });
    Coded coded{};
    coded.mode = frame::kLiteral;
    return coded;
  }
};

struct BitsCoder {
  static constexpr uint32_t kWidth = 1;
  static constexpr uint32_t kSlabBytes = 0;
  static constexpr bool kHasPayload = true;
  static constexpr bool kMayBeLiteral = true;
  static constexpr uint32_t kTiles = kTilesAtOnce;
  static constexpr bool kLoadsEarly = true;
  static constexpr bool kFetchesNext = true;
  static constexpr uint32_t kStages = 1;
  using Memory = BitmapMemory;

  __device__ static __forceinline__ Coded encode(const EncodeJob& job, const Source<kWidth>& source,
                                                 FirstRows<kWidth>& rows, uint8_t*, Memory& memory,
                                                 uint32_t, const SymbolTables&, uint32_t warp,
                                                 uint32_t lane, BlockSummary& summary) {
    uint64_t sum = 0;
    uint32_t bitmap = 0, others = 0;
    load_late<kLoadsEarly>(source, 0, lane, rows);
    if (job.checked) {
      sum += checksum_rows<kWidth>(rows, warp, 0, lane);
    }
    keep_checksum(job, sum, lane, summary);
#pragma unroll
    for (uint32_t row = 0; row < kRows; ++row) {
      const auto& words = rows[row];
      others |= (words[0] | words[1]) & 0xfefefefeu;
      bitmap |= (gather_bits(words[0]) | gather_bits(words[1]) << 4) << (8 * row);
    }
    if (__any_sync(kAllLanes, others != 0)) {
      return literal<kWidth, kSlabBytes>();
    }
    const WrittenBitmap written = write_bitmap(memory.bytes(), bitmap, lane);
    Coded coded{};
    coded.mode = frame::kBitmap;
    coded.units = (written.bytes + 7) / frame::kUnitBytes;
    coded.packed = written.is_packed;
    if (lane < coded.units * frame::kUnitBytes - written.bytes) {
      memory.bytes()[written.bytes + lane] = 0;
    }
    return coded;
  }

  __device__ static __forceinline__ void write(const EncodeJob&, uint32_t, const Coded& coded,
                                               const Memory& memory, uint8_t* to, uint32_t lane) {
    write_staged(coded.units, memory.stage, to, lane);
  }
};

template <uint32_t kElementBytes>
struct IntsCoder {
  static constexpr uint32_t kWidth = kElementBytes;
  static constexpr uint32_t kSlabBytes = 0;
  static constexpr bool kHasPayload = true;
  static constexpr bool kMayBeLiteral = true;
  static constexpr uint32_t kTiles = kTilesAtOnce;
  static constexpr bool kLoadsEarly = false;   // a row at a time, and each twice
  static constexpr bool kFetchesNext = false;  // an H100 encoded int64 by 6 to 14 % slower
  static constexpr uint32_t kStages = 1;
  using Memory = NoMemory;
  using Word = typename WordOf<kWidth>::type;

  __device__ static __forceinline__ Coded encode(const EncodeJob& job, const Source<kWidth>& source,
                                                 FirstRows<kWidth>&, uint8_t*, Memory&, uint32_t,
                                                 const SymbolTables&, uint32_t warp, uint32_t lane,
                                                 BlockSummary& summary) {
    uint64_t sum = 0;
    // Signed integers are compared with their sign bit turned over.
    const Word bias = frame::is_signed(static_cast<frame::Dtype>(job.dtype))
                          ? static_cast<Word>(Word{1} << (8 * kWidth - 1))
                          : Word{0};
    Word low = static_cast<Word>(~Word{0}), high = 0;
#pragma unroll 1
    for (uint32_t row = 0; row < kRows; ++row) {
      uint32_t words[kRowWords<kWidth>];
      load_row(source, row, lane, words);
      if (job.checked) {
        sum += checksum_row<kWidth>(words, warp, row, lane);
      }
#pragma unroll
      for (uint32_t i = 0; i < kLaneColumns; ++i) {
        if (row * kRowElements + lane * kLaneColumns + i < source.count) {
          const Word value = element_of(words, i) ^ bias;
          low = value < low ? value : low;
          high = value > high ? value : high;
        }
      }
    }
    keep_checksum(job, sum, lane, summary);
    reduce(low, high);
    const Word minimum = low ^ bias;
    const uint64_t range = static_cast<Word>(high - low);
    const uint32_t bits = 64 - __clzll(static_cast<long long>(range));
    if (bits == 8 * kWidth) {
      return literal<kWidth, kSlabBytes>();
    }
    Coded coded{};
    coded.mode = frame::kReference;
    coded.units = 1 + 16 * bits;
    coded.center = bits;
    coded.minimum = minimum;
    return coded;
  }

  __device__ static __forceinline__ void write(const EncodeJob& job, uint32_t block,
                                               const Coded& coded, const Memory&, uint8_t* to,
                                               uint32_t lane) {
    const Source<kWidth> source(job.input, job.elements, block);
    const Word minimum = static_cast<Word>(coded.minimum);
    const uint32_t bits = coded.center;
    if (lane == 0) {
      *reinterpret_cast<uint64_t*>(to) = minimum;
    }
    uint8_t* planes = to + frame::kUnitBytes;
    uint32_t top[8];
#pragma unroll
    for (uint32_t row = 0; row < kRows; ++row) {
      uint32_t words[kRowWords<kWidth>];
      Word distance[kLaneColumns];
      load_row(source, row, lane, words);
#pragma unroll
      for (uint32_t i = 0; i < kLaneColumns; ++i) {
        const bool there = row * kRowElements + lane * kLaneColumns + i < source.count;
        distance[i] = there ? static_cast<Word>(element_of(words, i) - minimum) : Word{0};
      }
      top[2 * row] = top[2 * row + 1] = 0;
#pragma unroll
      for (uint32_t plane = 0; plane < kWidth; ++plane) {
        if (plane > bits / 8) {
          break;
        }
        uint32_t bytes[2] = {0, 0};
#pragma unroll
        for (uint32_t i = 0; i < kLaneColumns; ++i) {
          bytes[i / 4] |= static_cast<uint32_t>(distance[i] >> (8 * plane) & 0xffu)
                          << (8 * (i % 4));
        }
        if (plane < bits / 8) {
          store_bytes(planes + plane * frame::kBlockElements, row, lane, bytes[0], bytes[1]);
        } else {
          top[2 * row] = bytes[0];
          top[2 * row + 1] = bytes[1];
        }
      }
    }
    store_planes(planes + bits / 8 * frame::kBlockElements, top, bits % 8, lane);
  }

 private:
  __device__ static __forceinline__ Word element_of(const uint32_t (&words)[kRowWords<kWidth>],
                                                    uint32_t i) {
    if constexpr (kWidth == 8) {
      return words[2 * i] | uint64_t{words[2 * i + 1]} << 32;
    } else {
      return static_cast<Word>(words[i * kWidth / 4] >> (8 * (i * kWidth % 4)));
    }
  }

  __device__ static __forceinline__ void reduce(Word& low, Word& high) {
    if constexpr (kWidth == 8) {
#pragma unroll
      for (uint32_t distance = 1; distance < kLanes; distance *= 2) {
        const uint64_t other_low = __shfl_xor_sync(kAllLanes, low, distance);
        const uint64_t other_high = __shfl_xor_sync(kAllLanes, high, distance);
        low = other_low < low ? other_low : low;
        high = other_high > high ? other_high : high;
      }
    } else {
      low = static_cast<Word>(__reduce_min_sync(kAllLanes, uint32_t{low}));
      high = static_cast<Word>(__reduce_max_sync(kAllLanes, uint32_t{high}));
    }
  }
};

template <template <uint32_t> class Coder>
EncodeKernel* of_width(uint32_t width) {
  switch (width) {
    case 1:
      return encode_kernel<Coder<1>>();
    case 2:
      return encode_kernel<Coder<2>>();
    case 4:
      return encode_kernel<Coder<4>>();
    default:
      return encode_kernel<Coder<8>>();
  }
}

EncodeKernel* other_encode_kernel(frame::Dtype dtype, frame::Layout layout) {
  if (layout == frame::Layout::kBits) {
    return encode_kernel<BitsCoder>();
  }
  const uint32_t width = frame::width_of(dtype);
  return layout == frame::Layout::kInts ? of_width<IntsCoder>(width) : of_width<RawCoder>(width);
}

}  // namespace memswap::cuda
