// The bitmap at the head of a payload, plain or packed (docs/format.md section 3).
#pragma once

#include "avx512_bytes.h"

MEMSWAP_AVX512_BEGIN

namespace memswap::cpu::avx512 {
namespace {

inline constexpr uint32_t kBitmapVectors = frame::kBitmapBytes / kLanes;
static_assert(kBitmapVectors == 2 && frame::kByteMapBytes == 2 * sizeof(uint64_t));

// A bit for each element of a block, 64 in a word.
struct alignas(64) Bitmap {
  uint64_t word[kVectors];

  uint32_t count() const {
    uint32_t bits = 0;
    for (const uint64_t bits_of_64 : word) {
      bits += count_bits(bits_of_64);
    }
    return bits;
  }
};

// Writes a bitmap, packed where that is shorter, and up to 64 bytes behind it. Returns the end.
inline uint8_t* encode_bitmap(const Bitmap& bitmap, uint8_t* out, bool& packed) {
  Vector bytes[kBitmapVectors];
  uint64_t not_zero[kBitmapVectors], not_full[kBitmapVectors];
  uint32_t mixed = 0;
  for (uint32_t i = 0; i < kBitmapVectors; ++i) {
    bytes[i] = load(&bitmap.word[8 * i]);
    not_zero[i] = _mm512_test_epi8_mask(bytes[i], bytes[i]);
    not_full[i] = _mm512_cmpneq_epi8_mask(bytes[i], broadcast(255));
    mixed += count_bits(not_zero[i] & not_full[i]);
  }
  packed = frame::kMapsBytes + mixed < frame::kBitmapBytes;
  if (!packed) {
    store(out, bytes[0]);
    store(out + kLanes, bytes[1]);
    return out + frame::kBitmapBytes;
  }
  for (uint32_t i = 0; i < kBitmapVectors; ++i) {
    store64(out + 8 * i, not_zero[i]);
    store64(out + frame::kByteMapBytes + 8 * i, not_full[i]);
  }
  out = append(out + frame::kMapsBytes, not_zero[0] & not_full[0], bytes[0]);
  return append(out, not_zero[1] & not_full[1], bytes[1]);
}

// The reverse. Returns the end, or NULL if it is behind `end` or a byte is in neither map.
inline const uint8_t* decode_bitmap(Bitmap& bitmap, bool packed, const uint8_t* in,
                                    const uint8_t* end) {
  const auto bytes = static_cast<size_t>(end - in);
  if (!packed) {
    if (bytes < frame::kBitmapBytes) {
      return nullptr;
    }
    store(&bitmap.word[0], load(in));
    store(&bitmap.word[8], load(in + kLanes));
    return in + frame::kBitmapBytes;
  }
  if (bytes < frame::kMapsBytes) {
    return nullptr;
  }
  uint64_t not_zero[kBitmapVectors], mixed[kBitmapVectors];
  uint64_t said = ~uint64_t{0};
  for (uint32_t i = 0; i < kBitmapVectors; ++i) {
    not_zero[i] = load64(in + 8 * i);
    const uint64_t not_full = load64(in + frame::kByteMapBytes + 8 * i);
    said &= not_zero[i] | not_full;
    mixed[i] = not_zero[i] & not_full;
  }
  in += frame::kMapsBytes;
  const uint32_t first = count_bits(mixed[0]);
  const uint32_t both = first + count_bits(mixed[1]);
  if (said != ~uint64_t{0} || both > bytes - frame::kMapsBytes) {
    return nullptr;
  }
  store(&bitmap.word[0],
        _mm512_mask_expand_epi8(_mm512_movm_epi8(not_zero[0]), mixed[0], load(in)));
  store(&bitmap.word[8],
        _mm512_mask_expand_epi8(_mm512_movm_epi8(not_zero[1]), mixed[1], load(in + first)));
  return in + both;
}

}  // namespace
}  // namespace memswap::cpu::avx512

MEMSWAP_AVX512_END
