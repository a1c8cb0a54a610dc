#include "emulated/memory.h"

#include <cstring>

#include "loops.h"

using namespace memswap::emulated;

namespace {

template <typename Vector>
Vector load(const void* from) {
  Vector value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

template <typename Vector>
void store(void* to, const Vector& value) {
  std::memcpy(to, &value, sizeof(value));
}

}  // namespace

__m128i _mm_loadu_si128(const void* from) { return load<__m128i>(from); }
__m256i _mm256_loadu_si256(const void* from) { return load<__m256i>(from); }
__m512i _mm512_loadu_si512(const void* from) { return load<__m512i>(from); }
void _mm_storeu_si128(void* to, __m128i value) { store(to, value); }
void _mm256_storeu_si256(void* to, __m256i value) { store(to, value); }
void _mm512_storeu_si512(void* to, __m512i value) { store(to, value); }

__m512i _mm512_mask_loadu_epi8(__m512i other, __mmask64 chosen, const void* from) {
  for (size_t i = 0; i < sizeof(other); ++i) {
    if (is_chosen(chosen, i)) {
      other.byte[i] = static_cast<const unsigned char*>(from)[i];
    }
  }
  return other;
}

__m512i _mm512_maskz_loadu_epi8(__mmask64 chosen, const void* from) {
  return _mm512_mask_loadu_epi8(__m512i{}, chosen, from);
}

void _mm512_mask_storeu_epi8(void* to, __mmask64 chosen, __m512i value) {
  for (size_t i = 0; i < sizeof(value); ++i) {
    if (is_chosen(chosen, i)) {
      static_cast<unsigned char*>(to)[i] = value.byte[i];
    }
  }
}

void _mm512_stream_si512(void* to, __m512i value) {
  if (reinterpret_cast<uintptr_t>(to) % sizeof(value) != 0) {
    fault("_mm512_stream_si512 to an address that is no multiple of 64");
  }
  store(to, value);
}

#if !defined(__clang__)  // which knows it without a header, and every x86-64 has the instruction
void _mm_sfence() {}
#endif
