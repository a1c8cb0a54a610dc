#include "emulated/vectors.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "loops.h"

namespace memswap::emulated {

void fault(const char* why) {
  std::fprintf(stderr, "the processor would fault: %s\n", why);
  std::abort();
}

namespace {

template <typename Lane>
__m512i broadcast(Lane value) {
  return make_lanes<Lane>([&](size_t) { return value; });
}

template <typename Part, typename Whole>
Part part_of(const Whole& whole, int number) {
  Part part;
  std::memcpy(&part, whole.byte + number * sizeof(part), sizeof(part));
  return part;
}

}  // namespace

}  // namespace memswap::emulated

using namespace memswap::emulated;

__m512i _mm512_setzero_si512() { return broadcast<uint8_t>(0); }
__m512i _mm512_set1_epi8(char value) { return broadcast(value); }
__m512i _mm512_set1_epi16(short value) { return broadcast(value); }
__m512i _mm512_set1_epi32(int value) { return broadcast(value); }
__m512i _mm512_set1_epi64(long long value) { return broadcast(value); }

__m512i _mm512_setr_epi64(long long e0, long long e1, long long e2, long long e3, long long e4,
                          long long e5, long long e6, long long e7) {
  return vector_of<__m512i>(Lanes<long long, __m512i>{e0, e1, e2, e3, e4, e5, e6, e7});
}

__m128i _mm_setr_epi8(char e0, char e1, char e2, char e3, char e4, char e5, char e6, char e7,
                      char e8, char e9, char e10, char e11, char e12, char e13, char e14,
                      char e15) {
  return vector_of<__m128i>(
      Lanes<char, __m128i>{e0, e1, e2, e3, e4, e5, e6, e7, e8, e9, e10, e11, e12, e13, e14, e15});
}

__m512i _mm512_broadcast_i32x4(__m128i a) {
  return make_lanes<uint8_t>([&](size_t i) { return a.byte[i % sizeof(a)]; });
}

__m512i _mm512_castsi256_si512(__m256i a) {
  return make_lanes<uint8_t>([&](size_t i) { return i < sizeof(a) ? a.byte[i] : kUndefinedByte; });
}

__m256i _mm512_castsi512_si256(__m512i a) { return part_of<__m256i>(a, 0); }
__m128i _mm256_castsi256_si128(__m256i a) { return part_of<__m128i>(a, 0); }
__m128i _mm256_extracti128_si256(__m256i a, Immediate<1> half) {
  return part_of<__m128i>(a, half.value);
}
__m256i _mm512_extracti64x4_epi64(__m512i a, Immediate<1> half) {
  return part_of<__m256i>(a, half.value);
}

__m512i _mm512_inserti64x4(__m512i a, __m256i b, Immediate<1> half) {
  std::memcpy(a.byte + half.value * sizeof(b), &b, sizeof(b));
  return a;
}

int _mm_cvtsi128_si32(__m128i a) { return lanes_of<int>(a)[0]; }
