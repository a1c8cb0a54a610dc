// A block's elements in memory, and floats in their parts.
#pragma once

#include "warp.cuh"

namespace memswap::cuda {

// Words that a lane has of one row.
template <uint32_t kWidth>
inline constexpr uint32_t kRowWords = kLaneColumns * kWidth / 4;

// The elements of a block in the tensor. `count` are there; `vectors` says that all 1024 are and
// that they begin at a multiple of 16 bytes.
template <uint32_t kWidth, class Byte>
struct Elements {
  Byte* first;
  uint32_t count;
  bool vectors;

  __device__ __forceinline__ Elements(Byte* tensor, uint64_t elements, uint32_t block) {
    const uint64_t begin = uint64_t{block} * frame::kBlockElements;
    first = tensor + begin * kWidth;
    const uint64_t rest = elements - begin;
    count = rest < frame::kBlockElements ? static_cast<uint32_t>(rest) : frame::kBlockElements;
    vectors = count == frame::kBlockElements && reinterpret_cast<uintptr_t>(tensor) % 16 == 0;
  }
};
template <uint32_t kWidth>
using Source = Elements<kWidth, const uint8_t>;
template <uint32_t kWidth>
using Sink = Elements<kWidth, uint8_t>;

template <uint32_t kWidth>
struct WordOf;
template <>
struct WordOf<1> {
  using type = uint8_t;
};
template <>
struct WordOf<2> {
  using type = uint16_t;
};
template <>
struct WordOf<4> {
  using type = uint32_t;
};
template <>
struct WordOf<8> {
  using type = uint64_t;
};

// Rows that are fetched before the first is worked on. A store to the frame might change the
// tensor, for all that the compiler knows, so it fetches nothing early by itself.
template <uint32_t kWidth>
inline constexpr uint32_t kRowsAtOnce = kWidth <= 2   ? 4
                                        : kWidth == 4 ? 2
                                                      : 1;

template <uint32_t kWidth>
__device__ __forceinline__ void load_vectors(const Source<kWidth>& source, uint32_t row,
                                             uint32_t lane, uint32_t (&words)[kRowWords<kWidth>]) {
  const uint32_t element = row * kRowElements + lane * kLaneColumns;
  if constexpr (kWidth == 1) {
    const uint2 pair = *reinterpret_cast<const uint2*>(source.first + element);
    words[0] = pair.x;
    words[1] = pair.y;
  } else {
    const uint4* from = reinterpret_cast<const uint4*>(source.first + element * kWidth);
#pragma unroll
    for (uint32_t i = 0; i < kRowWords<kWidth> / 4; ++i) {
      const uint4 four = from[i];
      words[4 * i] = four.x;
      words[4 * i + 1] = four.y;
      words[4 * i + 2] = four.z;
      words[4 * i + 3] = four.w;
    }
  }
}

template <uint32_t kWidth>
__device__ __forceinline__ void load_elements(const Source<kWidth>& source, uint32_t row,
                                              uint32_t lane, uint32_t (&words)[kRowWords<kWidth>]) {
  const uint32_t element = row * kRowElements + lane * kLaneColumns;
  using Word = typename WordOf<kWidth>::type;
  const Word* from = reinterpret_cast<const Word*>(source.first) + element;
#pragma unroll
  for (uint32_t i = 0; i < kRowWords<kWidth>; ++i) {
    words[i] = 0;
  }
#pragma unroll
  for (uint32_t i = 0; i < kLaneColumns; ++i) {
    const Word word = element + i < source.count ? from[i] : Word{0};
    if constexpr (kWidth == 8) {
      words[2 * i] = static_cast<uint32_t>(word);
      words[2 * i + 1] = static_cast<uint32_t>(word >> 32);
    } else {
      words[i * kWidth / 4] |= static_cast<uint32_t>(word) << (8 * (i * kWidth % 4));
    }
  }
}

// A lane's elements of `kCount` rows; missing ones are 0. What is not aligned to vectors is read
// element by element: right for every tensor, and as fast as it needs to be for a rare one.
template <uint32_t kWidth, uint32_t kCount>
__device__ __forceinline__ void load_rows(const Source<kWidth>& source, uint32_t row, uint32_t lane,
                                          uint32_t (&words)[kCount][kRowWords<kWidth>]) {
  if (source.vectors) {
#pragma unroll
    for (uint32_t i = 0; i < kCount; ++i) {
      load_vectors(source, row + i, lane, words[i]);
    }
  } else {
#pragma unroll
    for (uint32_t i = 0; i < kCount; ++i) {
      load_elements(source, row + i, lane, words[i]);
    }
  }
}

// The first rows of a block, as many as are fetched at once.
template <uint32_t kWidth>
using FirstRows = uint32_t[kRowsAtOnce<kWidth>][kRowWords<kWidth>];

// Asks for the first rows of a block before its turn comes, where vectors can be read: load_late
// reads what is missing then.
template <uint32_t kWidth>
__device__ __forceinline__ void load_early(const Source<kWidth>& source, uint32_t lane,
                                           FirstRows<kWidth>& rows) {
  if (source.vectors) {
#pragma unroll
    for (uint32_t i = 0; i < kRowsAtOnce<kWidth>; ++i) {
      load_vectors(source, i, lane, rows[i]);
    }
  }
}

// The rows from `row` on. The first ones are there if kLoadedEarly, where load_early could read
// them.
template <bool kLoadedEarly, uint32_t kWidth>
__device__ __forceinline__ void load_late(const Source<kWidth>& source, uint32_t row, uint32_t lane,
                                          FirstRows<kWidth>& rows) {
  if (!kLoadedEarly || row != 0 || !source.vectors) {
    load_rows(source, row, lane, rows);
  }
}

template <uint32_t kWidth>
__device__ __forceinline__ void load_row(const Source<kWidth>& source, uint32_t row, uint32_t lane,
                                         uint32_t (&words)[kRowWords<kWidth>]) {
  if (source.vectors) {
    load_vectors(source, row, lane, words);
  } else {
    load_elements(source, row, lane, words);
  }
}

template <uint32_t kWidth>
__device__ __forceinline__ void store_vectors(const Sink<kWidth>& sink, uint32_t row, uint32_t lane,
                                              const uint32_t (&words)[kRowWords<kWidth>]) {
  const uint32_t element = row * kRowElements + lane * kLaneColumns;
  if constexpr (kWidth == 1) {
    *reinterpret_cast<uint2*>(sink.first + element) = make_uint2(words[0], words[1]);
  } else {
    uint4* to = reinterpret_cast<uint4*>(sink.first + element * kWidth);
#pragma unroll
    for (uint32_t i = 0; i < kRowWords<kWidth> / 4; ++i) {
      to[i] = make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
    }
  }
}

template <uint32_t kWidth>
__device__ __forceinline__ void store_elements(const Sink<kWidth>& sink, uint32_t row,
                                               uint32_t lane,
                                               uint32_t (&words)[kRowWords<kWidth>]) {
  const uint32_t element = row * kRowElements + lane * kLaneColumns;
  using Word = typename WordOf<kWidth>::type;
  Word* to = reinterpret_cast<Word*>(sink.first) + element;
#pragma unroll
  for (uint32_t i = 0; i < kLaneColumns; ++i) {
    const bool there = element + i < sink.count;
    if constexpr (kWidth == 8) {
      if (there) {
        to[i] = words[2 * i] | uint64_t{words[2 * i + 1]} << 32;
      } else {
        words[2 * i] = words[2 * i + 1] = 0;
      }
    } else {
      const uint32_t shift = 8 * (i * kWidth % 4);
      uint32_t& word = words[i * kWidth / 4];
      if (there) {
        to[i] = static_cast<Word>(word >> shift);
      } else if constexpr (kWidth == 4) {
        word = 0;
      } else {
        word &= ~(((1u << 8 * kWidth) - 1) << shift);
      }
    }
  }
}

// Writes a lane's elements of `kCount` rows. Missing ones are not written and become 0 in `words`.
template <uint32_t kWidth, uint32_t kCount>
__device__ __forceinline__ void store_rows(const Sink<kWidth>& sink, uint32_t row, uint32_t lane,
                                           uint32_t (&words)[kCount][kRowWords<kWidth>]) {
  if (sink.vectors) {
#pragma unroll
    for (uint32_t i = 0; i < kCount; ++i) {
      store_vectors(sink, row + i, lane, words[i]);
    }
  } else {
#pragma unroll
    for (uint32_t i = 0; i < kCount; ++i) {
      store_elements(sink, row + i, lane, words[i]);
    }
  }
}

// The part that a lane's words of a row have in their tile's checksum: at most 2^51, for 16 words
// with weights below 2^15.
template <uint32_t kWidth>
__device__ __forceinline__ uint64_t checksum_row(const uint32_t (&words)[kRowWords<kWidth>],
                                                 uint32_t block_of_tile, uint32_t row,
                                                 uint32_t lane) {
  const uint32_t element =
      block_of_tile * frame::kBlockElements + row * kRowElements + lane * kLaneColumns;
  const uint32_t weight = element * kWidth / 4 * 2 + 1;
  uint64_t sum = 0;
#pragma unroll
  for (uint32_t i = 0; i < kRowWords<kWidth>; ++i) {
    sum += uint64_t{words[i]} * (weight + 2 * i);
  }
  return sum;
}

// Of several rows.
template <uint32_t kWidth, uint32_t kCount>
__device__ __forceinline__ uint64_t
checksum_rows(const uint32_t (&words)[kCount][kRowWords<kWidth>], uint32_t block_of_tile,
              uint32_t row, uint32_t lane) {
  uint64_t sum = 0;
#pragma unroll
  for (uint32_t i = 0; i < kCount; ++i) {
    sum += checksum_row<kWidth>(words[i], block_of_tile, row + i, lane);
  }
  return sum;
}

// The sum over a warp, of numbers that are below 2^(2 kBits) where 32 lanes' kBits fit 32 bits.
template <uint32_t kBits>
__device__ __forceinline__ uint64_t add_lanes(uint64_t number) {
  const uint32_t low = static_cast<uint32_t>(number) & ((1u << kBits) - 1);
  const uint32_t high = static_cast<uint32_t>(number >> kBits);
  return (uint64_t{__reduce_add_sync(kAllLanes, high)} << kBits) +
         __reduce_add_sync(kAllLanes, low);
}
// A block's checksum from those of the lanes, and a tile's from those of its 8 blocks.
__device__ __forceinline__ uint64_t add_lanes_of_block(uint64_t sum) { return add_lanes<27>(sum); }
__device__ __forceinline__ uint64_t add_blocks_of_tile(uint64_t sum) { return add_lanes<29>(sum); }

// A float's parts in a row of a lane: its low bytes, each a plane of the slab, and the top byte of
// the rotated element, which is E above rest_bits bits of the remaining R planes.
template <frame::Dtype kDtype>
struct Float {
  static constexpr frame::Split kSplit = frame::split_of(kDtype);
  static constexpr uint32_t kWidth = kSplit.width;
  static constexpr uint32_t kWords = kRowWords<kWidth>;
  static constexpr int kLowPlanes = kSplit.byte_planes;  // signed: may be 0 in a loop
  static constexpr uint32_t kLowWords = kLowPlanes == 0 ? 1 : 2 * kLowPlanes;
  static constexpr uint32_t kRestBits = kSplit.rest_bits;
  static constexpr uint32_t kExponentMask = bytes_of((1u << kSplit.exponent_bits) - 1);
  static constexpr uint32_t kRestMask = bytes_of((1u << kRestBits) - 1);

  __device__ static __forceinline__ uint32_t exponents(uint32_t top) {
    return kRestBits == 0 ? top : top >> kRestBits & kExponentMask;
  }
  __device__ static __forceinline__ uint32_t rest(uint32_t top) { return top & kRestMask; }
  __device__ static __forceinline__ uint32_t top(uint32_t exponents, uint32_t rest) {
    return kRestBits == 0 ? exponents : (exponents & kExponentMask) << kRestBits | rest;
  }

  // Bytes 0 to 3 of four words, each with its own kind: a 4 x 4 transposition, its own inverse.
  __device__ static __forceinline__ void transpose(uint32_t& a, uint32_t& b, uint32_t& c,
                                                   uint32_t& d) {
    const uint32_t low_ab = __byte_perm(a, b, 0x5140), high_ab = __byte_perm(a, b, 0x7362);
    const uint32_t low_cd = __byte_perm(c, d, 0x5140), high_cd = __byte_perm(c, d, 0x7362);
    a = __byte_perm(low_ab, low_cd, 0x5410);
    b = __byte_perm(low_ab, low_cd, 0x7632);
    c = __byte_perm(high_ab, high_cd, 0x5410);
    d = __byte_perm(high_ab, high_cd, 0x7632);
  }

  // 0xff for every half of two words that is negative, else 0.
  __device__ static __forceinline__ uint32_t top_bytes_signs(uint32_t x, uint32_t y) {
    return permute(x, y, 0xfdb9);
  }

  // low[2p + h], top[h]: four columns each.
  __device__ static __forceinline__ void split(const uint32_t (&words)[kWords],
                                               uint32_t (&low)[kLowWords], uint32_t (&top)[2]) {
    if constexpr (kWidth == 1) {
      low[0] = 0;
#pragma unroll
      for (uint32_t h = 0; h < 2; ++h) {
        top[h] = select_bits(0x01010101u, words[h] >> 7, words[h] << 1);
      }
    } else if constexpr (kWidth == 2) {
      // Shifted words have all bits in place but the signs: a lower half's is in the upper half.
#pragma unroll
      for (uint32_t h = 0; h < 2; ++h) {
        const uint32_t x = words[2 * h], y = words[2 * h + 1];
        const uint32_t signs = top_bytes_signs(x, y);
        const uint32_t a = x * 2, b = y * 2;
        low[h] = select_bits(0x01010101u, signs, __byte_perm(a, b, 0x6420));
        top[h] = __byte_perm(a, b, 0x7531);
      }
    } else if constexpr (kWidth == 4) {
#pragma unroll
      for (uint32_t h = 0; h < 2; ++h) {
        uint32_t r[4];
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
          r[i] = __funnelshift_l(words[4 * h + i], words[4 * h + i], 1);
        }
        transpose(r[0], r[1], r[2], r[3]);
        low[h] = r[0];
        low[2 + h] = r[1];
        low[4 + h] = r[2];
        top[h] = r[3];
      }
    } else {
#pragma unroll
      for (uint32_t h = 0; h < 2; ++h) {
        uint32_t r[2][4];
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
          const uint32_t x = words[8 * h + 2 * i], y = words[8 * h + 2 * i + 1];
          r[0][i] = __funnelshift_l(y, x, 1);
          r[1][i] = __funnelshift_l(x, y, 1);
        }
        transpose(r[0][0], r[0][1], r[0][2], r[0][3]);
        transpose(r[1][0], r[1][1], r[1][2], r[1][3]);
#pragma unroll
        for (uint32_t p = 0; p < 7; ++p) {
          low[2 * p + h] = r[p / 4][p % 4];
        }
        top[h] = r[1][3];
      }
    }
  }

  __device__ static __forceinline__ void join(const uint32_t (&low)[kLowWords],
                                              const uint32_t (&top)[2], uint32_t (&words)[kWords]) {
    if constexpr (kWidth == 1) {
#pragma unroll
      for (uint32_t h = 0; h < 2; ++h) {
        words[h] = select_bits(0x80808080u, top[h] << 7, top[h] >> 1);
      }
    } else if constexpr (kWidth == 2) {
#pragma unroll
      for (uint32_t h = 0; h < 2; ++h) {
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) {
          const uint32_t r = __byte_perm(low[h], top[h], i == 0 ? 0x5140 : 0x7362);
          words[2 * h + i] = select_bits(0x80008000u, r << 15, r >> 1);
        }
      }
    } else if constexpr (kWidth == 4) {
#pragma unroll
      for (uint32_t h = 0; h < 2; ++h) {
        uint32_t r[4] = {low[h], low[2 + h], low[4 + h], top[h]};
        transpose(r[0], r[1], r[2], r[3]);
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
          words[4 * h + i] = __funnelshift_r(r[i], r[i], 1);
        }
      }
    } else {
#pragma unroll
      for (uint32_t h = 0; h < 2; ++h) {
        uint32_t r[2][4];
#pragma unroll
        for (uint32_t p = 0; p < 7; ++p) {
          r[p / 4][p % 4] = low[2 * p + h];
        }
        r[1][3] = top[h];
        transpose(r[0][0], r[0][1], r[0][2], r[0][3]);
        transpose(r[1][0], r[1][1], r[1][2], r[1][3]);
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
          words[8 * h + 2 * i] = __funnelshift_r(r[0][i], r[1][i], 1);
          words[8 * h + 2 * i + 1] = __funnelshift_r(r[1][i], r[0][i], 1);
        }
      }
    }
  }
};

}  // namespace memswap::cuda
