// The bitmap at the head of a payload, plain or packed (docs/format.md section 3).
#pragma once

#include "vector_expansion.h"

MEMSWAP_VECTOR_BEGIN

namespace memswap::cpu::vector {
namespace {

// A bit for each element of a block.
struct alignas(64) Bitmap {
  uint8_t byte[frame::kBitmapBytes];

  uint32_t count() const {
    uint32_t bits = 0;
    for (uint32_t i = 0; i < frame::kBitmapBytes; i += 8) {
      bits += static_cast<uint32_t>(__builtin_popcountll(load_as<uint64_t>(byte + i)));
    }
    return bits;
  }
};

// Writes a bitmap, packed where that is shorter, and up to a vector behind it. Returns the end.
inline uint8_t* encode_bitmap(const Bitmap& bitmap, uint8_t* out, bool& packed) {
  uint8_t mixed[frame::kBitmapBytes + kLanes];
  uint8_t* mixed_end = mixed;
  uint8_t maps[frame::kMapsBytes];
  for (uint32_t i = 0; i < frame::kBitmapBytes; i += kLanes) {
    const Vector bytes = load(bitmap.byte + i);
    const Mask not_zero = mask_of(lanes_where(bytes != 0));
    const Mask not_full = mask_of(lanes_where(bytes != 255));
    store_mask(maps + i / 8, not_zero);
    store_mask(maps + frame::kByteMapBytes + i / 8, not_full);
    mixed_end = append(mixed_end, not_zero & not_full, bytes);
  }
  const auto mixed_bytes = static_cast<uint32_t>(mixed_end - mixed);
  packed = frame::kMapsBytes + mixed_bytes < frame::kBitmapBytes;
  if (!packed) {
    __builtin_memcpy(out, bitmap.byte, frame::kBitmapBytes);
    return out + frame::kBitmapBytes;
  }
  __builtin_memcpy(out, maps, frame::kMapsBytes);
  __builtin_memcpy(out + frame::kMapsBytes, mixed, mixed_bytes);
  return out + frame::kMapsBytes + mixed_bytes;
}

// The reverse. Returns the end, or NULL if it is behind `end` or a byte is in neither map.
inline const uint8_t* decode_bitmap(Bitmap& bitmap, bool packed, const uint8_t* in,
                                    const uint8_t* end) {
  const auto bytes = static_cast<size_t>(end - in);
  if (!packed) {
    if (bytes < frame::kBitmapBytes) {
      return nullptr;
    }
    __builtin_memcpy(bitmap.byte, in, frame::kBitmapBytes);
    return in + frame::kBitmapBytes;
  }
  if (bytes < frame::kMapsBytes) {
    return nullptr;
  }
  uint32_t mixed = 0;
  for (uint32_t i = 0; i < frame::kByteMapBytes; i += 8) {
    const auto not_zero = load_as<uint64_t>(in + i);
    const auto not_full = load_as<uint64_t>(in + frame::kByteMapBytes + i);
    if ((not_zero | not_full) != ~uint64_t{0}) {
      return nullptr;
    }
    mixed += static_cast<uint32_t>(__builtin_popcountll(not_zero & not_full));
  }
  if (mixed > bytes - frame::kMapsBytes) {
    return nullptr;
  }
  const uint8_t* next = in + frame::kMapsBytes;
  for (uint32_t i = 0; i < frame::kBitmapBytes; i += kLanes) {
    const Vector not_zero = load_bits(in + i / 8);
    const Vector not_full = load_bits(in + frame::kByteMapBytes + i / 8);
    store(bitmap.byte + i, (not_zero & ~not_full) | Expansion(not_zero & not_full).take(next));
  }
  return next;
}

}  // namespace
}  // namespace memswap::cpu::vector

MEMSWAP_VECTOR_END
