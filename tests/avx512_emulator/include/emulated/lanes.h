// Lanes that go elsewhere, and lanes of another width.
#pragma once

#include "vectors.h"

// By the low bits of an index; permutex2var: the next bit says whether of `a` or `b`.
__m512i _mm512_permutexvar_epi8(__m512i index, __m512i a);
__m512i _mm512_mask_permutexvar_epi8(__m512i other, __mmask64 chosen, __m512i index, __m512i a);
__m512i _mm512_maskz_permutexvar_epi8(__mmask64 chosen, __m512i index, __m512i a);
__m512i _mm512_permutex2var_epi8(__m512i a, __m512i index, __m512i b);
__m512i _mm512_permutex2var_epi16(__m512i a, __m512i index, __m512i b);

// Within 16 bytes; an index with its highest bit set makes a zero.
__m512i _mm512_shuffle_epi8(__m512i a, __m512i index);

// 16 bytes each: two of `a` and then two of `b`, by two bits of `which` each.
__m512i _mm512_shuffle_i64x2(__m512i a, __m512i b, memswap::emulated::Immediate<255> which);

// Within 16 bytes: the lower or the upper 64 bits of both.
__m512i _mm512_unpacklo_epi64(__m512i a, __m512i b);
__m512i _mm512_unpackhi_epi64(__m512i a, __m512i b);

// The chosen lanes in a row, from the lowest on; the reverse puts a row into the chosen lanes. The
// other lanes are those of `other`.
__m512i _mm512_mask_compress_epi8(__m512i other, __mmask64 chosen, __m512i a);
__m512i _mm512_mask_expand_epi8(__m512i other, __mmask64 chosen, __m512i a);

// The low bits of each lane.
__m128i _mm512_cvtepi32_epi8(__m512i a);
__m256i _mm512_cvtepi16_epi8(__m512i a);
__m256i _mm512_cvtepi32_epi16(__m512i a);
__m256i _mm512_cvtepi64_epi32(__m512i a);

// With zeros above each lane.
__m512i _mm512_cvtepu16_epi32(__m256i a);
__m512i _mm512_cvtepu16_epi64(__m128i a);
__m512i _mm512_cvtepu32_epi64(__m256i a);
