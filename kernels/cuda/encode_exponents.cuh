// Exponents to streams: the modes LQ2, LQ3 and FW, and the choice among them (docs/format.md
// sections 3 and 5).
#pragma once

#include "memswap/canonical.h"
#include "planes.cuh"

namespace memswap::cuda {

// What the streams of a dense block can take: LQ2 is written before anyone knows that another mode
// is shorter, so the stage holds its two packed streams at their longest, 256 + 512 bytes.
inline constexpr uint32_t kDenseStageBytes = 800;
inline constexpr uint32_t kTooLong = 0x7fff;  // bytes: longer than any payload that can win

// A warp's share of the shared memory.
template <uint32_t kBytes, uint32_t kStages>
struct alignas(16) EncodeMemory {
  static constexpr uint32_t kStageBytes = kBytes;
  uint32_t symbols[frame::kBlockElements / 4];  // v of every element, [Note: lanes' bytes]
  uint32_t stages[kStages][kBytes / 4];         // payloads, until their tiles have positions
  uint16_t positions[kPositions];               // of elements that need a nibble
  static_assert(kBytes % 16 == 0);
};

// What a symbol or a mask becomes, for all warps.
struct SymbolTables {
  Move compact[16];      // by mask
  uint8_t nibbles[256];  // nibbles_of, by v xor 0x80
};

// A warp's share without its size.
struct EncodeStreams {
  uint32_t* symbols;
  uint32_t* stage;
  uint16_t* positions;
  const SymbolTables* tables;
  uint32_t capacity;  // of the stage, bytes
  uint32_t lane;

  __device__ __forceinline__ uint8_t* bytes() const { return reinterpret_cast<uint8_t*>(stage); }
};

template <uint32_t kBytes>
__device__ __forceinline__ void clear_stage(uint32_t* stage, uint32_t lane) {
#pragma unroll
  for (uint32_t i = 0; i < kBytes / 16; i += kLanes) {
    if (i + lane < kBytes / 16) {
      reinterpret_cast<uint4*>(stage)[i + lane] = make_uint4(0, 0, 0, 0);
    }
  }
}

// The second kind of escape: a nibble, and a byte where that is 15. That of v; of E = 0, which is
// 14 where this is 15, the centre decides.
__device__ inline uint32_t nibble_of(frame::NibbleCode code, uint32_t v) {
  return v - code.first < 12  ? v - code.first
         : v == code.twelve   ? 12
         : v == code.thirteen ? 13
                              : 15;
}
// In a byte, that of LQ2 and above it that of LQ3.
__device__ inline uint8_t nibbles_of(uint32_t v) {
  return static_cast<uint8_t>(nibble_of(frame::kLq2Nibbles, v) | nibble_of(frame::kLq3Nibbles, v)
                                                                     << 4);
}

// Writes the nibbles of the marked elements from byte `begin` of the stage on, and the bytes E
// behind them. `symbols` has v xor kBias. Returns the byte behind the streams, whether or not they
// fitted.
template <bool kLq3>
__device__ __forceinline__ uint32_t write_nibbles(const EncodeStreams& to, uint32_t masks,
                                                  const Ranks& ranks, uint32_t center,
                                                  uint32_t begin) {
  const uint8_t* symbols = reinterpret_cast<const uint8_t*>(to.symbols);
  uint32_t raw = begin + (ranks.total + 1) / 2;
  write_few_positions(to.positions, masks, ranks, to.lane);
#pragma unroll 1
  for (uint32_t done = 0; done < ranks.total; done += kPositions) {
    write_many_positions(to.positions, masks, ranks, done, to.lane);
    __syncwarp();
    const uint32_t here = min(ranks.total - done, kPositions);
#pragma unroll 1
    for (uint32_t i = 0; i < here; i += 2 * kLanes) {
      const uint32_t mine = i + 2 * to.lane;
      uint32_t nibbles = 0, symbol0 = 0, symbol1 = 0;
      if (mine < here) {
        const uint32_t two = *reinterpret_cast<const uint32_t*>(to.positions + mine);
        const bool has_next = mine + 1 < here;
        symbol0 = symbols[two & 0xffffu];
        symbol1 = symbols[has_next ? two >> 16 : two & 0xffffu];
        const uint32_t first = to.tables->nibbles[symbol0], second = to.tables->nibbles[symbol1];
        nibbles = kLq3 ? select_bits(0xfu, first >> 4, second)
                       : select_bits(0xfu, first, second << 4) & 0xffu;
        nibbles &= has_next ? 0xffu : 0xfu;
      }
      bool raw0 = (nibbles & 0xfu) == 15, raw1 = nibbles >= 0xf0;
      if (__any_sync(kAllLanes, raw0 || raw1)) {
        const uint32_t zero = (center & 0xffu) ^ 0x80u;  // the symbol of E = 0
        if (raw0 && symbol0 == zero) {
          nibbles -= 0x01;
          raw0 = false;
        }
        if (raw1 && symbol1 == zero) {
          nibbles -= 0x10;
          raw1 = false;
        }
        const uint32_t raws0 = __ballot_sync(kAllLanes, raw0);
        const uint32_t raws1 = __ballot_sync(kAllLanes, raw1);
        const uint32_t lower_lanes = (1u << to.lane) - 1;
        uint32_t place = raw + __popc(raws0 & lower_lanes) + __popc(raws1 & lower_lanes);
        if (raw0 && place < to.capacity) {
          to.bytes()[place] = static_cast<uint8_t>(center - (symbol0 ^ 0x80u));
        }
        place += raw0;
        if (raw1 && place < to.capacity) {
          to.bytes()[place] = static_cast<uint8_t>(center - (symbol1 ^ 0x80u));
        }
        raw += __popc(raws0) + __popc(raws1);
      }
      if (mine < here) {
        to.bytes()[begin + (done + mine) / 2] = static_cast<uint8_t>(nibbles);
      }
    }
    __syncwarp();
  }
  return raw;
}

// [Note: near exponents] v is the centre less E, bytewise modulo 256. Where no byte of 128 + v
// leaves 6 .. 252, whole words are subtracted, without regard to borrows, and comparisons are
// subtractions too: the top bit of a byte of t - n says whether v >= n, that of t whether v >= 0.
// Elsewhere v that is no symbol of S1 takes the place of another such one.
struct Near {
  uint32_t max, min;  // of all E

  __device__ __forceinline__ bool holds(uint32_t center) const {
    return max <= center + 122 && center <= min + 124;
  }
};

inline constexpr uint32_t kBias = 0x80808080;

// The streams of LQ2.
struct Streams {
  uint32_t end;      // the byte behind; kTooLong: FW with all bits is shorter, they are incomplete
  bool has_nibbles;  // some v is none of 0 to 5
};

// LQ2: L0 as a plane in `low`, where kSome is false also to `plane`, the streams from byte `begin`
// of the stage on, which is clear there. `is_near`: whether Near::holds the centre. Only elements
// marked in `valid` (byte q: row q) are coded if kSome. Leaves v xor kBias in `symbols`.
template <bool kSome>
__device__ __forceinline__ Streams encode_lq2(const EncodeStreams& to, const uint32_t (&e)[8],
                                              bool is_near, uint32_t center, uint32_t valid,
                                              uint32_t begin, uint32_t longest, uint32_t (&low)[2],
                                              [[maybe_unused]] uint8_t* plane = nullptr) {
  const uint32_t centers = bytes_of(center & 0xffu);
  uint32_t t[8], rows[kRows];  // rows: 128 * mask of who has a code
  if (is_near) {
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) {
      t[i] = centers + kBias - e[i];
    }
    store_lane(to.symbols, to.lane, t);
  } else {
    uint32_t biased[8];
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) {
      const uint32_t v = subtract_bytes(centers, e[i]);
      const uint32_t far = (v | v >> 1) & 0x40404040u;
      t[i] = (v & 0x3f3f3f3fu & ~(far >> 4)) | far | kBias;
      biased[i] = v ^ kBias;
    }
    store_lane(to.symbols, to.lane, biased);
  }
  low[0] = low[1] = 0;
#pragma unroll
  for (uint32_t row = 0; row < kRows; ++row) {
    uint32_t coded[2];
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) {
      const uint32_t i = 2 * row + h;
      coded[h] = (t[i] - bytes_of(1)) & ~(t[i] - bytes_of(4)) & kBias;
      if constexpr (kSome) {
        coded[h] &= spread_bits(valid >> (4 * i)) * 0x80;
      }
      low[h] =
          multiply_add(t[i] & 0x03030303u & spread_top_bits(coded[h]), 1u << (2 * row), low[h]);
    }
    rows[row] = gather_row(coded[0], coded[1]);
  }
  if constexpr (!kSome) {
    store_pair(plane + to.lane * 8, low[0], low[1]);
  }
  // Byte q: who has a symbol in S1.
  uint32_t first = ~join_rows(rows);
  if constexpr (kSome) {
    first &= valid;
  }
  const Ranks ranks = rank_rows(count_rows(first), to.lane);
  const uint32_t masks[2] = {first & 0x0f0f0f0fu, first >> 4 & 0x0f0f0f0fu};
  uint32_t sixes[kRows];  // 128 * mask of who is beyond the symbols of S1
#pragma unroll
  for (uint32_t row = 0; row < kRows; ++row) {
    uint32_t packed[2], behind[2], six[2];
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) {
      const uint32_t i = 2 * row + h;
      // 0, 4, 5 become 0, 1, 2 and everything else 3, each four times; 1 to 3 have codes.
      six[h] = ((t[i] - bytes_of(6)) | ~t[i]) & kBias;
      const uint32_t symbols = ((t[i] + 0x03030303u) | spread_top_bits(six[h])) & 0x0c0c0c0cu;
      const Move move = move_of(to.tables->compact, masks[h], row);
      behind[h] = move.behind;
      packed[h] = gather_bytes(permute(symbols, 0, move.selector), 0x40100401u);
    }
    sixes[row] = gather_row(six[0], six[1]);
    const uint32_t word = (packed[0] + packed[1] * behind[0]) >> 2;
    const uint32_t bit = 8 * begin + 2 * ranks.first(row);
    // Also where no bit is set, which is rare and takes less than a branch of the others does.
    atomicOr(&to.stage[bit / 32], word << (bit % 32));
    const uint32_t over = __funnelshift_l(word, 0, bit % 32);
    if (over != 0) {
      atomicOr(&to.stage[bit / 32 + 1], over);
    }
  }
  const uint32_t second = join_rows(sixes) & first;
  const uint32_t end = begin + (2 * ranks.total + 7) / 8;
  const Ranks again = rank_rows(count_rows(second), to.lane);
  __syncwarp();  // the last byte of S1 and the first of S2 share a word
  if (again.total == 0) {
    return {end, false};
  }
  if (end + (again.total + 1) / 2 >= longest) {
    return {kTooLong, true};
  }
  return {write_nibbles<false>(to, second, again, center, end), true};
}

// Bytes that LQ3 needs for its streams and its plane.
__device__ __forceinline__ uint32_t lq3_bytes(const uint32_t (&e)[8], uint32_t center) {
  const uint32_t centers = bytes_of(center & 0xffu);
  uint32_t escapes = 0, raws = 0;
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) {
    const uint32_t v = subtract_bytes(centers, e[i]);
    const uint32_t far = at_least<8>(v);
    escapes += __popc(far) + __popc(~not_zero(v) & 0x80808080u);
    raws += __popc(at_least<20>(v) & not_zero(~v) & not_zero(e[i]));
  }
  const uint32_t both = __reduce_add_sync(kAllLanes, escapes | raws << 16);
  return 128 + ((both & 0xffffu) + 1) / 2 + (both >> 16);
}

// LQ3 into a clear stage.
__device__ __forceinline__ uint32_t encode_lq3(const EncodeStreams& to, const uint32_t (&e)[8],
                                               uint32_t center, uint32_t (&low)[2]) {
  const uint32_t centers = bytes_of(center & 0xffu);
  uint32_t masks = 0, biased[8];
  low[0] = low[1] = 0;
#pragma unroll
  for (uint32_t row = 0; row < kRows; ++row) {
    uint32_t high = 0;
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) {
      const uint32_t v = subtract_bytes(centers, e[2 * row + h]);
      biased[2 * row + h] = v ^ kBias;
      const uint32_t code = v & 0x07070707u & ~((at_least<8>(v) >> 7) * 7);
      low[h] |= (code & 0x03030303u) << (2 * row);
      high |= gather_flags(code >> 2 & 0x01010101u) << (4 * h);
      masks |= gather_flags(~not_zero(code) >> 7 & 0x01010101u) << (8 * row + 4 * h);
    }
    to.bytes()[row * kLanes + to.lane] = static_cast<uint8_t>(high);
  }
  store_lane(to.symbols, to.lane, biased);
  const Ranks ranks = rank_rows(count_rows(masks), to.lane);
  return write_nibbles<true>(to, masks, ranks, center, frame::kBitmapBytes);
}

// FW of `bits` bits: whole planes, so the stage need not be clear.
__device__ __forceinline__ void encode_fw(const EncodeStreams& to, const uint32_t (&e)[8],
                                          uint32_t center, uint32_t bits, uint32_t (&low)[2]) {
  const uint32_t centers = bytes_of(center & 0xffu);
  uint32_t high[8];
  low[0] = low[1] = 0;
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) {
    const uint32_t v = subtract_bytes(centers, e[i]);
    low[i % 2] |= (v & 0x03030303u) << (2 * (i / 2));
    high[i] = v >> 2 & 0x3f3f3f3fu;
  }
  store_planes(to.bytes(), high, bits - 2, to.lane);
}

// Statistics of a block's exponents, over all of its 1024 elements.
struct Exponents {
  uint32_t max, min;
  uint32_t zeros;
  uint32_t distances;  // sum over E != 0 of min(max - E, 31)
};

__device__ __forceinline__ uint32_t count_zeros(const uint32_t (&e)[8]) {
  uint32_t zeros = 0;
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) {
    zeros += __popc(~not_zero(e[i]) & 0x80808080u);
  }
  return __reduce_add_sync(kAllLanes, zeros);
}

// Before sm_90 there is no instruction for the larger or smaller halves of two words as integers,
// but there is for float16: numbers below 256 are its subnormals, in the same order.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define MEMSWAP_CUDA_HALVES_AS_FLOATS
__device__ __forceinline__ uint32_t max_bytes2(uint32_t a, uint32_t b) {
  uint32_t larger;
  asm("max.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
}
__device__ __forceinline__ uint32_t min_bytes2(uint32_t a, uint32_t b) {
  uint32_t smaller;
  asm("min.f16x2 %0, %1, %2;" : "=r"(smaller) : "r"(a), "r"(b));
  return smaller;
}
#endif

// The largest and the smallest E of all lanes.
__device__ __forceinline__ Near find_extremes(const uint32_t (&e)[8]) {
#if defined(MEMSWAP_CUDA_HALVES_AS_FLOATS)
  uint32_t largest = 0, smallest = 0x00ff00ffu;
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) {
    const uint32_t even = e[i] & 0x00ff00ffu, odd = permute(e[i], 0, 0x4341);
    largest = max_bytes2(max_bytes2(largest, even), odd);
    smallest = min_bytes2(min_bytes2(smallest, even), odd);
  }
  return {__reduce_max_sync(kAllLanes, max(largest >> 16, largest & 0xffu)),
          __reduce_min_sync(kAllLanes, min(smallest >> 16, smallest & 0xffu))};
#else
  // Two bytes of a word at a time: the upper byte of a half decides, whatever is in the lower.
  uint32_t max_odd = e[0], min_odd = e[0], max_even = e[0] << 8, min_even = e[0] << 8;
#pragma unroll
  for (uint32_t i = 1; i < 8; ++i) {
    max_odd = __vmaxu2(max_odd, e[i]);
    min_odd = __vminu2(min_odd, e[i]);
    max_even = __vmaxu2(max_even, e[i] << 8);
    min_even = __vminu2(min_even, e[i] << 8);
  }
  const uint32_t max_pair = __vmaxu2(max_odd, max_even), min_pair = __vminu2(min_odd, min_even);
  return {__reduce_max_sync(kAllLanes, max(max_pair >> 24, max_pair >> 8 & 0xffu)),
          __reduce_min_sync(kAllLanes, min(min_pair >> 24, min_pair >> 8 & 0xffu))};
#endif
}

__device__ __forceinline__ uint32_t sum_of(const uint32_t (&e)[8]) {
  uint32_t sum = 0;
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) {
    sum = __dp4a(e[i], 0x01010101u, sum);
  }
  return __reduce_add_sync(kAllLanes, sum);
}

__device__ __forceinline__ Exponents measure(const uint32_t (&e)[8]) {
  const Near extremes = find_extremes(e);
  Exponents all;
  all.max = extremes.max;
  all.min = extremes.min;
  all.zeros = 0;
  if (all.min > 0 && all.max - all.min < 32) {  // no distance is clipped, no E is 0
    all.distances = frame::kBlockElements * all.max - sum_of(e);
    return all;
  }
  uint32_t sum = 0;
  const uint32_t maxima = bytes_of(all.max);
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) {
    const uint32_t distance = maxima - e[i];  // no byte borrows: the maximum is the largest
    const uint32_t far = spread_top_bits(((distance & 0x7f7f7f7fu) + bytes_of(96)) | distance);
    sum = __dp4a((distance | far) & 0x1f1f1f1fu, 0x01010101u, sum);
  }
  all.distances = __reduce_add_sync(kAllLanes, sum);
  if (all.min == 0) {
    all.zeros = count_zeros(e);
    all.distances -= all.zeros * min(all.max, 31u);
  }
  return all;
}

// a / b for a < 2^24, 0 < b < 2^24: the reciprocal is off by a little, the correction is exact.
__device__ __forceinline__ uint32_t divide(uint32_t a, uint32_t b) {
  uint32_t quotient =
      static_cast<uint32_t>(__fdividef(static_cast<float>(a), static_cast<float>(b)));
  quotient -= quotient * b > a;
  quotient += (quotient + 1) * b <= a;
  return quotient;
}

// What the bytes of a word are clipped and sampled by stands in their shifts and masks.
static_assert(canonical::kClip == 31 && canonical::kSamples == 32 && canonical::kSampleStep == 33);

// The exponents that centres are chosen by: all that are not 0, or those where most are.
struct Crowd {
  uint32_t max;
  uint32_t distances;  // sum of max - E, of those of all clipped at 31
  uint32_t elements;   // at least 1
};

__device__ __forceinline__ Crowd crowd_of(const Exponents& all) {
  return {all.max, all.distances, max(frame::kBlockElements - all.zeros, 1u)};
}

// The centre of section 5 that lies `eighths` / 8 below the mean distance.
__device__ __forceinline__ uint32_t center_of(const Crowd& crowd, uint32_t eighths) {
  const uint32_t sum = 8 * crowd.distances, less = eighths * crowd.elements;
  const uint32_t below = sum > less ? divide(sum - less, 8 * crowd.elements) : 0;
  return (crowd.max + 1 - below) & 0xffu;
}

// Whether most distances may have been clipped.
__device__ __forceinline__ bool is_spread(const Crowd& crowd) {
  return crowd.distances >= canonical::kFar * crowd.elements;
}

// Outliers (section 5): where distances are long, 32 samples say in which window of 32 exponents
// most elements are. False, and the crowd as it was, where they do not agree.
__device__ __forceinline__ bool find_window(const uint32_t (&e)[8], uint32_t lane, Crowd& crowd) {
  // Element 33 i of the block is a lane's own for every i: of its row lane % 4, the word lane / 16.
  uint32_t words[kRows];
#pragma unroll
  for (uint32_t row = 0; row < kRows; ++row) {
    words[row] = (lane & 16) != 0 ? e[2 * row + 1] : e[2 * row];
  }
  const uint32_t even_row = (lane & 2) != 0 ? words[2] : words[0];
  const uint32_t odd_row = (lane & 2) != 0 ? words[3] : words[1];
  const uint32_t word = (lane & 1) != 0 ? odd_row : even_row;
  const uint32_t sample = word >> (8 * (lane / 4 % 4)) & 0xffu;
  const auto count = [](bool is_one) -> uint32_t {
    return __popc(__ballot_sync(kAllLanes, is_one));
  };
  const uint32_t samples = count(sample != 0);
  uint32_t middle = 0;  // the upper median, in steps of 8
#pragma unroll 1
  for (uint32_t bit = 128; bit >= canonical::kMedianStep; bit /= 2) {
    if (2 * count(sample >= middle + bit) >= samples) {
      middle += bit;
    }
  }
  const uint32_t low = min(max(middle, canonical::kBelowMedian + 1) - canonical::kBelowMedian,
                           canonical::kHighestWindow);
  if (2 * count(sample - low < canonical::kWindow) <= samples) {
    return false;
  }
  const uint32_t lows = bytes_of(low);
  uint32_t number = 0, sum = 0, even = 0, odd = 0;
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) {
    const uint32_t above = subtract_bytes(e[i], lows);
    const uint32_t outside = at_least<canonical::kWindow>(above);
    const uint32_t inside = above & ~spread_top_bits(outside);
    number += 4 - __popc(outside);
    sum = __dp4a(inside, 0x01010101u, sum);
    even = __vmaxu2(even, inside & 0x00ff00ffu);
    odd = __vmaxu2(odd, inside >> 8 & 0x00ff00ffu);
  }
  const uint32_t pair = __vmaxu2(even, odd);
  const uint32_t highest = __reduce_max_sync(kAllLanes, max(pair >> 16, pair & 0xffffu));
  const uint32_t both = __reduce_add_sync(kAllLanes, number | sum << 16);
  crowd.max = low + highest;
  crowd.elements = both & 0xffffu;
  crowd.distances = crowd.elements * highest - (both >> 16);
  return true;
}

// Of a block, for the warp that gathers what its tile says of it: in shared memory, written by the
// block's lane 0 as soon as it is known, so that it takes no registers of what follows.
struct BlockSummary {
  uint32_t coded;     // Record::pack
  uint32_t hint;      // adds to center_sum
  uint32_t zeros;     // adds to zeros
  uint64_t checksum;  // adds to the tile's
};

// [Note: usual blocks] The largest and the smallest E of a block take more instructions than the
// sum of all E, and most blocks are coded without them. In the words of docs/format.md's section 5:
// where all E are in a window of 32 that has no 0, k is 1024, no distance is clipped, and
// 8 s - 7 k = 8192 m - 8 (sum + 896). So c2 = 1 + ceil((sum + 896) / 1024), provided that some E is
// at least c2 - 1. FW takes 16 units or more, provided that two E are 4 apart. The streams show
// both (are_apart). Where they do not, the block is measured, and coded again if its centre turns
// out to be another one.
inline constexpr uint32_t kUsualBelow = 24;  // from a window's lowest E to the centre
inline constexpr uint32_t kUsualFwUnits = 16;
// From the mean of the E to the largest: 7 to the centre, and less than 3 from there.
static_assert(canonical::kClip - kUsualBelow + 3 < canonical::kFar);

__device__ __forceinline__ uint32_t usual_center(uint32_t sum) {
  constexpr uint32_t kMore = canonical::kLq2Eighths * frame::kBlockElements / 8;
  return (sum + kMore + 2 * frame::kBlockElements - 1) / frame::kBlockElements;
}

// Whether all E are in the window of a centre, which Near::holds then. Not if a sample of them is
// the same but for two bits: the streams of few different E show nothing, and would be coded twice.
template <uint32_t kExponentBits>
__device__ __forceinline__ bool are_usual(const uint32_t (&e)[8], uint32_t center) {
  constexpr bool kMoves = kExponentBits > 5;  // of fewer bits, all E but 0 are in one window
  const uint32_t low = kMoves ? center - kUsualBelow : 1;
  const uint32_t lows = bytes_of(low & 0xffu);
  // The lowest byte of a word that is outside leaves 32 or more, as `low` is at most 224 and no
  // byte below it borrows.
  uint32_t above = 0;
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) {
    above |= e[i] - lows;
  }
  const bool is_possible = kMoves ? low - 1 < 224 : center <= 125;
  return !__any_sync(kAllLanes, !is_possible || (above & bytes_of(0xe0)) != 0) &&
         __any_sync(kAllLanes, ((e[0] ^ e[4]) & bytes_of(0xfc)) != 0);
}

// Of a usual block's plane, where some v is none of 0 to 5: whether [Note: usual blocks] holds. An
// element with v = 1 says that m is large enough, and one with v = 3 or that with v = 1 is 4 away
// from what is none of 0 to 5.
__device__ __forceinline__ bool are_apart(uint32_t plane) {
  const uint32_t upper = plane >> 1;
  return __any_sync(kAllLanes,
                    (plane & ~upper & 0x55555555u) != 0 && (plane & upper & 0x55555555u) != 0);
}

// How a block was coded. The payload is in the stage, or is made when its place is known.
struct Coded {
  uint32_t mode;
  uint32_t units;
  uint32_t center;
  bool packed = false;
  uint32_t masks = 0;    // layout sparse: the survivors; byte q: row q
  uint64_t minimum = 0;  // layout ints
};

// A dense block's modes, in the words of section 5, but for what the streams of LQ2 take.
struct Plan {
  uint32_t center;  // of LQ2
  uint32_t zeros;   // of the 1024 elements
  bool is_near;     // Near::holds the centre
  bool has_window;  // else FW is the only mode
  uint32_t fw_bits, fw_center;
  Crowd crowd;  // of the canonical profile, for LQ3
};

template <uint32_t kExponentBits>
__device__ __forceinline__ Plan plan_of(const uint32_t (&e)[8], bool fast, uint32_t given,
                                        uint32_t lane) {
  Plan plan;
  plan.has_window = true;
  if (fast) {
    const Near near = find_extremes(e);
    plan.center = plan.fw_center = given;
    plan.zeros = near.min == 0 ? count_zeros(e) : 0;
    plan.is_near = near.holds(given);
    plan.fw_bits = kExponentBits;
    return plan;
  }
  const Exponents all = measure(e);
  plan.crowd = crowd_of(all);
  if constexpr (kExponentBits == canonical::kOutlierBits) {
    if (is_spread(plan.crowd)) {
      plan.has_window = find_window(e, lane, plan.crowd);
    }
  }
  plan.center = center_of(plan.crowd, canonical::kLq2Eighths);
  plan.zeros = all.zeros;
  plan.is_near = Near{all.max, all.min}.holds(plan.center);
  plan.fw_bits = max(32 - __clz(all.max - all.min), 2);
  plan.fw_center = all.max;
  return plan;
}

// LQ2 of a dense block, with its plane.
template <uint32_t kExponentBits>
__device__ __forceinline__ Streams write_lq2(const EncodeStreams& to, const uint32_t (&e)[8],
                                             bool is_near, uint32_t center, uint32_t (&low)[2],
                                             uint8_t* plane) {
  constexpr uint32_t kLongest = 128 * (kExponentBits - 2);
  clear_stage<kDenseStageBytes>(to.stage, to.lane);
  __syncwarp();
  return encode_lq2<false>(to, e, is_near, center, 0, 0, kLongest, low, plane);
}

// E of what encode_lq2 left, so that it need not be kept for what is rare.
__device__ __forceinline__ void exponents_again(const EncodeStreams& to, uint32_t center,
                                                uint32_t (&e)[8]) {
  const uint32_t centers = bytes_of(center);
  uint32_t biased[8];
  load_lane(to.symbols, to.lane, biased);
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) {
    e[i] = subtract_bytes(centers, biased[i] ^ kBias);
  }
}

inline constexpr uint32_t kNoCenter = 256;  // of a block that is not coded
inline constexpr uint32_t kLq3LeastUnits = frame::kBitmapBytes / frame::kUnitBytes;  // its plane

// A dense block by its plan. `coded`: how it is coded as LQ2 already, if that is so.
template <uint32_t kExponentBits>
__device__ __forceinline__ Coded encode_measured(const EncodeStreams& to, uint32_t (&e)[8],
                                                 bool fast, uint32_t given, uint32_t missing,
                                                 BlockSummary& summary, uint8_t* plane,
                                                 Coded coded) {
  const Plan plan = plan_of<kExponentBits>(e, fast, given, to.lane);
  if (to.lane == 0) {
    summary.hint = plan.center;
    summary.zeros = plan.zeros - missing;
  }
  const uint32_t fw_units = 16 * (plan.fw_bits - 2);
  uint32_t low[2];
  // FW of 2 bits has no payload, and so nothing is shorter.
  if (plan.has_window && fw_units != 0 && plan.center != coded.center) {
    const Streams streams = write_lq2<kExponentBits>(to, e, plan.is_near, plan.center, low, plane);
    coded.units = (streams.end + 7) / 8;
    coded.center = plan.center;
    if (coded.units < fw_units && (fast || coded.units <= kLq3LeastUnits)) {
      return coded;
    }
    exponents_again(to, plan.center, e);
  }
  const uint32_t best = min(coded.units, fw_units);
  uint32_t lq3_units = kTooLong, c3 = 0;
  if (!fast && plan.has_window && best > kLq3LeastUnits) {  // among equals LQ3 comes last
    c3 = center_of(plan.crowd, canonical::kLq3Eighths);
    lq3_units = (lq3_bytes(e, c3) + 7) / 8;
  }
  if (lq3_units < best) {
    clear_stage<kDenseStageBytes>(to.stage, to.lane);
    __syncwarp();
    encode_lq3(to, e, c3, low);
    coded.mode = frame::kLq3;
    coded.units = lq3_units;
    coded.center = c3;
  } else if (fw_units <= coded.units) {
    encode_fw(to, e, plan.fw_center, plan.fw_bits, low);
    coded.mode = frame::kFw2 + plan.fw_bits - 2;
    coded.units = fw_units;
    coded.center = plan.fw_center;
  } else {
    return coded;
  }
  store_pair(plane + to.lane * 8, low[0], low[1]);
  return coded;
}

// A dense block. `given`: the centre of the fast profile. `missing`: elements of the 1024 that are
// not there, which have become 0. `plane`: of the slab, the last one. It is written twice where
// another mode turns out shorter than LQ2, which is rare, rather than kept in registers.
template <uint32_t kExponentBits>
__device__ __forceinline__ Coded encode_dense(const EncodeStreams& to, uint32_t (&e)[8], bool fast,
                                              uint32_t given, uint32_t missing,
                                              BlockSummary& summary, uint8_t* plane) {
  Coded coded;
  coded.mode = frame::kLq2;
  coded.units = kTooLong;
  coded.center = kNoCenter;
  const uint32_t center = fast ? given : usual_center(sum_of(e));
  if (are_usual<kExponentBits>(e, center)) {
    if (to.lane == 0) {
      summary.hint = center;
      summary.zeros = 0;  // so none is missing
    }
    uint32_t low[2];
    const Streams streams = write_lq2<kExponentBits>(to, e, true, center, low, plane);
    coded.units = (streams.end + 7) / 8;
    coded.center = center;
    uint32_t fw_units = 16 * (kExponentBits - 2);
    if (!fast) {
      fw_units = streams.has_nibbles && are_apart(low[0]) ? kUsualFwUnits : 0;
    }
    if (coded.units < fw_units) {
      return coded;
    }
    exponents_again(to, center, e);
  }
  return encode_measured<kExponentBits>(to, e, fast, given, missing, summary, plane, coded);
}

}  // namespace memswap::cuda
