#include "emulated/arithmetic.h"

#include <algorithm>

#include "loops.h"

using namespace memswap::emulated;

namespace {

constexpr auto kAdd = [](auto a, auto b) { return a + b; };
constexpr auto kMinimum = [](auto a, auto b) { return std::min(a, b); };

// Of the bytes from lane `first` on, a's without sign and b's with one.
int product(const __m512i& a, const __m512i& b, size_t at) {
  return a.byte[at] * static_cast<int8_t>(b.byte[at]);
}

}  // namespace

__m512i _mm512_add_epi8(__m512i a, __m512i b) { return map<uint8_t>(a, b, kAdd); }
__m512i _mm512_add_epi16(__m512i a, __m512i b) { return map<uint16_t>(a, b, kAdd); }
__m512i _mm512_add_epi32(__m512i a, __m512i b) { return map<uint32_t>(a, b, kAdd); }
__m512i _mm512_add_epi64(__m512i a, __m512i b) { return map<uint64_t>(a, b, kAdd); }
__m512i _mm512_mask_add_epi8(__m512i other, __mmask64 chosen, __m512i a, __m512i b) {
  return merge(other, chosen, _mm512_add_epi8(a, b));
}
__m512i _mm512_sub_epi8(__m512i a, __m512i b) {
  return map<uint8_t>(a, b, [](uint8_t x, uint8_t y) { return x - y; });
}

__m512i _mm512_min_epu8(__m512i a, __m512i b) { return map<uint8_t>(a, b, kMinimum); }
__m512i _mm512_min_epu16(__m512i a, __m512i b) { return map<uint16_t>(a, b, kMinimum); }
__m512i _mm512_min_epu32(__m512i a, __m512i b) { return map<uint32_t>(a, b, kMinimum); }
__m512i _mm512_min_epu64(__m512i a, __m512i b) { return map<uint64_t>(a, b, kMinimum); }
__m512i _mm512_max_epu8(__m512i a, __m512i b) {
  return map<uint8_t>(a, b, [](uint8_t x, uint8_t y) { return std::max(x, y); });
}
__m256i _mm256_min_epu8(__m256i a, __m256i b) { return map<uint8_t>(a, b, kMinimum); }
__m256i _mm256_min_epu16(__m256i a, __m256i b) { return map<uint16_t>(a, b, kMinimum); }
__m128i _mm_min_epu8(__m128i a, __m128i b) { return map<uint8_t>(a, b, kMinimum); }
__m128i _mm_min_epu16(__m128i a, __m128i b) { return map<uint16_t>(a, b, kMinimum); }

__m512i _mm512_avg_epu8(__m512i a, __m512i b) {
  return map<uint8_t>(a, b, [](uint32_t x, uint32_t y) { return (x + y + 1) / 2; });
}

__m512i _mm512_mul_epu32(__m512i a, __m512i b) {
  return map<uint64_t>(a, b, [](uint64_t x, uint64_t y) {
    return uint64_t{static_cast<uint32_t>(x)} * static_cast<uint32_t>(y);
  });
}

__m512i _mm512_maddubs_epi16(__m512i a, __m512i b) {
  return make_lanes<int16_t>([&](size_t i) {
    return std::clamp(product(a, b, 2 * i) + product(a, b, 2 * i + 1), -32768, 32767);
  });
}

__m512i _mm512_dpbusd_epi32(__m512i sum, __m512i a, __m512i b) {
  const auto sums = lanes_of<uint32_t>(sum);
  return make_lanes<uint32_t>([&](size_t i) {
    int products = 0;
    for (size_t j = 0; j < 4; ++j) {
      products += product(a, b, 4 * i + j);
    }
    return sums[i] + static_cast<uint32_t>(products);
  });
}

__m512i _mm512_sad_epu8(__m512i a, __m512i b) {
  return make_lanes<uint64_t>([&](size_t i) {
    uint64_t sum = 0;
    for (size_t j = 8 * i; j < 8 * i + 8; ++j) {
      sum += static_cast<uint64_t>(std::max(a.byte[j], b.byte[j]) - std::min(a.byte[j], b.byte[j]));
    }
    return sum;
  });
}

__m128i _mm_minpos_epu16(__m128i a) {
  const auto words = lanes_of<uint16_t>(a);
  const auto least =
      std::min_element(words.begin(), words.end());  // the first, where there are two
  const auto number = static_cast<uint16_t>(least - words.begin());
  return vector_of<__m128i>(Lanes<uint16_t, __m128i>{*least, number});
}

long long _mm512_reduce_add_epi64(__m512i a) {
  uint64_t sum = 0;
  for (const uint64_t lane : lanes_of<uint64_t>(a)) {
    sum += lane;
  }
  return static_cast<long long>(sum);
}

unsigned _mm512_reduce_min_epu32(__m512i a) {
  const auto lanes = lanes_of<uint32_t>(a);
  return *std::min_element(lanes.begin(), lanes.end());
}

unsigned long long _mm512_reduce_min_epu64(__m512i a) {
  const auto lanes = lanes_of<uint64_t>(a);
  return *std::min_element(lanes.begin(), lanes.end());
}
