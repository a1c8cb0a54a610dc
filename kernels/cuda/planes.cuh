// Planes of 8, 4, 2 and 1 bits (docs/format.md section 2), for a lane's columns.
#pragma once

#include "warp.cuh"

namespace memswap::cuda {

// Four columns' pairs of row q stand at bits 2q of a byte.
__device__ __forceinline__ uint32_t pairs_of_row(uint32_t plane, uint32_t row) {
  return plane >> (2 * row) & 0x03030303u;
}

__device__ __forceinline__ void store_pair(uint8_t* to, uint32_t x, uint32_t y) {
  *reinterpret_cast<uint2*>(to) = make_uint2(x, y);
}

// A field of `bits` bits, 0 to 7, one byte per element: planes of 4, 2 and 1 bits from `to` on.
__device__ __forceinline__ void store_planes(uint8_t* to, const uint32_t (&field)[8], uint32_t bits,
                                             uint32_t lane) {
  uint32_t shift = 0;
  if (bits & 4) {
#pragma unroll
    for (uint32_t row = 0; row < 2; ++row) {
      uint32_t plane[2];
#pragma unroll
      for (uint32_t h = 0; h < 2; ++h) {
        plane[h] = (field[2 * row + h] & 0x0f0f0f0fu) | (field[2 * row + 4 + h] & 0x0f0f0f0fu) << 4;
      }
      store_pair(to + row * kRowElements + lane * 8, plane[0], plane[1]);
    }
    to += 512;
    shift = 4;
  }
  if (bits & 2) {
    uint32_t plane[2] = {0, 0};
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) {
      plane[i % 2] |= (field[i] >> shift & 0x03030303u) << (2 * (i / 2));
    }
    store_pair(to + lane * 8, plane[0], plane[1]);
    to += 256;
    shift += 2;
  }
  if (bits & 1) {
#pragma unroll
    for (uint32_t row = 0; row < kRows; ++row) {
      to[row * kLanes + lane] =
          static_cast<uint8_t>(gather_flags(field[2 * row] >> shift & 0x01010101u) |
                               gather_flags(field[2 * row + 1] >> shift & 0x01010101u) << 4);
    }
  }
}

__device__ __forceinline__ void load_planes(const uint8_t* from, uint32_t (&field)[8],
                                            uint32_t bits, uint32_t lane) {
  uint32_t shift = 0;
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) {
    field[i] = 0;
  }
  if (bits & 4) {
#pragma unroll
    for (uint32_t row = 0; row < 2; ++row) {
      const uint2 plane = *reinterpret_cast<const uint2*>(from + row * kRowElements + lane * 8);
      field[2 * row] = plane.x & 0x0f0f0f0fu;
      field[2 * row + 1] = plane.y & 0x0f0f0f0fu;
      field[2 * row + 4] = plane.x >> 4 & 0x0f0f0f0fu;
      field[2 * row + 5] = plane.y >> 4 & 0x0f0f0f0fu;
    }
    from += 512;
    shift = 4;
  }
  if (bits & 2) {
    const uint2 plane = *reinterpret_cast<const uint2*>(from + lane * 8);
#pragma unroll
    for (uint32_t row = 0; row < kRows; ++row) {
      field[2 * row] |= pairs_of_row(plane.x, row) << shift;
      field[2 * row + 1] |= pairs_of_row(plane.y, row) << shift;
    }
    from += 256;
    shift += 2;
  }
  if (bits & 1) {
#pragma unroll
    for (uint32_t row = 0; row < kRows; ++row) {
      const uint32_t byte = from[row * kLanes + lane];
      field[2 * row] |= spread_bits(byte) << shift;
      field[2 * row + 1] |= spread_bits(byte >> 4) << shift;
    }
  }
}

// A byte plane's words of one row.
__device__ __forceinline__ void store_bytes(uint8_t* plane, uint32_t row, uint32_t lane, uint32_t x,
                                            uint32_t y) {
  store_pair(plane + row * kRowElements + lane * kLaneColumns, x, y);
}
__device__ __forceinline__ uint2 load_bytes(const uint8_t* plane, uint32_t row, uint32_t lane) {
  return *reinterpret_cast<const uint2*>(plane + row * kRowElements + lane * kLaneColumns);
}

}  // namespace memswap::cuda
