// The bitmap at the head of a payload, plain or packed (docs/format.md section 3). Shared by the
// scalar files alone.
#pragma once

#include <stdint.h>
#include <string.h>

#include "memswap/frame.h"
#include "planes.h"

namespace memswap::cpu::scalar {

// How a block's bitmap is written: bits j of Z and F say what byte j is not.
struct Bitmap {
  uint8_t bytes[frame::kBitmapBytes];
  uint8_t not_zero[frame::kByteMapBytes];  // Z
  uint8_t not_full[frame::kByteMapBytes];  // F
  uint32_t packed_bytes;

  bool packed() const { return packed_bytes < frame::kBitmapBytes; }
  uint32_t payload_bytes() const { return packed() ? packed_bytes : frame::kBitmapBytes; }
};

constexpr bool bit_of(const uint8_t* bits, uint32_t i) { return (bits[i / 8] >> i % 8 & 1) != 0; }

// Of 1024 values that are 0 or 1.
inline Bitmap bitmap_of(const uint8_t* values) {
  Bitmap bitmap{};
  put_planes(bitmap.bytes, values, 0, 1);
  bitmap.packed_bytes = frame::kMapsBytes;
  for (uint32_t j = 0; j < frame::kBitmapBytes; ++j) {
    const bool not_zero = bitmap.bytes[j] != 0;
    const bool not_full = bitmap.bytes[j] != 0xff;
    bitmap.not_zero[j / 8] = static_cast<uint8_t>(bitmap.not_zero[j / 8] | not_zero << j % 8);
    bitmap.not_full[j / 8] = static_cast<uint8_t>(bitmap.not_full[j / 8] | not_full << j % 8);
    bitmap.packed_bytes += not_zero && not_full;
  }
  return bitmap;
}

// Returns the end.
inline uint8_t* put_bitmap(uint8_t* out, const Bitmap& bitmap) {
  if (!bitmap.packed()) {
    memcpy(out, bitmap.bytes, frame::kBitmapBytes);
    return out + frame::kBitmapBytes;
  }
  memcpy(out, bitmap.not_zero, frame::kByteMapBytes);
  memcpy(out + frame::kByteMapBytes, bitmap.not_full, frame::kByteMapBytes);
  out += frame::kMapsBytes;
  for (uint32_t j = 0; j < frame::kBitmapBytes; ++j) {
    if (bit_of(bitmap.not_zero, j) && bit_of(bitmap.not_full, j)) {
      *out++ = bitmap.bytes[j];
    }
  }
  return out;
}

// The reverse: 1024 values that are 0 or 1. False if the payload ends before the bitmap does, or if
// a byte is said to be 0x00 and 0xff.
inline bool get_bitmap(PayloadReader& payload, bool packed, uint8_t* values) {
  uint8_t unpacked[frame::kBitmapBytes];
  const uint8_t* bytes = nullptr;
  if (packed) {
    const uint8_t* not_zero = payload.take(frame::kByteMapBytes);
    const uint8_t* not_full = payload.take(frame::kByteMapBytes);
    if (not_zero == nullptr || not_full == nullptr) {
      return false;
    }
    for (uint32_t j = 0; j < frame::kBitmapBytes; ++j) {
      const bool z = bit_of(not_zero, j);
      const bool f = bit_of(not_full, j);
      const uint8_t* byte = z && f ? payload.take(1) : nullptr;
      if (byte == nullptr && z == f) {
        return false;
      }
      unpacked[j] = byte != nullptr ? *byte : z ? uint8_t{0xff} : uint8_t{0};
    }
    bytes = unpacked;
  } else {
    bytes = payload.take(frame::kBitmapBytes);
    if (bytes == nullptr) {
      return false;
    }
  }
  memset(values, 0, frame::kBlockElements);
  get_planes(bytes, values, 0, 1);
  return true;
}

}  // namespace memswap::cpu::scalar
