// Masks of vectors and vectors of masks: bit i of a mask is lane i's.
#pragma once

#include "vectors.h"

// Bytes are unsigned, unless they are only compared for equality.
__mmask64 _mm512_cmpeq_epi8_mask(__m512i a, __m512i b);
__mmask64 _mm512_cmpneq_epi8_mask(__m512i a, __m512i b);
__mmask64 _mm512_cmplt_epu8_mask(__m512i a, __m512i b);
__mmask64 _mm512_cmpge_epu8_mask(__m512i a, __m512i b);
__mmask64 _mm512_mask_cmplt_epu8_mask(__mmask64 chosen, __m512i a, __m512i b);
__mmask64 _mm512_mask_cmpgt_epu8_mask(__mmask64 chosen, __m512i a, __m512i b);

// Whether a & b is not 0; testn: whether it is.
__mmask64 _mm512_test_epi8_mask(__m512i a, __m512i b);
__mmask16 _mm512_test_epi32_mask(__m512i a, __m512i b);
__mmask64 _mm512_testn_epi8_mask(__m512i a, __m512i b);
__mmask64 _mm512_mask_testn_epi8_mask(__mmask64 chosen, __m512i a, __m512i b);

// The highest bits of the bytes; the reverse fills bytes.
__mmask64 _mm512_movepi8_mask(__m512i a);
__m512i _mm512_movm_epi8(__mmask64 a);

__m512i _mm512_mask_mov_epi8(__m512i other, __mmask64 chosen, __m512i a);
__m512i _mm512_maskz_mov_epi8(__mmask64 chosen, __m512i a);
