// Decoders of layout sparse: survivors are decoded as a block of their own, then gathered by the
// bitmap.

#include "decode.cuh"

namespace memswap::cuda {

// Which of a lane's places are among the first `count` of 1024, byte q: row q.
__device__ __forceinline__ uint32_t first_places(uint32_t count, uint32_t lane) {
  uint32_t valid = 0;
#pragma unroll
  for (uint32_t row = 0; row < kRows; ++row) {
    const uint32_t place = row * kRowElements + lane * kLaneColumns;
    const uint32_t here = count > place ? min(count - place, kLaneColumns) : 0;
    valid |= ((1u << here) - 1) << (8 * row);
  }
  return valid;
}

// The staged part of a payload: bytes [0, bytes) are there, the others read as 0.
struct StagedBytes {
  const uint8_t* first;
  uint32_t bytes;

  __device__ __forceinline__ uint32_t operator[](uint32_t i) const {
    return i < bytes ? first[i] : 0u;
  }
};

template <frame::Dtype kDtype>
__device__ __forceinline__ bool decode_sparse(const BlockRecord& record, const DecodeFrame& frame,
                                              const Sink<Float<kDtype>::kWidth>& sink,
                                              DecodeMemory& memory, const Move* expand,
                                              uint32_t warp, uint32_t lane, uint64_t& checksum) {
  using Parts = Float<kDtype>;
  uint32_t masks;  // the survivors among a lane's elements; byte q: row q
  const uint32_t planes =
      read_bitmap(record.payload, record.units * frame::kUnitBytes, record.packed, lane, masks);
  if (planes == kDamaged) {
    return false;
  }
  const uint32_t survivors = rank_rows(count_rows(masks), lane).total;

  // Byte planes stay where they are; what follows them is staged from the unit on in which it
  // begins.
  const uint32_t plane_end = planes + Parts::kLowPlanes * survivors;
  const uint32_t first_unit = plane_end / frame::kUnitBytes;
  if (first_unit > record.units ||
      (record.units - first_unit + 1) * frame::kUnitBytes > kDecodeStageBytes) {
    return false;
  }
  const uint32_t bytes = (record.units - first_unit) * frame::kUnitBytes;
  const uint32_t four = plane_end % frame::kUnitBytes;
  const uint32_t two = four + (Parts::kRestBits & 4 ? (4 * survivors + 7) / 8 : 0);
  const uint32_t one = two + (Parts::kRestBits & 2 ? (2 * survivors + 7) / 8 : 0);
  const uint32_t codes = one + (Parts::kRestBits & 1 ? (survivors + 7) / 8 : 0);
  const uint32_t signs = codes + (2 * survivors + 7) / 8;
  const bool has_signs = record.mode == frame::kSignedZeros;
  const uint32_t begin = signs + (has_signs ? (frame::kBlockElements - survivors + 7) / 8 : 0);
  if (begin > bytes) {
    return false;
  }
  __syncwarp();  // the block before this one has been read
  stage_payload(memory, record.payload + first_unit * frame::kUnitBytes, record.units - first_unit,
                lane);
  __syncwarp();

  const StagedBytes staged{memory.bytes(), bytes};
  const uint32_t valid = first_places(survivors, lane);
  uint32_t low_codes[2] = {0, 0};
#pragma unroll
  for (uint32_t row = 0; row < kRows; ++row) {
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) {
      low_codes[h] |= spread_pairs(staged[codes + row * 64 + lane * 2 + h]) << (2 * row);
    }
  }
  uint32_t e[8];
  const uint32_t behind =
      decode_lq2<true>(memory, expand, low_codes, record.center, valid, begin, bytes, lane, e);
  if (behind == kDamaged || first_unit + (behind + 7) / frame::kUnitBytes != record.units) {
    return false;
  }
  __syncwarp();  // all lanes have their exponents
  // The survivors' top bytes take the place of their exponents, in the order of elements.
#pragma unroll
  for (uint32_t row = 0; row < kRows; ++row) {
    uint32_t top[2];
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) {
      uint32_t rest = 0;
      if constexpr ((Parts::kRestBits & 4) != 0) {
        const uint32_t at = four + row * 128 + lane * 4 + 2 * h;
        const uint32_t low = staged[at], high = staged[at + 1];
        rest = (low | high << 16) & 0x000f000fu;
        rest |= (low << 4 | high << 20) & 0x0f000f00u;
      }
      if constexpr ((Parts::kRestBits & 2) != 0) {
        rest |= spread_pairs(staged[two + row * 64 + lane * 2 + h]);
      }
      if constexpr ((Parts::kRestBits & 1) != 0) {
        rest |= spread_bits(staged[one + row * 32 + lane] >> (4 * h)) << (Parts::kRestBits & 6);
      }
      top[h] = Parts::top(e[2 * row + h], rest);
    }
    reinterpret_cast<uint2*>(memory.exponents)[row * kLanes + lane] = make_uint2(top[0], top[1]);
  }
  __syncwarp();

  // Computed once more, because in the meantime they would take registers that are needed.
  const Ranks ranks = rank_rows(count_rows(masks), lane);
  const uint8_t* tops = reinterpret_cast<const uint8_t*>(memory.exponents);
#pragma unroll 1  // four rows at once would take too many registers
  for (uint32_t row = 0; row < kRows; ++row) {
    uint32_t low[Parts::kLowWords] = {}, top[2] = {0, 0}, words[Parts::kWords];
    uint32_t rank = ranks.first(row);
#pragma unroll
    for (uint32_t i = 0; i < kLaneColumns; ++i) {
      const uint32_t shift = 8 * (i % 4);
      if (masks >> (8 * row + i) & 1) {
        top[i / 4] |= uint32_t{tops[rank]} << shift;
#pragma unroll
        for (int p = 0; p < Parts::kLowPlanes; ++p) {
          low[2 * p + i / 4] |= uint32_t{record.payload[planes + p * survivors + rank]} << shift;
        }
        ++rank;
      } else if (has_signs) {
        const uint32_t zero = row * kRowElements + lane * kLaneColumns + i - rank;
        const uint32_t sign = staged[signs + zero / 8] >> (zero % 8) & 1;
        (Parts::kLowPlanes == 0 ? top : low)[i / 4] |= sign << shift;
      }
    }
    Parts::join(low, top, words);
    finish_row(sink, frame.verify, warp, row, lane, words, checksum);
  }
  return true;
}

template <frame::Dtype kDtype>
struct SparseDecoder {
  static constexpr uint32_t kWidth = Float<kDtype>::kWidth;
  static constexpr uint32_t kTiles = kDtype == frame::Dtype::kFp64 ? kLeastTiles : kTilesAtOnce;
  static constexpr bool kReportsHeaders = false;

  __device__ static constexpr bool takes(frame::Layout layout) {
    return layout == frame::Layout::kSparse;
  }

  __device__ static __forceinline__ bool decode(const BlockRecord& record, const DecodeFrame& frame,
                                                const Sink<kWidth>& sink, const uint8_t* slab,
                                                DecodeMemory& memory, const Move* expand,
                                                uint32_t warp, uint32_t lane, uint64_t& checksum) {
    if (record.mode == frame::kLiteral) {
      return decode_literal(record, frame, sink, slab, warp, lane, checksum);
    }
    return decode_sparse<kDtype>(record, frame, sink, memory, expand, warp, lane, checksum);
  }
};

DecodeKernel* sparse_decode_kernel(frame::Dtype dtype) {
  using frame::Dtype;
  switch (dtype) {
    case Dtype::kBf16:
      return decode_kernel<SparseDecoder<Dtype::kBf16>>();
    case Dtype::kFp16:
      return decode_kernel<SparseDecoder<Dtype::kFp16>>();
    case Dtype::kFp32:
      return decode_kernel<SparseDecoder<Dtype::kFp32>>();
    case Dtype::kFp64:
      return decode_kernel<SparseDecoder<Dtype::kFp64>>();
    case Dtype::kE4m3:
      return decode_kernel<SparseDecoder<Dtype::kE4m3>>();
    case Dtype::kE5m2:
      return decode_kernel<SparseDecoder<Dtype::kE5m2>>();
    default:
      return nullptr;
  }
}

}  // namespace memswap::cuda
