// What emulated loads and stores touch, to the byte: memory.cpp is compiled with AddressSanitizer.
#include <memory>

#include "expected_lanes.h"

namespace memswap::test {
namespace {

// Bytes of the heap, with poison on either side.
std::unique_ptr<unsigned char[]> numbers(size_t bytes) {
  auto memory = std::make_unique<unsigned char[]>(bytes);
  for (size_t i = 0; i < bytes; ++i) {
    memory[i] = static_cast<unsigned char>(i);
  }
  return memory;
}

TEST(EmulatedMemory, LoadsAndStoresNeedNoAlignment) {
  const auto from = numbers(65), to = numbers(65);
  _mm512_storeu_si512(to.get() + 1, _mm512_loadu_si512(from.get()));
  expect_lanes<uint8_t>(_mm512_loadu_si512(to.get() + 1), [](size_t i) { return i; });
  _mm256_storeu_si256(to.get() + 33, _mm256_loadu_si256(from.get() + 1));
  expect_lanes<uint8_t>(_mm256_loadu_si256(to.get() + 33), [](size_t i) { return 1 + i; });
  _mm_storeu_si128(to.get() + 49, _mm_loadu_si128(from.get() + 3));
  expect_lanes<uint8_t>(_mm_loadu_si128(to.get() + 49), [](size_t i) { return 3 + i; });
  EXPECT_EQ(to[0], 0);
}

TEST(EmulatedMemory, AByteTooManyIsSeen) {
  const auto memory = numbers(63);
  EXPECT_DEATH(_mm512_loadu_si512(memory.get()), "heap-buffer-overflow");
  EXPECT_DEATH(_mm512_storeu_si512(memory.get(), __m512i{}), "heap-buffer-overflow");
  EXPECT_DEATH(_mm256_loadu_si256(memory.get() + 32), "heap-buffer-overflow");
  EXPECT_DEATH(_mm_storeu_si128(memory.get() + 48, __m128i{}), "heap-buffer-overflow");
}

TEST(EmulatedMemory, OnlyChosenBytesAreLoaded) {
  const auto memory = numbers(5);
  const __m512i other = _mm512_set1_epi8(100);
  expect_lanes<uint8_t>(_mm512_mask_loadu_epi8(other, 0b10101, memory.get()),
                        [](size_t i) { return i < 5 && i % 2 == 0 ? i : 100; });
  expect_lanes<uint8_t>(_mm512_maskz_loadu_epi8(0b11111ull << 59, memory.get() - 59),
                        [](size_t i) { return i >= 59 ? i - 59 : 0; });
  EXPECT_DEATH(_mm512_maskz_loadu_epi8(0b100000, memory.get()), "heap-buffer-overflow");
  EXPECT_DEATH(_mm512_mask_loadu_epi8(other, 1, memory.get() - 1), "heap-buffer-overflow");
}

TEST(EmulatedMemory, OnlyChosenBytesAreStored) {
  const auto memory = numbers(5);
  _mm512_mask_storeu_epi8(memory.get(), 0b01010, _mm512_set1_epi8(100));
  EXPECT_EQ(memory[0], 0);
  EXPECT_EQ(memory[1], 100);
  EXPECT_EQ(memory[2], 2);
  EXPECT_EQ(memory[3], 100);
  EXPECT_EQ(memory[4], 4);
  EXPECT_DEATH(_mm512_mask_storeu_epi8(memory.get(), 0b100000, __m512i{}), "heap-buffer-overflow");
}

TEST(EmulatedMemory, AStreamedLineIsAligned) {
  alignas(64) unsigned char line[128] = {};
  _mm512_stream_si512(line + 64, count_from(0));
  _mm_sfence();
  expect_lanes<uint8_t>(_mm512_loadu_si512(line + 64), [](size_t i) { return i; });
  EXPECT_DEATH(_mm512_stream_si512(line + 32, __m512i{}), "no multiple of 64");
}

}  // namespace
}  // namespace memswap::test
