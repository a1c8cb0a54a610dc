#include "emulated/lanes.h"

#include "loops.h"

using namespace memswap::emulated;

namespace {

// Lane by lane, of the low bits of its index: the lane of `a`, or that of `b` behind it.
template <typename Lane>
__m512i permute(const __m512i& index, const __m512i& a, const __m512i& b) {
  const auto indices = lanes_of<Lane>(index);
  const auto x = lanes_of<Lane>(a);
  const auto y = lanes_of<Lane>(b);
  return make_lanes<Lane>([&](size_t i) {
    const size_t from = indices[i] % (2 * x.size());
    return from < x.size() ? x[from] : y[from - x.size()];
  });
}

// Of each 16 bytes, the `half` of `a` and that of `b`.
__m512i unpack(const __m512i& a, const __m512i& b, size_t half) {
  const auto x = lanes_of<uint64_t>(a);
  const auto y = lanes_of<uint64_t>(b);
  return make_lanes<uint64_t>([&](size_t i) { return i % 2 == 0 ? x[i + half] : y[i - 1 + half]; });
}

}  // namespace

__m512i _mm512_permutexvar_epi8(__m512i index, __m512i a) { return permute<uint8_t>(index, a, a); }
__m512i _mm512_mask_permutexvar_epi8(__m512i other, __mmask64 chosen, __m512i index, __m512i a) {
  return merge(other, chosen, _mm512_permutexvar_epi8(index, a));
}
__m512i _mm512_maskz_permutexvar_epi8(__mmask64 chosen, __m512i index, __m512i a) {
  return merge(__m512i{}, chosen, _mm512_permutexvar_epi8(index, a));
}
__m512i _mm512_permutex2var_epi8(__m512i a, __m512i index, __m512i b) {
  return permute<uint8_t>(index, a, b);
}
__m512i _mm512_permutex2var_epi16(__m512i a, __m512i index, __m512i b) {
  return permute<uint16_t>(index, a, b);
}

__m512i _mm512_shuffle_epi8(__m512i a, __m512i index) {
  return make_lanes<uint8_t>([&](size_t i) {
    return index.byte[i] >= 128 ? 0 : a.byte[i / 16 * 16 + index.byte[i] % 16];
  });
}

__m512i _mm512_shuffle_i64x2(__m512i a, __m512i b, Immediate<255> which) {
  const auto x = lanes_of<__m128i>(a);
  const auto y = lanes_of<__m128i>(b);
  return make_lanes<__m128i>(
      [&](size_t i) { return (i < 2 ? x : y)[static_cast<size_t>(which.value >> 2 * i & 3)]; });
}

__m512i _mm512_unpacklo_epi64(__m512i a, __m512i b) { return unpack(a, b, 0); }
__m512i _mm512_unpackhi_epi64(__m512i a, __m512i b) { return unpack(a, b, 1); }

__m512i _mm512_mask_compress_epi8(__m512i other, __mmask64 chosen, __m512i a) {
  size_t next = 0;
  for (size_t i = 0; i < sizeof(a); ++i) {
    if (is_chosen(chosen, i)) {
      other.byte[next++] = a.byte[i];
    }
  }
  return other;
}

__m512i _mm512_mask_expand_epi8(__m512i other, __mmask64 chosen, __m512i a) {
  size_t next = 0;
  for (size_t i = 0; i < sizeof(a); ++i) {
    if (is_chosen(chosen, i)) {
      other.byte[i] = a.byte[next++];
    }
  }
  return other;
}

__m128i _mm512_cvtepi32_epi8(__m512i a) { return convert<uint8_t, uint32_t, __m128i>(a); }
__m256i _mm512_cvtepi16_epi8(__m512i a) { return convert<uint8_t, uint16_t, __m256i>(a); }
__m256i _mm512_cvtepi32_epi16(__m512i a) { return convert<uint16_t, uint32_t, __m256i>(a); }
__m256i _mm512_cvtepi64_epi32(__m512i a) { return convert<uint32_t, uint64_t, __m256i>(a); }
__m512i _mm512_cvtepu16_epi32(__m256i a) { return convert<uint32_t, uint16_t, __m512i>(a); }
__m512i _mm512_cvtepu16_epi64(__m128i a) { return convert<uint64_t, uint16_t, __m512i>(a); }
__m512i _mm512_cvtepu32_epi64(__m256i a) { return convert<uint64_t, uint32_t, __m512i>(a); }
