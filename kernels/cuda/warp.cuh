// What the kernels need of a warp and of bytes in words. A warp codes a block: lane t owns columns
// 8t .. 8t+7 of the block's four rows of 256 elements. What a lane knows about its 32 elements is
// therefore 8 words of 4 bytes, word 2q + h holding columns 4h .. 4h+3 of row q.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "memswap/frame.h"

namespace memswap::cuda {

inline constexpr uint32_t kAllLanes = 0xffffffff;
inline constexpr uint32_t kLanes = 32;
inline constexpr uint32_t kRows = 4;
inline constexpr uint32_t kRowElements = frame::kBlockElements / kRows;
inline constexpr uint32_t kLaneColumns = 8;
inline constexpr uint32_t kTileThreads = frame::kTileBlocks * kLanes;

// Tiles that a processor has at once, each a thread block: what __launch_bounds__ says of a kernel,
// which gives a thread 64 registers, or 80. Left alone, the compiler saves registers until it
// spills.
inline constexpr uint32_t kTilesAtOnce = 4;
inline constexpr uint32_t kLeastTiles = 3;  // where a tile needs more of anything

// A pointer that was read from shared memory, where the compiler cannot see what it points to.
template <class Pointer>
__device__ __forceinline__ Pointer to_global(Pointer pointer) {
#if !defined(MEMSWAP_CUDA_EMULATOR)
  __builtin_assume(__isGlobal(pointer));
#endif
  return pointer;
}

// [Note: fetching ahead] A decoder's first tile waits for one thing after another: the frame's
// header, the record, the payload. What does not depend on them is asked for meanwhile. An encoder
// asks for a block as soon as the warp's block before it is coded, when its registers are free
// again: the block arrives while the tile gets its position and its payloads are written.
inline constexpr uint32_t kLineBytes = 128;
__device__ __forceinline__ void fetch_ahead(const uint8_t* memory) {
#if defined(MEMSWAP_CUDA_EMULATOR)
  (void)*static_cast<const volatile uint8_t*>(memory);  // which has to be somebody's
#else
  asm volatile("prefetch.global.L2 [%0];" ::"l"(memory));
#endif
}

// Each byte of a word the same.
__device__ __forceinline__ constexpr uint32_t bytes_of(uint32_t byte) { return byte * 0x01010101u; }

// Bytewise a - b modulo 256.
__device__ __forceinline__ uint32_t subtract_bytes(uint32_t a, uint32_t b) {
  const uint32_t without_borrow = (a | 0x80808080u) - (b & 0x7f7f7f7fu);
  return without_borrow ^ ((a ^ ~b) & 0x80808080u);
}

// 0x80 in every byte that is at least `bound`, 1 to 128.
template <uint32_t bound>
__device__ __forceinline__ uint32_t at_least(uint32_t bytes) {
  static_assert(bound >= 1 && bound <= 128);
  return (((bytes & 0x7f7f7f7fu) + bytes_of(128 - bound)) | bytes) & 0x80808080u;
}

__device__ __forceinline__ uint32_t not_zero(uint32_t bytes) { return at_least<1>(bytes); }

// PRMT as it is: where a selector's fourth bit is set, the byte's sign in all bits. __byte_perm
// knows no such bit, and clears it first, which costs an instruction where selectors are no
// constant.
__device__ __forceinline__ uint32_t permute(uint32_t low, uint32_t high, uint32_t selector) {
#if defined(MEMSWAP_CUDA_EMULATOR)
  const uint32_t bytes = __byte_perm(low, high, selector);
  const uint32_t signs = (bytes >> 7 & 0x01010101u) * 0xff;
  uint32_t repeated = 0;  // the bytes whose selector asks for a sign
  for (uint32_t i = 0; i < 4; ++i) {
    repeated |= (selector >> (4 * i + 3) & 1) * 0xffu << (8 * i);
  }
  return (bytes & ~repeated) | (signs & repeated);
#else
  uint32_t permuted;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(permuted) : "r"(low), "r"(high), "r"(selector));
  return permuted;
#endif
}

// Bits of `ones` where the mask has them, else of `zeros`. The compiler takes two instructions for
// what LOP3 does in one.
__device__ __forceinline__ uint32_t select_bits(uint32_t mask, uint32_t ones, uint32_t zeros) {
#if defined(MEMSWAP_CUDA_EMULATOR)
  return (ones & mask) | (zeros & ~mask);
#else
  uint32_t selected;
  asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(selected) : "r"(mask), "r"(ones), "r"(zeros));
  return selected;
#endif
}

// x * factor + y, one instruction. Where bits do not meet the compiler takes two, a shift and a
// LOP3.
__device__ __forceinline__ uint32_t multiply_add(uint32_t x, uint32_t factor, uint32_t y) {
#if defined(MEMSWAP_CUDA_EMULATOR)
  return x * factor + y;
#else
  uint32_t sum;
  asm("mad.lo.u32 %0, %1, %2, %3;" : "=r"(sum) : "r"(x), "r"(factor), "r"(y));
  return sum;
#endif
}

// The place of the highest bit of a number that is not 0: one instruction. On sm_100 the compiler
// takes three for 31 - __clz.
__device__ __forceinline__ uint32_t highest_bit(uint32_t number) {
#if defined(MEMSWAP_CUDA_EMULATOR)
  return 31 - __clz(static_cast<int>(number));
#else
  uint32_t place;
  asm("bfind.u32 %0, %1;" : "=r"(place) : "r"(number));
  return place;
#endif
}

// 0xff in every byte whose top bit is set, else 0.
__device__ __forceinline__ uint32_t spread_top_bits(uint32_t bytes) {
  return permute(bytes, 0, 0xba98);
}

// [Note: pipes] On sm_80 and later a processor's integer pipe takes 64 lanes a clock (logic,
// shifts, comparisons, PRMT), and so does its multiplying pipe (IMAD, IDP.4A). These kernels are
// bound by the first, so bits are gathered by products of bytes: `weights` puts four of them side
// by side.
__device__ __forceinline__ uint32_t gather_bytes(uint32_t bytes, uint32_t weights,
                                                 uint32_t more = 0) {
  return __dp4a(bytes, weights, more);
}

// A row's mask of 8 bits, times `unit`, from flags that are 0 or `unit` in each byte of two words.
__device__ __forceinline__ uint32_t gather_row(uint32_t flags0, uint32_t flags1) {
  return gather_bytes(flags1, 0x80402010u, gather_bytes(flags0, 0x08040201u));
}

// Byte q: row q's mask, from all rows' as gather_row has them where `unit` is 128.
__device__ __forceinline__ uint32_t join_rows(const uint32_t (&rows)[kRows]) {
  return ((rows[0] + (rows[1] << 8) + (rows[2] << 16)) >> 7) + (rows[3] << 17);
}

// The lowest bits of the four bytes, side by side.
__device__ __forceinline__ uint32_t gather_bits(uint32_t bytes) {
  return (bytes * 0x01020408u) >> 24 & 0xfu;
}

// The same where bytes are 0 or 1: one multiplication, one shift.
__device__ __forceinline__ uint32_t gather_flags(uint32_t flags) {
  return (flags * 0x01020408u) >> 24;
}

// Bits 0 to 3 as the lowest bits of four bytes.
__device__ __forceinline__ uint32_t spread_bits(uint32_t bits) {
  return ((bits & 0xfu) * 0x00204081u) & 0x01010101u;
}

// Four 2-bit fields in the low byte <-> one in each byte.
__device__ __forceinline__ uint32_t pack_pairs(uint32_t bytes) {
  bytes = (bytes | bytes >> 6) & 0x000f000fu;
  return (bytes | bytes >> 12) & 0xffu;
}
__device__ __forceinline__ uint32_t spread_pairs(uint32_t pairs) {
  pairs = ((pairs & 0xffu) | pairs << 12) & 0x000f000fu;
  return (pairs | pairs << 6) & 0x03030303u;
}

// Eight 2-bit fields of the low half, one in each nibble.
__device__ __forceinline__ uint32_t spread_symbols(uint32_t symbols) {
  symbols = permute(symbols, 0, 0x4140);
  symbols += (symbols & 0x00f000f0u) * 15;
  return symbols + (symbols & 0x0c0c0c0cu) * 3;
}

// Where a lane's marked elements stand among all the marked ones of the block, in the order of
// elements.
struct Ranks {
  uint32_t own;               // byte q: marked elements of row q in this lane
  uint32_t before;            // and in lower lanes
  uint32_t row1, row2, row3;  // marked elements in the rows before row 1, 2, 3
  uint32_t total;

  __device__ __forceinline__ uint32_t first(uint32_t row) const {
    const uint32_t rows_before = row == 0 ? 0 : row == 1 ? row1 : row == 2 ? row2 : row3;
    return gather_bytes(before, 1u << (8 * row), rows_before);
  }
};

// A number and that of the lane `distance` below, where there is one. SHFL says whether there is,
// which the compiler does not use.
__device__ __forceinline__ uint32_t add_from_below(uint32_t number, uint32_t distance,
                                                   [[maybe_unused]] uint32_t lane) {
#if defined(MEMSWAP_CUDA_EMULATOR)
  const uint32_t other = __shfl_up_sync(kAllLanes, number, distance);
  return number + (lane >= distance ? other : 0);
#else
  asm volatile(
      "{\n\t"
      ".reg .b32 other;\n\t"
      ".reg .pred inside;\n\t"
      "shfl.sync.up.b32 other|inside, %0, %1, 0, -1;\n\t"
      "@inside add.u32 %0, %0, other;\n\t"
      "}"
      : "+r"(number)
      : "r"(distance));
  return number;
#endif
}

// Lane 0 adds to a word of global memory; returns what it was, 0 in other lanes. Of atomicAdd the
// compiler makes one addition for all lanes that are there and shuffles what it was, which waits
// for it at once; so the address looks as if it were not the same in all lanes.
__device__ __forceinline__ uint32_t add_of_first_lane(uint32_t* word, uint32_t number,
                                                      uint32_t lane) {
#if defined(MEMSWAP_CUDA_EMULATOR)
  return lane == 0 ? atomicAdd(word, number) : 0;
#else
  uint32_t before = 0;
  asm volatile(
      "{\n\t"
      ".reg .pred first;\n\t"
      ".reg .b64 at;\n\t"
      "setp.eq.u32 first, %3, 0;\n\t"
      "mul.wide.u32 at, %3, 4;\n\t"
      "add.s64 at, at, %1;\n\t"
      "@first atom.global.add.u32 %0, [at], %2;\n\t"
      "}"
      : "+r"(before)
      : "l"(word), "r"(number), "r"(lane)
      : "memory");
  return before;
#endif
}

// A number as it is; what follows from it is computed where it is needed, and not ahead of a branch
// or a loop around it.
__device__ __forceinline__ uint32_t not_ahead(uint32_t number) {
#if !defined(MEMSWAP_CUDA_EMULATOR)
  asm volatile("" : "+r"(number));
#endif
  return number;
}

// counts: byte q says how many elements of row q the lane marks, at most 8. A row's sum may be 256
// and carry into the next byte; the subtraction of the own count takes every such carry back, and
// what is left is at most 248 per row.
__device__ __forceinline__ Ranks rank_rows(uint32_t counts, uint32_t lane) {
  uint32_t sum = counts;
#pragma unroll
  for (uint32_t distance = 1; distance < kLanes; distance *= 2) {
    sum = add_from_below(sum, distance, lane);
  }
  Ranks ranks;
  ranks.own = counts;
  ranks.before = sum - counts;
  const uint32_t before = __shfl_sync(kAllLanes, ranks.before, 31);
  const uint32_t last = __shfl_sync(kAllLanes, counts, 31);
  ranks.row1 = gather_bytes(before, 0x00000001u, gather_bytes(last, 0x00000001u));
  ranks.row2 = gather_bytes(before, 0x00000101u, gather_bytes(last, 0x00000101u));
  ranks.row3 = gather_bytes(before, 0x00010101u, gather_bytes(last, 0x00010101u));
  ranks.total = gather_bytes(before, 0x01010101u, gather_bytes(last, 0x01010101u));
  return ranks;
}

// masks: byte q has a bit for each of the lane's elements of row q.
__device__ __forceinline__ uint32_t count_rows(uint32_t masks) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  // More instructions, but what is below would have float16's encoder spill a register on sm_80.
  return __popc(masks & 0xffu) | __popc(masks & 0xff00u) << 8 | __popc(masks & 0xff0000u) << 16 |
         __popc(masks & 0xff000000u) << 24;
#else
  const uint32_t pairs = (masks & 0x55555555u) + ((masks & 0xaaaaaaaau) >> 1);
  const uint32_t fours = (pairs & 0x33333333u) + ((pairs & 0xccccccccu) >> 2);
  return (fours + (fours >> 4)) & 0x0f0f0f0fu;
#endif
}

// [Note: lanes' bytes] A byte for each of a lane's elements, in shared memory: the lane's 32 bytes
// follow each other, rows 0 and 1 before rows 2 and 3, but the other way round for lanes whose
// accesses would meet those of the lanes 4 below in the same banks. Byte 8 row + column of a lane
// is at that number xor what place_of says of the lane.
__device__ __forceinline__ uint32_t place_of(uint32_t lane) { return lane * 32 | (lane & 4) << 2; }

__device__ __forceinline__ void store_lane(uint32_t* bytes, uint32_t lane,
                                           const uint32_t (&words)[8]) {
  uint4* halves = reinterpret_cast<uint4*>(bytes);
  const uint32_t first = place_of(lane) / 16;
  halves[first] = make_uint4(words[0], words[1], words[2], words[3]);
  halves[first ^ 1] = make_uint4(words[4], words[5], words[6], words[7]);
}

__device__ __forceinline__ void load_lane(const uint32_t* bytes, uint32_t lane,
                                          uint32_t (&words)[8]) {
  const uint4* halves = reinterpret_cast<const uint4*>(bytes);
  const uint32_t first = place_of(lane) / 16;
  const uint4 upper = halves[first], lower = halves[first ^ 1];
  words[0] = upper.x;
  words[1] = upper.y;
  words[2] = upper.z;
  words[3] = upper.w;
  words[4] = lower.x;
  words[5] = lower.y;
  words[6] = lower.z;
  words[7] = lower.w;
}

// Where the marked elements' bytes stand, by rank: kPositions at a time. One loop for all rows: a
// warp goes round it as often as its busiest lane has marks.
inline constexpr uint32_t kPositions = 256;

// If there are no more, and so not in a loop over them: of loops within each other the compiler
// takes the inner one's first turn out of both.
__device__ __forceinline__ void write_few_positions(uint16_t* positions, uint32_t masks,
                                                    const Ranks& ranks, uint32_t lane) {
  const uint32_t place_of_lane = place_of(lane);
  // Byte q: marks of other lanes between the lane's first one and its marks of row q. Each is
  // below 256 where there is such a mark, so that what carries from byte to byte is taken back.
  const uint32_t first = ranks.before & 0xffu;
  const uint32_t others = (ranks.row1 << 8) + (ranks.row2 << 16) + (ranks.row3 << 24) +
                          ranks.before - ranks.own * 0x01010100u - bytes_of(first);
  uint16_t* last = positions + first + __popc(masks) - 1;
#pragma unroll 1
  for (uint32_t left = ranks.total <= kPositions ? masks : 0; left != 0; --last) {
    const uint32_t place = highest_bit(left);  // 8 * row + column
    left ^= 1u << place;
    last[permute(others, 0, place / 8)] = static_cast<uint16_t>(place ^ place_of_lane);
  }
}

// If there are more: ranks `done` to `done` + kPositions - 1.
__device__ __forceinline__ void write_many_positions(uint16_t* positions, uint32_t masks,
                                                     const Ranks& ranks, uint32_t done,
                                                     uint32_t lane) {
  if (ranks.total <= kPositions) {
    return;
  }
  const uint32_t place_of_lane = place_of(lane);
  masks = not_ahead(masks);
  // Rank less the number of the lane's own marks before: two rows in a word.
  const auto start_of = [&](uint32_t row) {
    return ranks.first(row) - __popc(masks & ((1u << (8 * row)) - 1));
  };
  const uint32_t upper = start_of(0) | start_of(1) << 16;
  const uint32_t lower = start_of(2) | start_of(3) << 16;
  uint32_t own = 0u - done;
#pragma unroll 1
  for (uint32_t left = masks; left != 0; left &= left - 1, ++own) {
    const uint32_t place = __ffs(static_cast<int>(left)) - 1;
    const uint32_t start = ((place & 16) != 0 ? lower : upper) >> (2 * (place & 8)) & 0xffffu;
    const uint32_t rank = start + own;
    if (rank < kPositions) {
      positions[rank] = static_cast<uint16_t>(place ^ place_of_lane);
    }
  }
}

// By a mask of four bytes: the PRMT selector that moves the marked bytes to the front, or the first
// bytes to the marked places (byte 4 of PRMT, the second operand's, is 0); and what moves behind as
// many symbols as there are marks.
struct alignas(8) Move {
  uint32_t selector;
  uint32_t behind;
};

// That of the mask in byte `place` of `masks`.
__device__ __forceinline__ Move move_of(const Move* moves, uint32_t masks, uint32_t place) {
  const uint32_t offset = gather_bytes(masks, uint32_t{sizeof(Move)} << (8 * place));
  const uint2 both =
      *reinterpret_cast<const uint2*>(reinterpret_cast<const uint8_t*>(moves) + offset);
  return {both.x, both.y};
}

// Symbols of 2 bits, which are multiplied by 4 for each mark.
__device__ inline Move compact_move(uint32_t mask) {
  Move move{0x4444, 1};
  uint32_t place = 0;
  for (uint32_t i = 0; i < 4; ++i) {
    if (mask >> i & 1) {
      move.selector = (move.selector & ~(0xfu << place)) | i << place;
      move.behind *= 4;
      place += 4;
    }
  }
  return move;
}
// Symbols of 4 bits, which are shifted by 4 for each mark.
__device__ inline Move expand_move(uint32_t mask) {
  Move move{0x4444, 0};
  uint32_t rank = 0;
  for (uint32_t i = 0; i < 4; ++i) {
    if (mask >> i & 1) {
      move.selector = (move.selector & ~(0xfu << 4 * i)) | rank << 4 * i;
      ++rank;
    }
  }
  move.behind = 4 * rank;
  return move;
}

// The eight warps of a tile are a thread block.
struct Tile {
  uint32_t thread;  // 0 .. 255
  uint32_t warp;
  uint32_t lane;
};

__device__ __forceinline__ Tile this_tile() {
  return {threadIdx.x, threadIdx.x / kLanes, threadIdx.x % kLanes};
}

#if !defined(MEMSWAP_CUDA_EMULATOR)
// From sm_90 on, where a thread block's shared memory begins follows from its number in a cluster,
// and the compiler asks for that again at each use, with four instructions. What came from another
// lane it has to keep.
template <class Shared>
__device__ __forceinline__ Shared& shared_of() {
  extern __shared__ __align__(16) unsigned char memory[];
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const uint32_t begin = static_cast<uint32_t>(__cvta_generic_to_shared(memory));
  return *reinterpret_cast<Shared*>(__cvta_shared_to_generic(__shfl_sync(kAllLanes, begin, 0)));
#else
  return *reinterpret_cast<Shared*>(memory);
#endif
}
#endif

}  // namespace memswap::cuda
