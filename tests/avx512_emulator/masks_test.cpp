// Emulated masks beside values computed by hand.
#include "expected_lanes.h"

namespace memswap::test {
namespace {

constexpr __mmask64 kEnds = 0x8000000000000001;

TEST(EmulatedMasks, BytesCompareWithoutSign) {
  const __m512i numbers = count_from(96);  // 96 to 159: 32 of them have the highest bit
  const __m512i bound = _mm512_set1_epi8(-128);
  EXPECT_EQ(_mm512_cmplt_epu8_mask(numbers, bound), 0xffffffffu);
  EXPECT_EQ(_mm512_cmpge_epu8_mask(numbers, bound), 0xffffffff00000000);
  EXPECT_EQ(_mm512_cmpeq_epi8_mask(numbers, bound), 1ull << 32);
  EXPECT_EQ(_mm512_cmpneq_epi8_mask(numbers, bound), ~(1ull << 32));
  EXPECT_EQ(_mm512_mask_cmplt_epu8_mask(kEnds, numbers, bound), 1u);
  EXPECT_EQ(_mm512_mask_cmpgt_epu8_mask(kEnds | 3ull << 32, numbers, bound),
            1ull << 63 | 1ull << 33);
}

TEST(EmulatedMasks, TestsAskForASharedBit) {
  const __m512i numbers = count_from(0);
  EXPECT_EQ(_mm512_test_epi8_mask(numbers, _mm512_set1_epi8(32)), 0xffffffff00000000);
  EXPECT_EQ(_mm512_testn_epi8_mask(numbers, _mm512_set1_epi8(32)), 0xffffffffu);
  EXPECT_EQ(_mm512_test_epi8_mask(numbers, numbers), ~1ull);
  EXPECT_EQ(_mm512_mask_testn_epi8_mask(kEnds, numbers, numbers), 1u);
  const __m512i words = make_lanes<uint32_t>([](size_t i) { return i % 4 == 3 ? 1 << 16 : 6; });
  EXPECT_EQ(_mm512_test_epi32_mask(words, _mm512_set1_epi32(0x10001)), 0x8888);
}

TEST(EmulatedMasks, SignsBecomeMasksAndMasksBytes) {
  EXPECT_EQ(_mm512_movepi8_mask(count_from(96)), 0xffffffff00000000);
  expect_lanes<uint8_t>(_mm512_movm_epi8(kEnds), [](size_t i) { return i % 63 == 0 ? 255 : 0; });
}

TEST(EmulatedMasks, OnlyChosenBytesMove) {
  const __m512i numbers = count_from(1);
  expect_lanes<uint8_t>(_mm512_mask_mov_epi8(_mm512_set1_epi8(100), kEnds, numbers),
                        [](size_t i) { return i % 63 == 0 ? 1 + i : 100; });
  expect_lanes<uint8_t>(_mm512_maskz_mov_epi8(kEnds, numbers),
                        [](size_t i) { return i % 63 == 0 ? 1 + i : 0; });
}

}  // namespace
}  // namespace memswap::test
