// The bitmap at the head of a payload, plain or packed (docs/format.md section 3). Its byte
// 32 q + t is lane t's of row q, so a row's words of Z and F are votes of the warp.
#pragma once

#include "warp.cuh"

namespace memswap::cuda {

inline constexpr uint32_t kDamaged = 0xffffffff;  // instead of the byte behind what was read

struct WrittenBitmap {
  uint32_t bytes;
  bool is_packed;
};

// Byte q of `masks` is row q's; `payload` is aligned to 16 bytes.
__device__ __forceinline__ WrittenBitmap write_bitmap(uint8_t* payload, uint32_t masks,
                                                      uint32_t lane) {
  uint32_t z[kRows], f[kRows], behind = frame::kMapsBytes;
#pragma unroll
  for (uint32_t row = 0; row < kRows; ++row) {
    const uint32_t byte = masks >> (8 * row) & 0xffu;
    z[row] = __ballot_sync(kAllLanes, byte != 0);
    f[row] = __ballot_sync(kAllLanes, byte != 0xff);
    behind += __popc(z[row] & f[row]);
  }
  const bool is_packed = behind < frame::kBitmapBytes;
  // Whole: a lane's own word of each would be looked up in local memory.
  if (is_packed && lane < 2) {
    reinterpret_cast<uint4*>(payload)[lane] =
        lane == 0 ? make_uint4(z[0], z[1], z[2], z[3]) : make_uint4(f[0], f[1], f[2], f[3]);
  }
  const uint32_t lower_lanes = (1u << lane) - 1;
  uint32_t place = frame::kMapsBytes;
#pragma unroll
  for (uint32_t row = 0; row < kRows; ++row) {
    const uint8_t byte = static_cast<uint8_t>(masks >> (8 * row));
    if (!is_packed) {
      payload[row * kLanes + lane] = byte;
      continue;
    }
    const uint32_t mixed = z[row] & f[row];
    if (mixed >> lane & 1) {
      payload[place + __popc(mixed & lower_lanes)] = byte;
    }
    place += __popc(mixed);
  }
  return {is_packed ? behind : frame::kBitmapBytes, is_packed};
}

// Bytes of a bitmap that was packed.
__device__ __forceinline__ uint32_t packed_bytes(uint32_t masks) {
  uint32_t bytes = frame::kMapsBytes;
#pragma unroll
  for (uint32_t row = 0; row < kRows; ++row) {
    const uint32_t byte = masks >> (8 * row) & 0xffu;
    bytes += __popc(__ballot_sync(kAllLanes, byte != 0 && byte != 0xff));
  }
  return bytes;
}

// The byte behind the bitmap of a payload of `bytes` bytes, aligned to units, or kDamaged.
__device__ __forceinline__ uint32_t read_bitmap(const uint8_t* payload, uint32_t bytes,
                                                bool is_packed, uint32_t lane, uint32_t& masks) {
  masks = 0;
  if (!is_packed) {
    if (bytes < frame::kBitmapBytes) {
      return kDamaged;
    }
#pragma unroll
    for (uint32_t row = 0; row < kRows; ++row) {
      masks |= uint32_t{payload[row * kLanes + lane]} << (8 * row);
    }
    return frame::kBitmapBytes;
  }
  if (bytes < frame::kMapsBytes) {
    return kDamaged;
  }
  const uint2* maps = reinterpret_cast<const uint2*>(payload);
  uint32_t z[kRows], mixed[kRows], behind = frame::kMapsBytes, either = ~0u;
#pragma unroll
  for (uint32_t i = 0; i < kRows / 2; ++i) {
    const uint2 two_z = maps[i], two_f = maps[kRows / 2 + i];
    z[2 * i] = two_z.x;
    z[2 * i + 1] = two_z.y;
    mixed[2 * i] = two_z.x & two_f.x;
    mixed[2 * i + 1] = two_z.y & two_f.y;
    behind += __popc(mixed[2 * i]) + __popc(mixed[2 * i + 1]);
    either &= (two_z.x | two_f.x) & (two_z.y | two_f.y);
  }
  if (either != ~0u || behind > bytes) {
    return kDamaged;
  }
  const uint32_t lower_lanes = (1u << lane) - 1;
  uint32_t place = frame::kMapsBytes;
#pragma unroll
  for (uint32_t row = 0; row < kRows; ++row) {
    uint32_t byte = (z[row] >> lane & 1) * 0xffu;
    if (mixed[row] >> lane & 1) {
      byte = payload[place + __popc(mixed[row] & lower_lanes)];
    }
    masks |= byte << (8 * row);
    place += __popc(mixed[row]);
  }
  return behind;
}

}  // namespace memswap::cuda
