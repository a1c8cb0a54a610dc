// Exponents to streams: the modes LQ2, LQ3 and FW, and the choice among them (docs/format.md
// sections 3 and 5).
#pragma once

#include "planes.cuh"

namespace memswap::cuda {

// What the streams of a dense block can take: LQ2 is written before anyone knows that another mode
// is shorter, so the stage holds its two packed streams at their longest, 256 + 512 bytes.
inline constexpr uint32_t kDenseStageBytes = 800;
inline constexpr uint32_t kTooLong = 0x7fff;  // bytes: longer than any payload that can win
inline constexpr uint32_t kPositions = 256;

// A warp's share of the shared memory.
template <uint32_t kBytes>
struct alignas(16) EncodeMemory {
  static constexpr uint32_t kStageBytes = kBytes;
  uint32_t symbols[frame::kBlockElements / 4];  // v of every element
  uint32_t stage[kBytes / 4];                   // the payload, until the tile has its position
  uint16_t positions[kPositions];               // of elements that need a nibble
  static_assert(kBytes % 16 == 0);
};

// The same without its size.
struct EncodeStreams {
  uint32_t* symbols;
  uint32_t* stage;
  uint16_t* positions;
  const uint32_t* compact;  // PRMT selector by mask
  uint32_t capacity;        // of the stage, bytes
  uint32_t lane;

  __device__ __forceinline__ uint8_t* bytes() const { return reinterpret_cast<uint8_t*>(stage); }
};

template <uint32_t kBytes>
__device__ __forceinline__ void clear_stage(EncodeMemory<kBytes>& memory, uint32_t lane) {
#pragma unroll
  for (uint32_t i = 0; i < kBytes / 16; i += kLanes) {
    if (i + lane < kBytes / 16) {
      reinterpret_cast<uint4*>(memory.stage)[i + lane] = make_uint4(0, 0, 0, 0);
    }
  }
}

// The second kind of escape: a nibble, and a byte where that is 15. `kFirst`: the v of nibble 0;
// `kTwelve`, `kThirteen`: those of 12 and 13.
template <uint32_t kFirst, uint32_t kTwelve, uint32_t kThirteen>
__device__ __forceinline__ uint32_t nibble_of(uint32_t v, uint32_t center) {
  if (v - kFirst < 12) {
    return v - kFirst;
  }
  return v == kTwelve ? 12 : v == kThirteen ? 13 : v == (center & 0xffu) ? 14 : 15;
}

// Writes the nibbles of the marked elements from byte `begin` of the stage on, and the bytes E
// behind them. `symbols` has v. Returns the byte behind the streams, whether or not they fitted.
template <uint32_t kFirst, uint32_t kTwelve, uint32_t kThirteen>
__device__ __forceinline__ uint32_t write_nibbles(const EncodeStreams& to, uint32_t masks,
                                                  const Ranks& ranks, uint32_t center,
                                                  uint32_t begin) {
  const uint8_t* symbols = reinterpret_cast<const uint8_t*>(to.symbols);
  const uint32_t lower_lanes = (1u << to.lane) - 1;
  uint32_t raw = begin + (ranks.total + 1) / 2;
#pragma unroll 1
  for (uint32_t done = 0; done < ranks.total; done += kPositions) {
#pragma unroll
    for (uint32_t row = 0; row < kRows; ++row) {
      uint32_t mask = masks >> (8 * row) & 0xffu;
      uint32_t rank = ranks.first(row) - done;
#pragma unroll 1
      while (mask != 0) {
        if (rank < kPositions) {
          to.positions[rank] =
              static_cast<uint16_t>(row * kRowElements + to.lane * kLaneColumns + __ffs(mask) - 1);
        }
        mask &= mask - 1;
        ++rank;
      }
    }
    __syncwarp();
    const uint32_t here = min(ranks.total - done, kPositions);
#pragma unroll 1
    for (uint32_t i = 0; i < here; i += 2 * kLanes) {
      const uint32_t mine = i + 2 * to.lane;
      uint32_t nibbles = 0, v0 = 0, v1 = 0;
      bool raw0 = false, raw1 = false;
      if (mine < here) {
        v0 = symbols[to.positions[mine]];
        nibbles = nibble_of<kFirst, kTwelve, kThirteen>(v0, center);
        raw0 = nibbles == 15;
        if (mine + 1 < here) {
          v1 = symbols[to.positions[mine + 1]];
          const uint32_t nibble = nibble_of<kFirst, kTwelve, kThirteen>(v1, center);
          raw1 = nibble == 15;
          nibbles |= nibble << 4;
        }
        to.bytes()[begin + (done + mine) / 2] = static_cast<uint8_t>(nibbles);
      }
      const uint32_t raws0 = __ballot_sync(kAllLanes, raw0);
      const uint32_t raws1 = __ballot_sync(kAllLanes, raw1);
      if ((raws0 | raws1) != 0) {
        uint32_t place = raw + __popc(raws0 & lower_lanes) + __popc(raws1 & lower_lanes);
        if (raw0 && place < to.capacity) {
          to.bytes()[place] = static_cast<uint8_t>(center - v0);
        }
        place += raw0;
        if (raw1 && place < to.capacity) {
          to.bytes()[place] = static_cast<uint8_t>(center - v1);
        }
        raw += __popc(raws0) + __popc(raws1);
      }
    }
    __syncwarp();
  }
  return raw;
}

// LQ2: L0 as a plane in `low`, the streams from byte `begin` of the stage on, which is clear there.
// Returns the byte behind the streams; kTooLong says that FW with all bits is shorter, and that the
// streams are incomplete. Only elements marked in `valid` (byte q: row q) are coded if kSome.
// Leaves v in `symbols`.
template <bool kSome>
__device__ __forceinline__ uint32_t encode_lq2(const EncodeStreams& to, const uint32_t (&e)[8],
                                               uint32_t center, uint32_t valid, uint32_t begin,
                                               uint32_t longest, uint32_t (&low)[2]) {
  const uint32_t centers = bytes_of(center & 0xffu);
  uint32_t v[8];
  WordMasks<kSome> masks;
  low[0] = low[1] = 0;
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) {
    v[i] = subtract_bytes(centers, e[i]);
    const uint32_t far = at_least<4>(v[i]);
    uint32_t code = v[i] & 0x03030303u & ~((far >> 7) * 3);
    uint32_t escapes = ~(code | code >> 1) & 0x01010101u;
    if constexpr (kSome) {
      const uint32_t here = spread_bits(valid >> (4 * i));
      code &= here * 3;
      escapes &= here;
    }
    masks.set(i, gather_flags(escapes));
    low[i % 2] |= code << (2 * (i / 2));
  }
#pragma unroll
  for (uint32_t row = 0; row < kRows; ++row) {
    reinterpret_cast<uint2*>(to.symbols)[row * kLanes + to.lane] =
        make_uint2(v[2 * row], v[2 * row + 1]);
  }
  const Ranks ranks = rank_rows(masks.counts(), to.lane);
  uint32_t second = 0;  // byte q: who needs a nibble
#pragma unroll
  for (uint32_t row = 0; row < kRows; ++row) {
    uint32_t packed[2];
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) {
      const uint32_t i = 2 * row + h;
      // 0, 4, 5 become 0, 1, 2 and everything from 6 on 3; 1 to 3 are no escapes.
      const uint32_t six = at_least<6>(v[i]) >> 7;
      const uint32_t symbols = ((v[i] >> 2 & 0x01010101u) + (v[i] & 0x01010101u)) | six * 3;
      packed[h] = pack_pairs(__byte_perm(symbols, 0, to.compact[masks.get(i)]));
      second |= (gather_flags(six) & masks.get(i)) << (4 * i);
    }
    const uint32_t word = packed[0] | packed[1] << (2 * __popc(masks.get(2 * row)));
    if (word != 0) {
      const uint32_t bit = 8 * begin + 2 * ranks.first(row);
      atomicOr(&to.stage[bit / 32], word << (bit % 32));
      const uint32_t over = __funnelshift_l(word, 0, bit % 32);
      if (over != 0) {
        atomicOr(&to.stage[bit / 32 + 1], over);
      }
    }
  }
  const uint32_t end = begin + (2 * ranks.total + 7) / 8;
  const Ranks again = rank_rows(count_rows(second), to.lane);
  __syncwarp();  // the last byte of S1 and the first of S2 share a word
  if (again.total == 0) {
    return end;
  }
  if (end + (again.total + 1) / 2 >= longest) {
    return kTooLong;
  }
  return write_nibbles<6, 255, 254>(to, second, again, center, end);
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
  uint32_t masks = 0;
  low[0] = low[1] = 0;
#pragma unroll
  for (uint32_t row = 0; row < kRows; ++row) {
    uint32_t high = 0, v[2];
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) {
      v[h] = subtract_bytes(centers, e[2 * row + h]);
      const uint32_t code = v[h] & 0x07070707u & ~((at_least<8>(v[h]) >> 7) * 7);
      low[h] |= (code & 0x03030303u) << (2 * row);
      high |= gather_flags(code >> 2 & 0x01010101u) << (4 * h);
      masks |= gather_flags(~not_zero(code) >> 7 & 0x01010101u) << (8 * row + 4 * h);
    }
    to.bytes()[row * kLanes + to.lane] = static_cast<uint8_t>(high);
    reinterpret_cast<uint2*>(to.symbols)[row * kLanes + to.lane] = make_uint2(v[0], v[1]);
  }
  const Ranks ranks = rank_rows(count_rows(masks), to.lane);
  return write_nibbles<8, 0, 255>(to, masks, ranks, center, frame::kBitmapBytes);
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

__device__ __forceinline__ Exponents measure(const uint32_t (&e)[8]) {
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
  Exponents all;
  all.max = __reduce_max_sync(kAllLanes, max(max_pair >> 24, max_pair >> 8 & 0xffu));
  all.min = __reduce_min_sync(kAllLanes, min(min_pair >> 24, min_pair >> 8 & 0xffu));
  const uint32_t maxima = bytes_of(all.max);
  uint32_t sum = 0;
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) {
    const uint32_t distance = maxima - e[i];  // no byte borrows: the maximum is the largest
    const uint32_t far = at_least<32>(distance);
    sum = __dp4a((distance | (far - (far >> 7))) & 0x1f1f1f1fu, 0x01010101u, sum);
  }
  all.distances = __reduce_add_sync(kAllLanes, sum);
  all.zeros = 0;
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

// The centre of section 5 that lies `eighths` / 8 below the mean distance.
__device__ __forceinline__ uint32_t center_of(const Exponents& all, uint32_t eighths) {
  const uint32_t elements = max(frame::kBlockElements - all.zeros, 1u);
  const uint32_t sum = 8 * all.distances, less = eighths * elements;
  const uint32_t below = sum > less ? divide(sum - less, 8 * elements) : 0;
  return (all.max + 1 - below) & 0xffu;
}

// How a block was coded. The payload is in the stage.
struct Coded {
  uint32_t mode;
  uint32_t units;
  uint32_t center;
  uint32_t hint;   // what the block adds to center_sum
  uint32_t zeros;  // missing elements included
};

// A dense block. `given`: the centre of the fast profile.
template <uint32_t kExponentBits, uint32_t kBytes>
__device__ __forceinline__ Coded encode_dense(EncodeMemory<kBytes>& memory, const EncodeStreams& to,
                                              uint32_t (&e)[8], bool fast, uint32_t given,
                                              uint32_t (&low)[2]) {
  constexpr uint32_t kLongest = 128 * (kExponentBits - 2);
  clear_stage(memory, to.lane);
  __syncwarp();
  Coded coded;
  uint32_t bits = kExponentBits, fw_center = given, c3 = 0;
  coded.center = given;
  if (fast) {
    uint32_t all = 0x80808080u;
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) {
      all &= not_zero(e[i]);
    }
    coded.zeros = __any_sync(kAllLanes, all != 0x80808080u) ? count_zeros(e) : 0;
  } else {
    const Exponents all = measure(e);
    coded.zeros = all.zeros;
    coded.center = center_of(all, 7);
    c3 = center_of(all, 19);
    fw_center = all.max;
    bits = max(32 - __clz(all.max - all.min), 2);
  }
  coded.hint = coded.center;
  const uint32_t bytes = encode_lq2<false>(to, e, coded.center, 0, 0, kLongest, low);
  coded.mode = frame::kLq2;
  coded.units = (bytes + 7) / 8;
  const uint32_t fw_units = 16 * (bits - 2);
  const uint32_t best = min(coded.units, fw_units);
  // LQ3 has a plane of 16 units, and among equals it comes last.
  if (fw_units > coded.units && (fast || best <= 16)) {
    return coded;
  }
  // Rare: E comes back from v, so that it need not be kept for this.
  const uint32_t centers = bytes_of(coded.center);
#pragma unroll
  for (uint32_t row = 0; row < kRows; ++row) {
    const uint2 v = reinterpret_cast<const uint2*>(to.symbols)[row * kLanes + to.lane];
    e[2 * row] = subtract_bytes(centers, v.x);
    e[2 * row + 1] = subtract_bytes(centers, v.y);
  }
  const uint32_t lq3_units = fast || best <= 16 ? kTooLong : (lq3_bytes(e, c3) + 7) / 8;
  if (lq3_units < best) {
    clear_stage(memory, to.lane);
    __syncwarp();
    encode_lq3(to, e, c3, low);
    coded.mode = frame::kLq3;
    coded.units = lq3_units;
    coded.center = c3;
  } else if (fw_units <= coded.units) {
    encode_fw(to, e, fw_center, bits, low);
    coded.mode = frame::kFw2 + bits - 2;
    coded.units = fw_units;
    coded.center = fw_center;
  }
  return coded;
}

}  // namespace memswap::cuda
