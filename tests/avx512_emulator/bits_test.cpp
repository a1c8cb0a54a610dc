// Emulated logic, shifts and moves of bits beside values computed by hand.
#include "expected_lanes.h"

namespace memswap::test {
namespace {

constexpr auto kMost = static_cast<long long>(0x8000000000000001);

TEST(EmulatedBits, LogicIsThatOfItsName) {
  const __m512i a = _mm512_set1_epi8(0b1100), b = _mm512_set1_epi8(0b1010);
  expect_all<uint8_t>(_mm512_and_si512(a, b), 0b1000);
  expect_all<uint8_t>(_mm512_andnot_si512(a, b), 0b0010);
  expect_all<uint8_t>(_mm512_or_si512(a, b), 0b1110);
  expect_all<uint8_t>(_mm512_xor_si512(a, b), 0b0110);
}

// Bit i of these three together is the number i, so the result is the table itself.
TEST(EmulatedBits, TernaryLogicIsItsTable) {
  const __m512i a = _mm512_set1_epi8(static_cast<char>(0xf0));
  const __m512i b = _mm512_set1_epi8(static_cast<char>(0xcc));
  const __m512i c = _mm512_set1_epi8(static_cast<char>(0xaa));
  expect_all<uint8_t>(_mm512_ternarylogic_epi64(a, b, c, 0x00), 0x00);
  expect_all<uint8_t>(_mm512_ternarylogic_epi64(a, b, c, 0x01), 0x01);
  expect_all<uint8_t>(_mm512_ternarylogic_epi64(a, b, c, 0x02), 0x02);
  expect_all<uint8_t>(_mm512_ternarylogic_epi64(a, b, c, 0x04), 0x04);
  expect_all<uint8_t>(_mm512_ternarylogic_epi64(a, b, c, 0x08), 0x08);
  expect_all<uint8_t>(_mm512_ternarylogic_epi64(a, b, c, 0x10), 0x10);
  expect_all<uint8_t>(_mm512_ternarylogic_epi64(a, b, c, 0x20), 0x20);
  expect_all<uint8_t>(_mm512_ternarylogic_epi64(a, b, c, 0x40), 0x40);
  expect_all<uint8_t>(_mm512_ternarylogic_epi64(a, b, c, 0x80), 0x80);
  expect_all<uint8_t>(_mm512_ternarylogic_epi64(a, b, c, 0x96), 0x96);
  expect_all<uint8_t>(_mm512_ternarylogic_epi64(a, b, c, 0xf8), 0xf8);
  expect_all<uint8_t>(_mm512_ternarylogic_epi64(a, b, c, 0xfe), 0xfe);
  expect_all<uint8_t>(_mm512_ternarylogic_epi64(a, b, c, 0xff), 0xff);
}

TEST(EmulatedBits, ShiftsStayInTheirLanes) {
  const __m512i a = _mm512_set1_epi64(kMost);
  expect_all<uint64_t>(_mm512_slli_epi64(a, 1), 2);
  expect_all<uint64_t>(_mm512_srli_epi64(a, 1), 0x4000000000000000);
  expect_all<uint64_t>(_mm512_slli_epi32(a, 31), 0x0000000080000000);
  expect_all<uint64_t>(_mm512_srli_epi32(a, 31), 0x0000000100000000);
  expect_all<uint64_t>(_mm512_slli_epi16(a, 8), 0x0000000000000100);
  expect_all<uint64_t>(_mm512_srli_epi16(a, 8), 0x0080000000000000);
  expect_all<uint64_t>(_mm_srli_epi16(_mm256_castsi256_si128(_mm512_castsi512_si256(a)), 8),
                       0x0080000000000000);
  expect_all<uint64_t>(_mm512_slli_epi16(a, 0), static_cast<uint64_t>(kMost));
}

TEST(EmulatedBits, ShiftsByAWidthAndMoreLeaveNothing) {
  const __m512i a = _mm512_set1_epi8(-1);
  expect_all<uint64_t>(_mm512_slli_epi16(a, 16), 0);
  expect_all<uint64_t>(_mm512_srli_epi16(a, 16), 0);
  expect_all<uint64_t>(_mm512_slli_epi32(a, 32), 0);
  expect_all<uint64_t>(_mm512_srli_epi32(a, 63), 0);
  expect_all<uint64_t>(_mm512_slli_epi64(a, 64), 0);
  expect_all<uint64_t>(_mm512_srli_epi64(a, 255), 0);
  EXPECT_DEATH(_mm512_srli_epi64(a, 256), "more than 255 bits");
  EXPECT_DEATH(_mm_srli_epi16(__m128i{}, -1), "more than 255 bits");
}

TEST(EmulatedBits, RotationsAreModuloTheWidth) {
  const __m512i a = _mm512_set1_epi64(kMost);
  expect_all<uint64_t>(_mm512_rol_epi64(a, 1), 3);
  expect_all<uint64_t>(_mm512_rol_epi64(a, 65), 3);
  expect_all<uint64_t>(_mm512_ror_epi64(a, 1), 0xc000000000000000);
  expect_all<uint64_t>(_mm512_rol_epi32(a, 1), 0x0000000100000002);
  expect_all<uint64_t>(_mm512_ror_epi32(a, 1), 0x4000000080000000);
  expect_all<uint64_t>(_mm512_ror_epi32(a, 33), 0x4000000080000000);
}

TEST(EmulatedBits, DoubleShiftsTakeTheOthersBits) {
  const __m512i a = _mm512_set1_epi16(0x1234), b = _mm512_set1_epi16(static_cast<short>(0xabcd));
  expect_all<uint16_t>(_mm512_shldi_epi16(a, b, 4), 0x234a);
  expect_all<uint16_t>(_mm512_shldi_epi16(a, b, 0), 0x1234);
  expect_all<uint16_t>(_mm512_shldi_epi16(a, b, 20), 0x234a);
  expect_all<uint16_t>(_mm512_shrdi_epi16(a, b, 4), 0xd123);
  expect_all<uint16_t>(_mm512_shrdi_epi16(a, b, 16), 0x1234);
  const __m512i one = _mm512_set1_epi16(static_cast<short>(0x8001));
  expect_all<uint16_t>(_mm512_shldi_epi16(one, one, 1), 0x0003);
  expect_all<uint16_t>(_mm512_shrdi_epi16(one, one, 1), 0xc000);
}

__m512i affine(uint64_t matrix, unsigned byte) {
  return _mm512_gf2p8affine_epi64_epi8(_mm512_set1_epi8(static_cast<char>(byte)),
                                       _mm512_set1_epi64(static_cast<long long>(matrix)), 0);
}

TEST(EmulatedBits, AffineMultipliesByTheRowsOfAMatrix) {
  for (unsigned byte = 0; byte < 256; ++byte) {
    expect_all<uint8_t>(affine(0x0102040810204080, byte), static_cast<uint8_t>(byte));
  }
  expect_all<uint8_t>(affine(0x8040201008040201, 0b00010110), 0b01101000);  // bits reversed
  // Byte 7 is the row of bit 0: here, whether the lowest two bits differ.
  expect_all<uint8_t>(affine(0x0300000000000000, 2), 1);
  expect_all<uint8_t>(affine(0x0300000000000000, 3), 0);
  expect_all<uint8_t>(affine(0x0000000000000003, 2), 128);
  // FIPS 197's S-box: 53 has the inverse ca and becomes ed.
  expect_all<uint8_t>(_mm512_gf2p8affine_epi64_epi8(
                          _mm512_set1_epi8(static_cast<char>(0xca)),
                          _mm512_set1_epi64(static_cast<long long>(0xf1e3c78f1f3e7cf8)), 0x63),
                      0xed);
}

TEST(EmulatedBits, AffineHasAMatrixForEachEightBytes) {
  const __m512i matrices = _mm512_setr_epi64(0, 0x0102040810204080, 0, 0, 0, 0, 0, 0);
  expect_lanes<uint8_t>(_mm512_gf2p8affine_epi64_epi8(count_from(0), matrices, 0),
                        [](size_t i) { return i / 8 == 1 ? i : 0; });
}

TEST(EmulatedBits, MultishiftTakesEightBitsFromAnyOneOn) {
  const auto from = [](unsigned bit) {
    return _mm512_multishift_epi64_epi8(_mm512_set1_epi8(static_cast<char>(bit)),
                                        _mm512_set1_epi64(0x0123456789abcdef));
  };
  expect_all<uint8_t>(from(0), 0xef);
  expect_all<uint8_t>(from(4), 0xde);
  expect_all<uint8_t>(from(8), 0xcd);
  expect_all<uint8_t>(from(56), 0x01);
  expect_all<uint8_t>(from(60), 0xf0);
  expect_all<uint8_t>(from(64 + 4), 0xde);
  expect_all<uint8_t>(from(255), 0xde);  // bit 63, and bits 0 to 6 above it
  const __m512i lanes = _mm512_setr_epi64(0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88);
  expect_lanes<uint8_t>(_mm512_multishift_epi64_epi8(_mm512_set1_epi64(0x0808080808080800), lanes),
                        [](size_t i) { return i % 8 == 0 ? 0x11 * (i / 8 + 1) : 0; });
}

TEST(EmulatedBits, BitsAreCounted) {
  expect_all<uint64_t>(_mm512_popcnt_epi64(_mm512_set1_epi64(kMost)), 2);
  expect_all<uint64_t>(_mm512_popcnt_epi64(_mm512_set1_epi8(-1)), 64);
  EXPECT_EQ(_mm_popcnt_u64(0xf00000000000000f), 8);
  EXPECT_EQ(_lzcnt_u32(0), 32u);
  EXPECT_EQ(_lzcnt_u32(1), 31u);
  EXPECT_EQ(_lzcnt_u64(0), 64u);
  EXPECT_EQ(_lzcnt_u64(1ull << 40), 23u);
}

TEST(EmulatedBits, BzhiTakesTheLowByteOfItsIndex) {
  EXPECT_EQ(_bzhi_u64(~0ull, 0), 0u);
  EXPECT_EQ(_bzhi_u64(~0ull, 63), ~0ull >> 1);
  EXPECT_EQ(_bzhi_u64(~0ull, 64), ~0ull);
  EXPECT_EQ(_bzhi_u64(~0ull, 255), ~0ull);
  EXPECT_EQ(_bzhi_u64(~0ull, 256 + 3), 7u);
  EXPECT_EQ(_bzhi_u32(0x55, 4), 5u);
  EXPECT_EQ(_bzhi_u32(~0u, 32), ~0u);
  EXPECT_EQ(_bzhi_u32(~0u, 31), ~0u >> 1);
}

TEST(EmulatedBits, PdepPutsBitsWhereTheMaskHasThem) {
  EXPECT_EQ(_pdep_u64(0b101, 0b11010), 0b10010u);
  EXPECT_EQ(_pdep_u64(~0ull, 0x8000000000000001), 0x8000000000000001);
  EXPECT_EQ(_pdep_u64(0b10, 0x8000000000000001), 0x8000000000000000);
}

}  // namespace
}  // namespace memswap::test
