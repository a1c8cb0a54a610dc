// Emulated arithmetic beside values computed by hand.
#include "expected_lanes.h"

namespace memswap::test {
namespace {

__m128i words(uint16_t a, uint16_t b, uint16_t c, uint16_t d) {
  const uint16_t first[] = {a, b, c, d, 0xffff, 0xffff, 0xffff, 0xffff};
  return make_lanes<uint16_t, __m128i>([&](size_t i) { return first[i]; });
}

TEST(EmulatedArithmetic, SumsStayInTheirLanes) {
  const __m512i ones = _mm512_set1_epi8(-1);
  expect_all<uint8_t>(_mm512_add_epi8(ones, _mm512_set1_epi8(1)), 0);
  expect_all<uint16_t>(_mm512_add_epi16(ones, _mm512_set1_epi16(2)), 1);
  expect_all<uint32_t>(_mm512_add_epi32(ones, _mm512_set1_epi32(3)), 2);
  expect_all<uint64_t>(_mm512_add_epi64(ones, _mm512_set1_epi64(4)), 3);
  expect_all<uint8_t>(_mm512_sub_epi8(_mm512_setzero_si512(), _mm512_set1_epi8(1)), 255);
  expect_lanes<uint8_t>(_mm512_sub_epi8(count_from(100), count_from(0)),
                        [](size_t) { return 100; });
}

TEST(EmulatedArithmetic, AMaskedSumKeepsTheOtherLanes) {
  expect_lanes<uint8_t>(_mm512_mask_add_epi8(_mm512_set1_epi8(9), 0x8000000000000005, count_from(0),
                                             _mm512_set1_epi8(100)),
                        [](size_t i) { return i == 0 || i == 2 || i == 63 ? 100 + i : 9; });
}

TEST(EmulatedArithmetic, ExtremesAreThoseOfNumbersWithoutSign) {
  const __m512i high = _mm512_set1_epi64(static_cast<long long>(0x8000000000000000));
  const __m512i low = _mm512_set1_epi64(0x7fffffffffffffff);
  expect_all<uint64_t>(_mm512_min_epu64(high, low), 0x7fffffffffffffff);
  expect_all<uint64_t>(_mm512_min_epu32(high, low), 0x7fffffff00000000);
  expect_all<uint64_t>(_mm512_min_epu16(high, low), 0x7fff000000000000);
  expect_all<uint64_t>(_mm512_min_epu8(high, low), 0x7f00000000000000);
  expect_all<uint64_t>(_mm512_max_epu8(high, low), 0x80ffffffffffffff);
  const __m256i high256 = _mm512_castsi512_si256(high), low256 = _mm512_castsi512_si256(low);
  expect_all<uint64_t>(_mm256_min_epu8(high256, low256), 0x7f00000000000000);
  expect_all<uint64_t>(_mm256_min_epu16(high256, low256), 0x7fff000000000000);
  const __m128i high128 = _mm256_castsi256_si128(high256), low128 = _mm256_castsi256_si128(low256);
  expect_all<uint64_t>(_mm_min_epu8(high128, low128), 0x7f00000000000000);
  expect_all<uint64_t>(_mm_min_epu16(high128, low128), 0x7fff000000000000);
}

TEST(EmulatedArithmetic, AnAverageIsRoundedUp) {
  expect_all<uint8_t>(_mm512_avg_epu8(_mm512_set1_epi8(0), _mm512_set1_epi8(1)), 1);
  expect_all<uint8_t>(_mm512_avg_epu8(_mm512_set1_epi8(-2), _mm512_set1_epi8(-1)), 255);
  expect_all<uint8_t>(_mm512_avg_epu8(_mm512_set1_epi8(-128), _mm512_set1_epi8(16)), 72);
}

TEST(EmulatedArithmetic, AProductIsOfTheLowerHalves) {
  const __m512i a = _mm512_set1_epi64(static_cast<long long>(0xdeadbeefffffffff));
  expect_all<uint64_t>(_mm512_mul_epu32(a, a), 0xfffffffe00000001);
}

TEST(EmulatedArithmetic, MaddubsSaturatesAndOnlyItsSecondOperandHasSigns) {
  const auto of = [](unsigned a0, unsigned a1, unsigned b0, unsigned b1) {
    return _mm512_maddubs_epi16(_mm512_set1_epi16(static_cast<short>(a0 | a1 << 8)),
                                _mm512_set1_epi16(static_cast<short>(b0 | b1 << 8)));
  };
  expect_all<int16_t>(of(200, 3, 0xff, 2), -200 + 6);
  expect_all<int16_t>(of(255, 255, 0x80, 0x80), -32768);
  expect_all<int16_t>(of(255, 255, 127, 127), 32767);
  expect_all<int16_t>(of(13, 7, 1, 16), 13 + 112);  // two symbols of 4 bits
}

TEST(EmulatedArithmetic, DpbusdAddsFourProductsAndWraps) {
  const auto of = [](uint32_t sum, uint32_t a, uint32_t b) {
    return _mm512_dpbusd_epi32(_mm512_set1_epi32(static_cast<int>(sum)),
                               _mm512_set1_epi32(static_cast<int>(a)),
                               _mm512_set1_epi32(static_cast<int>(b)));
  };
  expect_all<uint32_t>(of(0, 0x02000301, 0x40100401), 1 + 12 + 128);  // symbols of 2 bits
  expect_all<int32_t>(of(5, 0xffffffff, 0x80808080), 5 - 4 * 255 * 128);
  expect_all<uint32_t>(of(0x7fffffff, 1, 1), 0x80000000);
  expect_all<int32_t>(of(0, 0xc8, 0xff), -200);
}

TEST(EmulatedArithmetic, SadSumsDistancesOfEightBytes) {
  expect_lanes<uint64_t>(_mm512_sad_epu8(count_from(0), _mm512_setzero_si512()),
                         [](size_t i) { return 64 * i + 28; });
  expect_all<uint64_t>(_mm512_sad_epu8(_mm512_setzero_si512(), _mm512_set1_epi8(-1)), 2040);
  expect_all<uint64_t>(_mm512_sad_epu8(count_from(7), count_from(10)), 24);
}

TEST(EmulatedArithmetic, MinposIsTheFirstOfTheLeastWords) {
  expect_lanes<uint16_t>(_mm_minpos_epu16(words(9, 3, 7, 3)), [](size_t i) {
    return i == 0 ? 3 : i == 1 ? 1 : 0;
  });
  expect_lanes<uint16_t>(_mm_minpos_epu16(words(0x8001, 0x9000, 0x8000, 0xffff)), [](size_t i) {
    return i == 0 ? 0x8000 : i == 1 ? 2 : 0;
  });
}

TEST(EmulatedArithmetic, ReductionsTakeAllLanes) {
  EXPECT_EQ(_mm512_reduce_add_epi64(_mm512_setr_epi64(1, 10, 100, 1000, -1, 2, 3, 4)), 1119);
  const long long most = 0x7fffffffffffffff;
  EXPECT_EQ(_mm512_reduce_add_epi64(_mm512_setr_epi64(most, 1, 0, 0, 0, 0, 0, 0)), -most - 1);
  EXPECT_EQ(_mm512_reduce_min_epu64(_mm512_setr_epi64(-1, -2, most, -3, -4, -5, -6, -7)), most);
  const auto halves = [](uint32_t i) { return i == 15 ? 0x7fffffff : 0x80000000 + i; };
  EXPECT_EQ(_mm512_reduce_min_epu32(make_lanes<uint32_t>(halves)), 0x7fffffffu);
}

}  // namespace
}  // namespace memswap::test
