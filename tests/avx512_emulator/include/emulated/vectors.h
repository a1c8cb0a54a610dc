// Vectors and what an instruction encodes; vectors made of numbers and of other vectors.
#pragma once

// As aligned as the processor's: where a sanitizer sees one elsewhere, an aligned move would fault.
struct alignas(16) __m128i {
  unsigned char byte[16];
};
struct alignas(32) __m256i {
  unsigned char byte[32];
};
struct alignas(64) __m512i {
  unsigned char byte[64];
};

using __mmask16 = unsigned short;
using __mmask64 = unsigned long long;

namespace memswap::emulated {

// A constant of the instruction: what is none, or is beyond its range, does not compile.
template <int kLast>
struct Immediate {
  consteval Immediate(int constant) : value(constant) {
    if (constant < 0 || constant > kLast) {
      throw "this instruction cannot encode the constant";
    }
  }
  int value;
};

// What a byte is that Intel calls undefined: neither 0 nor 255, nor a likely symbol.
inline constexpr unsigned char kUndefinedByte = 0xdb;

// Ends the program as a fault of the processor would.
[[noreturn]] void fault(const char* why);

}  // namespace memswap::emulated

__m512i _mm512_setzero_si512();
__m512i _mm512_set1_epi8(char value);
__m512i _mm512_set1_epi16(short value);
__m512i _mm512_set1_epi32(int value);
__m512i _mm512_set1_epi64(long long value);
__m512i _mm512_setr_epi64(long long e0, long long e1, long long e2, long long e3, long long e4,
                          long long e5, long long e6, long long e7);
__m128i _mm_setr_epi8(char e0, char e1, char e2, char e3, char e4, char e5, char e6, char e7,
                      char e8, char e9, char e10, char e11, char e12, char e13, char e14, char e15);
__m512i _mm512_broadcast_i32x4(__m128i a);

// The upper half is undefined.
__m512i _mm512_castsi256_si512(__m256i a);
__m256i _mm512_castsi512_si256(__m512i a);
__m128i _mm256_castsi256_si128(__m256i a);
__m128i _mm256_extracti128_si256(__m256i a, memswap::emulated::Immediate<1> half);
__m256i _mm512_extracti64x4_epi64(__m512i a, memswap::emulated::Immediate<1> half);
__m512i _mm512_inserti64x4(__m512i a, __m256i b, memswap::emulated::Immediate<1> half);
int _mm_cvtsi128_si32(__m128i a);
