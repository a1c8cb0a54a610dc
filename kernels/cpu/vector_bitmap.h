// The bitmap at the head of a payload, plain or packed (docs/format.md section 3).
#pragma once

#include "vector_bytes.h"

MEMSWAP_VECTOR_BEGIN

namespace memswap::cpu::MEMSWAP_ISA {
namespace {

inline constexpr uint32_t kBitmapVectors = frame::kBitmapBytes / kLanes;

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
  Mask not_zero[kBitmapVectors], not_full[kBitmapVectors];
  uint32_t mixed = 0;
  for (uint32_t i = 0; i < kBitmapVectors; ++i) {
    const Vector bytes = load(bitmap.byte + kLanes * i);
    not_zero[i] = mask_of(nonzero(bytes));
    not_full[i] = mask_of(~equal(bytes, broadcast(255)));
    mixed += count_of(not_zero[i] & not_full[i]);
  }
  packed = frame::kMapsBytes + mixed < frame::kBitmapBytes;
  if (!packed) {
    for (uint32_t i = 0; i < frame::kBitmapBytes; i += kLanes) {
      store(out + i, load(bitmap.byte + i));
    }
    return out + frame::kBitmapBytes;
  }
  uint8_t* end = out + frame::kMapsBytes;
  for (uint32_t i = 0; i < kBitmapVectors; ++i) {
    store_mask(out + kLanes / 8 * i, not_zero[i]);
    store_mask(out + frame::kByteMapBytes + kLanes / 8 * i, not_full[i]);
    end = append(end, not_zero[i] & not_full[i], load(bitmap.byte + kLanes * i));
  }
  return end;
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
    const Lanes not_zero = load_lanes(in + i / 8);
    const Lanes not_full = load_lanes(in + frame::kByteMapBytes + i / 8);
    const Vector full = only(not_zero & ~not_full, broadcast(255));
    store(bitmap.byte + i, Expansion(not_zero & not_full).take_over(full, next));
  }
  return next;
}

}  // namespace
}  // namespace memswap::cpu::MEMSWAP_ISA

MEMSWAP_VECTOR_END
