// Sums, differences, products and extremes, of lanes and over lanes.
#pragma once

#include "vectors.h"

// Carries out of a lane are lost.
__m512i _mm512_add_epi8(__m512i a, __m512i b);
__m512i _mm512_add_epi16(__m512i a, __m512i b);
__m512i _mm512_add_epi32(__m512i a, __m512i b);
__m512i _mm512_add_epi64(__m512i a, __m512i b);
__m512i _mm512_mask_add_epi8(__m512i other, __mmask64 chosen, __m512i a, __m512i b);
__m512i _mm512_sub_epi8(__m512i a, __m512i b);

__m512i _mm512_min_epu8(__m512i a, __m512i b);
__m512i _mm512_min_epu16(__m512i a, __m512i b);
__m512i _mm512_min_epu32(__m512i a, __m512i b);
__m512i _mm512_min_epu64(__m512i a, __m512i b);
__m512i _mm512_max_epu8(__m512i a, __m512i b);
__m256i _mm256_min_epu8(__m256i a, __m256i b);
__m256i _mm256_min_epu16(__m256i a, __m256i b);
__m128i _mm_min_epu8(__m128i a, __m128i b);
__m128i _mm_min_epu16(__m128i a, __m128i b);

// Rounded up.
__m512i _mm512_avg_epu8(__m512i a, __m512i b);

// The lower halves of 64-bit lanes, multiplied to 64 bits.
__m512i _mm512_mul_epu32(__m512i a, __m512i b);

// Unsigned bytes of `a` times signed ones of `b`: pairs of products, added and saturated to 16
// bits.
__m512i _mm512_maddubs_epi16(__m512i a, __m512i b);

// The same in fours, added to `sum` with 32 bits; here carries are lost.
__m512i _mm512_dpbusd_epi32(__m512i sum, __m512i a, __m512i b);

// By 64-bit lane, the sum of its bytes' absolute differences.
__m512i _mm512_sad_epu8(__m512i a, __m512i b);

// The least word, behind it the number of the first lane that has it, and zeros.
__m128i _mm_minpos_epu16(__m128i a);

long long _mm512_reduce_add_epi64(__m512i a);
unsigned _mm512_reduce_min_epu32(__m512i a);
unsigned long long _mm512_reduce_min_epu64(__m512i a);
