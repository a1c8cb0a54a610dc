// Loads and stores. Addresses are void pointers also where Intel has vectors': a compiler may take
// a pointer to a vector for an aligned one.
#pragma once

#include "vectors.h"

__m128i _mm_loadu_si128(const void* from);
__m256i _mm256_loadu_si256(const void* from);
__m512i _mm512_loadu_si512(const void* from);
void _mm_storeu_si128(void* to, __m128i value);
void _mm256_storeu_si256(void* to, __m256i value);
void _mm512_storeu_si512(void* to, __m512i value);

// Memory of lanes that are not chosen is not touched: it need not exist.
__m512i _mm512_mask_loadu_epi8(__m512i other, __mmask64 chosen, const void* from);
__m512i _mm512_maskz_loadu_epi8(__mmask64 chosen, const void* from);
void _mm512_mask_storeu_epi8(void* to, __mmask64 chosen, __m512i value);

// Faults unless `to` is a multiple of 64.
void _mm512_stream_si512(void* to, __m512i value);

// A thread sees its own stores in order, so nothing is left to be done.
void _mm_sfence();
