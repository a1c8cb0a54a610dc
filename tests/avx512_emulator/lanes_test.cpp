// Emulated permutations, conversions and parts of vectors beside values computed by hand.
#include "expected_lanes.h"

namespace memswap::test {
namespace {

constexpr __mmask64 kEnds = 0x8000000000000001;

__m512i numbers16(unsigned first) {
  return make_lanes<uint16_t>([&](size_t i) { return first + i; });
}

TEST(EmulatedLanes, PermutationsUseTheLowBitsOfAnIndex) {
  const __m512i a = count_from(100);
  const __m512i backwards = make_lanes<uint8_t>([](size_t i) { return 63 - i + i % 4 * 64; });
  expect_lanes<uint8_t>(_mm512_permutexvar_epi8(backwards, a), [](size_t i) { return 163 - i; });
  expect_lanes<uint8_t>(_mm512_mask_permutexvar_epi8(_mm512_set1_epi8(7), kEnds, backwards, a),
                        [](size_t i) { return i % 63 == 0 ? 163 - i : 7; });
  expect_lanes<uint8_t>(_mm512_maskz_permutexvar_epi8(kEnds, backwards, a),
                        [](size_t i) { return i % 63 == 0 ? 163 - i : 0; });
}

TEST(EmulatedLanes, PermutationsOfTwoTakeTheSecondByTheNextBit) {
  const __m512i bytes = make_lanes<uint8_t>([](size_t i) { return i + i % 4 * 64; });
  expect_lanes<uint8_t>(_mm512_permutex2var_epi8(count_from(0), bytes, count_from(128)),
                        [](size_t i) { return i % 2 == 0 ? i : 128 + i; });
  const __m512i words = make_lanes<uint16_t>([](size_t i) { return 31 - i + i % 4 * 32; });
  expect_lanes<uint16_t>(_mm512_permutex2var_epi16(numbers16(0), words, numbers16(1000)),
                         [](size_t i) { return i % 2 == 0 ? 31 - i : 1031 - i; });
}

TEST(EmulatedLanes, AShuffleStaysWithinSixteenBytes) {
  const __m512i index = make_lanes<uint8_t>(
      [](size_t i) { return i % 16 == 5 ? 0x80 + 3 : 15 - i % 16 + i % 8 * 16; });
  expect_lanes<uint8_t>(_mm512_shuffle_epi8(count_from(1), index),
                        [](size_t i) { return i % 16 == 5 ? 0 : 1 + i / 16 * 16 + 15 - i % 16; });
}

TEST(EmulatedLanes, SixteenBytesAreTakenByTwoBitsEach) {
  const __m512i a = count_from(0), b = count_from(64);
  const auto expect = [&](const __m512i& shuffled, std::array<unsigned, 4> from) {
    expect_lanes<uint8_t>(shuffled, [&](size_t i) { return from[i / 16] * 16 + i % 16; });
  };
  expect(_mm512_shuffle_i64x2(a, b, 0x88), {0, 2, 4, 6});
  expect(_mm512_shuffle_i64x2(a, b, 0xdd), {1, 3, 5, 7});
  expect(_mm512_shuffle_i64x2(a, b, 0x44), {0, 1, 4, 5});
  expect(_mm512_shuffle_i64x2(a, b, 0xee), {2, 3, 6, 7});
  expect(_mm512_shuffle_i64x2(a, b, 0x1b), {3, 2, 5, 4});
}

TEST(EmulatedLanes, UnpackingStaysWithinSixteenBytes) {
  const __m512i a = _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7);
  const __m512i b = _mm512_setr_epi64(10, 11, 12, 13, 14, 15, 16, 17);
  expect_lanes<uint64_t>(_mm512_unpacklo_epi64(a, b),
                         [](size_t i) { return i % 2 == 0 ? i : 10 + i - 1; });
  expect_lanes<uint64_t>(_mm512_unpackhi_epi64(a, b),
                         [](size_t i) { return i % 2 == 0 ? i + 1 : 10 + i; });
}

TEST(EmulatedLanes, CompressingKeepsTheOthersBehindTheRow) {
  const __m512i kept = count_from(100);
  const __mmask64 odd = 0xaaaaaaaaaaaaaaaa;
  expect_lanes<uint8_t>(_mm512_mask_compress_epi8(kept, odd, count_from(0)),
                        [](size_t i) { return i < 32 ? 2 * i + 1 : 100 + i; });
  expect_lanes<uint8_t>(_mm512_mask_compress_epi8(kept, 0, count_from(0)),
                        [](size_t i) { return 100 + i; });
}

TEST(EmulatedLanes, ExpandingKeepsTheOthersInTheirPlaces) {
  const __mmask64 odd = 0xaaaaaaaaaaaaaaaa;
  expect_lanes<uint8_t>(_mm512_mask_expand_epi8(count_from(100), odd, count_from(0)),
                        [](size_t i) { return i % 2 == 1 ? i / 2 : 100 + i; });
  expect_lanes<uint8_t>(_mm512_mask_expand_epi8(count_from(100), ~0ull, count_from(0)),
                        [](size_t i) { return i; });
}

TEST(EmulatedLanes, NarrowLanesAreTheLowBits) {
  const __m512i a = make_lanes<uint64_t>([](size_t i) { return 0xf0f1f2f3f4f5f680 + i; });
  expect_lanes<uint32_t>(_mm512_cvtepi64_epi32(a), [](size_t i) { return 0xf4f5f680 + i; });
  expect_lanes<uint16_t>(_mm512_cvtepi32_epi16(a),
                         [](size_t i) { return i % 2 == 0 ? 0xf680 + i / 2 : 0xf2f3; });
  expect_lanes<uint8_t>(_mm512_cvtepi32_epi8(a),
                        [](size_t i) { return i % 2 == 0 ? 0x80 + i / 2 : 0xf3; });
  expect_lanes<uint8_t>(_mm512_cvtepi16_epi8(a), [](size_t i) {
    return i % 4 == 0 ? 0x80 + i / 4 : i % 4 == 1 ? 0xf5 : i % 4 == 2 ? 0xf3 : 0xf1;
  });
}

TEST(EmulatedLanes, WideLanesHaveNoSign) {
  const __m256i a = _mm512_castsi512_si256(count_from(128));
  expect_lanes<uint32_t>(_mm512_cvtepu16_epi32(a), [](size_t i) { return 0x8180 + 0x202 * i; });
  expect_lanes<uint64_t>(_mm512_cvtepu32_epi64(a),
                         [](size_t i) { return 0x83828180 + 0x4040404 * i; });
  expect_lanes<uint64_t>(_mm512_cvtepu16_epi64(_mm256_castsi256_si128(a)),
                         [](size_t i) { return 0x8180 + 0x202 * i; });
}

TEST(EmulatedLanes, PartsAreTheLowerOnesUnlessOneIsAskedFor) {
  const __m512i a = count_from(0);
  const __m256i low = _mm512_castsi512_si256(a);
  expect_lanes<uint8_t>(low, [](size_t i) { return i; });
  expect_lanes<uint8_t>(_mm512_extracti64x4_epi64(a, 0), [](size_t i) { return i; });
  expect_lanes<uint8_t>(_mm512_extracti64x4_epi64(a, 1), [](size_t i) { return 32 + i; });
  expect_lanes<uint8_t>(_mm256_castsi256_si128(low), [](size_t i) { return i; });
  expect_lanes<uint8_t>(_mm256_extracti128_si256(low, 1), [](size_t i) { return 16 + i; });
  EXPECT_EQ(_mm_cvtsi128_si32(_mm256_extracti128_si256(low, 1)), 0x13121110);
  expect_lanes<uint8_t>(_mm512_inserti64x4(_mm512_set1_epi8(9), low, 1),
                        [](size_t i) { return i < 32 ? 9 : i - 32; });
  expect_lanes<uint8_t>(_mm512_inserti64x4(_mm512_set1_epi8(9), low, 0),
                        [](size_t i) { return i < 32 ? i : 9; });
}

TEST(EmulatedLanes, WhatIsUndefinedIsNoZero) {
  const __m256i low = _mm512_castsi512_si256(count_from(0));
  expect_lanes<uint8_t>(_mm512_castsi256_si512(low),
                        [](size_t i) { return i < 32 ? i : emulated::kUndefinedByte; });
}

TEST(EmulatedLanes, NumbersAreSetFromTheLowestLaneOn) {
  expect_lanes<uint64_t>(_mm512_setr_epi64(1, 2, 3, 4, 5, 6, 7, 8), [](size_t i) { return i + 1; });
  expect_lanes<uint8_t>(
      _mm512_broadcast_i32x4(_mm_setr_epi8(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16)),
      [](size_t i) { return 1 + i % 16; });
  expect_all<uint64_t>(_mm512_set1_epi16(0x1234), 0x1234123412341234);
  expect_all<uint64_t>(_mm512_set1_epi32(0x12345678), 0x1234567812345678);
  expect_all<uint64_t>(_mm512_set1_epi64(0x123456789abcdef0), 0x123456789abcdef0);
}

}  // namespace
}  // namespace memswap::test
