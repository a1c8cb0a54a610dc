// Logic, shifts, rotations and bits moved within lanes; those of general registers as well.
#pragma once

#include "vectors.h"

__m512i _mm512_and_si512(__m512i a, __m512i b);
__m512i _mm512_andnot_si512(__m512i a, __m512i b);  // ~a & b
__m512i _mm512_or_si512(__m512i a, __m512i b);
__m512i _mm512_xor_si512(__m512i a, __m512i b);

// The bit of `table` whose number is a's bit, b's and c's, a's the highest.
__m512i _mm512_ternarylogic_epi64(__m512i a, __m512i b, __m512i c,
                                  memswap::emulated::Immediate<255> table);

// Compilers take counts that are no constants, too; one of a lane's width and more leaves zeros.
__m512i _mm512_slli_epi16(__m512i a, unsigned count);
__m512i _mm512_slli_epi32(__m512i a, unsigned count);
__m512i _mm512_slli_epi64(__m512i a, unsigned count);
__m512i _mm512_srli_epi16(__m512i a, unsigned count);
__m512i _mm512_srli_epi32(__m512i a, unsigned count);
__m512i _mm512_srli_epi64(__m512i a, unsigned count);
__m128i _mm_srli_epi16(__m128i a, int count);

// Modulo the lane's width.
__m512i _mm512_rol_epi32(__m512i a, memswap::emulated::Immediate<255> count);
__m512i _mm512_rol_epi64(__m512i a, memswap::emulated::Immediate<255> count);
__m512i _mm512_ror_epi32(__m512i a, memswap::emulated::Immediate<255> count);
__m512i _mm512_ror_epi64(__m512i a, memswap::emulated::Immediate<255> count);

// The upper word of a:b shifted left, and the lower one of b:a shifted right.
__m512i _mm512_shldi_epi16(__m512i a, __m512i b, memswap::emulated::Immediate<255> count);
__m512i _mm512_shrdi_epi16(__m512i a, __m512i b, memswap::emulated::Immediate<255> count);

// Each byte of `x` times the matrix of bits in its 64-bit lane of `matrices` (row 0 is byte 7).
__m512i _mm512_gf2p8affine_epi64_epi8(__m512i x, __m512i matrices,
                                      memswap::emulated::Immediate<255> added);

// By byte of `from`: 8 bits of b's 64-bit lane, around its end, from that bit on.
__m512i _mm512_multishift_epi64_epi8(__m512i from, __m512i b);

__m512i _mm512_popcnt_epi64(__m512i a);

unsigned _bzhi_u32(unsigned a, unsigned index);
unsigned long long _bzhi_u64(unsigned long long a, unsigned index);
unsigned _lzcnt_u32(unsigned a);
unsigned long long _lzcnt_u64(unsigned long long a);
unsigned long long _pdep_u64(unsigned long long a, unsigned long long mask);
long long _mm_popcnt_u64(unsigned long long a);
