// Streams to exponents: the modes LQ2, LQ3 and FW (docs/format.md section 3). What a stream's
// length is follows from the symbols before it, so each is checked before it is read.
#pragma once

#include "bitmaps.cuh"
#include "planes.cuh"

namespace memswap::cuda {

// What of a payload is decoded out of shared memory: all of a dense block's; of a sparse block's
// what follows the byte planes. A valid one is at most 1832 bytes (float64: 905 survivors, all of
// them with two escapes and a byte); slack, because a window of bits is read from two words.
inline constexpr uint32_t kDecodeStageBytes = 1936;

// A warp's share of the shared memory.
struct alignas(16) DecodeMemory {
  uint32_t exponents[frame::kBlockElements / 4];  // [Note: lanes' bytes]
  uint32_t stage[kDecodeStageBytes / 4];
  uint16_t positions[kPositions];

  __device__ __forceinline__ const uint8_t* bytes() const {
    return reinterpret_cast<const uint8_t*>(stage);
  }
};

// Replaces the marked elements' E by what their nibbles say. The nibbles begin at byte `begin` of
// the stage, of which `bytes` are there. E is written xor `flip`.
template <uint32_t kFirst, uint32_t kTwelve, uint32_t kThirteen>
__device__ __forceinline__ uint32_t read_nibbles(DecodeMemory& memory, uint32_t masks,
                                                 const Ranks& ranks, uint32_t center, uint32_t flip,
                                                 uint32_t begin, uint32_t bytes, uint32_t lane) {
  static_assert(((kTwelve - 1) & 0xff) == kThirteen);
  uint8_t* exponents = reinterpret_cast<uint8_t*>(memory.exponents);
  const uint32_t lower_lanes = (1u << lane) - 1;
  uint32_t raw = begin + (ranks.total + 1) / 2;
  if (raw > bytes) {
    return kDamaged;
  }
  write_few_positions(memory.positions, masks, ranks, lane);
#pragma unroll 1
  for (uint32_t done = 0; done < ranks.total; done += kPositions) {
    write_many_positions(memory.positions, masks, ranks, done, lane);
    __syncwarp();
    const uint32_t here = min(ranks.total - done, kPositions);
#pragma unroll 1
    for (uint32_t i = 0; i < here; i += 2 * kLanes) {  // a lane has a byte of two nibbles
      const uint32_t mine = i + 2 * lane;
      const bool has[2] = {mine < here, mine + 1 < here};
      const uint32_t both = has[0] ? memory.bytes()[begin + (done + mine) / 2] : 0u;
      const uint32_t nibbles[2] = {both & 0xfu, has[1] ? both >> 4 : 0u};
      uint32_t exponent[2];
#pragma unroll
      for (uint32_t k = 0; k < 2; ++k) {
        const uint32_t nibble = nibbles[k];
        exponent[k] = nibble < 12 ? center - kFirst - nibble : center - kTwelve - 12 + nibble;
        exponent[k] = nibble == 14 ? 0 : exponent[k];
      }
      const uint32_t raws[2] = {__ballot_sync(kAllLanes, nibbles[0] == 15),
                                __ballot_sync(kAllLanes, nibbles[1] == 15)};
      if ((raws[0] | raws[1]) != 0) {
        uint32_t place = raw + __popc(raws[0] & lower_lanes) + __popc(raws[1] & lower_lanes);
#pragma unroll
        for (uint32_t k = 0; k < 2; ++k) {
          if (nibbles[k] == 15) {
            exponent[k] = place < bytes ? memory.bytes()[place] : 0;
            ++place;
          }
        }
        raw += __popc(raws[0]) + __popc(raws[1]);
      }
#pragma unroll
      for (uint32_t k = 0; k < 2; ++k) {
        if (has[k]) {
          exponents[memory.positions[mine + k]] = static_cast<uint8_t>(exponent[k] ^ flip);
        }
      }
    }
    __syncwarp();
  }
  return raw > bytes ? kDamaged : raw;
}

// LQ2 whose L0 is `low` (a plane) and whose streams begin at byte `begin` of the stage. Only
// elements marked in `valid` have symbols if kSome. Returns the byte behind the streams.
template <bool kSome>
__device__ __forceinline__ uint32_t decode_lq2(DecodeMemory& memory, const Move* expand,
                                               const uint32_t (&low)[2], uint32_t center,
                                               uint32_t valid, uint32_t begin, uint32_t bytes,
                                               uint32_t lane, uint32_t (&e)[8]) {
  const uint32_t coded[2] = {low[0] | low[0] >> 1, low[1] | low[1] >> 1};
  uint32_t coded_masks = 0, coded_counts = 0;  // byte q: who has a code, and how many
#pragma unroll
  for (uint32_t row = 0; row < kRows; ++row) {
    const uint32_t unit = 1u << (2 * row);
    const uint32_t flags[2] = {coded[0] & bytes_of(unit), coded[1] & bytes_of(unit)};
    coded_masks += gather_row(flags[0], flags[1]) << (6 * row);
    coded_counts += gather_bytes(flags[1], bytes_of(1), gather_bytes(flags[0], bytes_of(1)))
                    << (6 * row);
  }
  uint32_t first = ~coded_masks;  // byte q: who has a symbol in S1
  if constexpr (kSome) {
    first &= valid;
  }
  const Ranks ranks = rank_rows(kSome ? count_rows(first) : bytes_of(8) - coded_counts, lane);
  const uint32_t end = begin + (2 * ranks.total + 7) / 8;
  if (end > bytes) {
    return kDamaged;
  }
  // centre - v, of v up to 5, borrows from the next byte where the centre is below. There E is
  // computed with its upper bit flipped.
  const uint32_t flip = center < 5 ? 0x80 : 0;
  const uint32_t centers = bytes_of(center ^ flip);
  const uint32_t masks[2] = {first & 0x0f0f0f0fu, first >> 4 & 0x0f0f0f0fu};
  uint32_t unknown[kRows];  // 128 * mask of who has a nibble in S2
  uint32_t known[8];
#pragma unroll
  for (uint32_t row = 0; row < kRows; ++row) {
    const uint32_t bit = 8 * begin + 2 * ranks.first(row);
    // The next eight symbols, a nibble each.
    uint32_t symbols = spread_symbols(
        __funnelshift_r(memory.stage[bit / 32], memory.stage[bit / 32 + 1], bit % 32));
    uint32_t marks[2];
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) {
      // A nibble selects v, or a mark; the mask's selector moves it in place.
      const Move move = move_of(expand, masks[h], row);
      const uint32_t escaped = permute(permute(0x80050400u, 0, symbols), 0, move.selector);
      known[2 * row + h] = centers - ((pairs_of_row(low[h], row) | escaped) & 0x07070707u);
      marks[h] = escaped & 0x80808080u;
      symbols >>= move.behind;
    }
    unknown[row] = gather_row(marks[0], marks[1]);
  }
  store_lane(memory.exponents, lane, known);
  const uint32_t second = join_rows(unknown);
  const Ranks again = rank_rows(count_rows(second), lane);
  uint32_t behind = end;
  if (again.total != 0) {
    behind = read_nibbles<frame::kLq2Nibbles.first, frame::kLq2Nibbles.twelve,
                          frame::kLq2Nibbles.thirteen>(memory, second, again, center, flip, end,
                                                       bytes, lane);
  }
  load_lane(memory.exponents, lane, e);  // with the nibbles' elements in them
  if (flip != 0) {
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) {
      e[i] ^= 0x80808080u;
    }
  }
  return behind;
}

// LQ3 whose plane begins at byte 0 of the stage.
__device__ __forceinline__ uint32_t decode_lq3(DecodeMemory& memory, const uint32_t (&low)[2],
                                               uint32_t center, uint32_t bytes, uint32_t lane,
                                               uint32_t (&e)[8]) {
  if (frame::kBitmapBytes > bytes) {
    return kDamaged;
  }
  const uint32_t centers = bytes_of(center);
  uint32_t masks = 0, known[8];
#pragma unroll
  for (uint32_t row = 0; row < kRows; ++row) {
    const uint32_t high = memory.bytes()[row * kLanes + lane];
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) {
      const uint32_t code = pairs_of_row(low[h], row) | spread_bits(high >> (4 * h)) << 2;
      masks |= gather_flags(~not_zero(code) >> 7 & 0x01010101u) << (8 * row + 4 * h);
      known[2 * row + h] = subtract_bytes(centers, code);
    }
  }
  store_lane(memory.exponents, lane, known);
  const Ranks ranks = rank_rows(count_rows(masks), lane);
  const uint32_t behind = read_nibbles<frame::kLq3Nibbles.first, frame::kLq3Nibbles.twelve,
                                       frame::kLq3Nibbles.thirteen>(
      memory, masks, ranks, center, 0, frame::kBitmapBytes, bytes, lane);
  load_lane(memory.exponents, lane, e);  // with the nibbles' elements in them
  return behind;
}

// FW of `bits` bits.
__device__ __forceinline__ uint32_t decode_fw(const DecodeMemory& memory, const uint32_t (&low)[2],
                                              uint32_t center, uint32_t bits, uint32_t bytes,
                                              uint32_t lane, uint32_t (&e)[8]) {
  const uint32_t behind = 128 * (bits - 2);
  if (behind > bytes) {
    return kDamaged;
  }
  uint32_t high[8];
  load_planes(memory.bytes(), high, bits - 2, lane);
  const uint32_t centers = bytes_of(center);
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) {
    e[i] = subtract_bytes(centers, pairs_of_row(low[i % 2], i / 2) | high[i] << 2);
  }
  return behind;
}

// The exponents of a dense block. False where the payload's length is not that of its streams.
__device__ __forceinline__ bool decode_dense(DecodeMemory& memory, const Move* expand,
                                             const uint32_t (&low)[2], uint32_t mode,
                                             uint32_t units, uint32_t center, uint32_t lane,
                                             uint32_t (&e)[8]) {
  const uint32_t bytes = units * frame::kUnitBytes;
  uint32_t behind;
  if (mode == frame::kLq2) {
    behind = decode_lq2<false>(memory, expand, low, center, 0, 0, bytes, lane, e);
  } else if (mode == frame::kLq3) {
    behind = decode_lq3(memory, low, center, bytes, lane, e);
  } else {
    behind = decode_fw(memory, low, center, mode - frame::kFw2 + 2, bytes, lane, e);
  }
  return behind != kDamaged && (behind + 7) / 8 == units;
}

}  // namespace memswap::cuda
