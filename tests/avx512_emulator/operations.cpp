// Compiled twice: see operations.h.
#include "operations.h"

#include "avx512_target.h"

#if defined(MEMSWAP_EMULATES_AVX512)
#define MEMSWAP_OPERATIONS emulated_operations
#else
#define MEMSWAP_OPERATIONS avx512_operations
#endif

MEMSWAP_AVX512_BEGIN

namespace memswap::test {
namespace {

inline void put(unsigned char* to, __m512i result) { _mm512_storeu_si512(to, result); }
inline void put(unsigned char* to, __m256i result) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), result);
}
inline void put(unsigned char* to, __m128i result) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), result);
}
inline void put(unsigned char* to, uint64_t result) {
  __builtin_memcpy(to, &result, sizeof(result));
}

inline __m256i half(__m512i a) { return _mm512_castsi512_si256(a); }
inline __m128i quarter(__m512i a) { return _mm256_castsi256_si128(half(a)); }
inline uint64_t word(__m512i a) {
  uint64_t words[8];
  _mm512_storeu_si512(words, a);
  return words[0];
}

// A result of operands a, b and c, and of a mask; of the type that is named.
#define OPERATION(name, Result, ...)                                    \
  {name, [](const Operands& operands, unsigned char (&result)[64]) {    \
     [[maybe_unused]] const __m512i a = _mm512_loadu_si512(operands.a); \
     [[maybe_unused]] const __m512i b = _mm512_loadu_si512(operands.b); \
     [[maybe_unused]] const __m512i c = _mm512_loadu_si512(operands.c); \
     [[maybe_unused]] const __mmask64 mask = operands.mask;             \
     put(result, static_cast<Result>(__VA_ARGS__));                     \
   }}
#define UNARY(name) OPERATION(#name, __m512i, _mm512_##name(a))
#define BINARY(name) OPERATION(#name, __m512i, _mm512_##name(a, b))
#define TERNARY(name) OPERATION(#name, __m512i, _mm512_##name(a, b, c))
#define MASKED(name) OPERATION("mask_" #name, __m512i, _mm512_mask_##name(c, mask, a, b))
#define ZEROED(name) OPERATION("maskz_" #name, __m512i, _mm512_maskz_##name(mask, a, b))
#define SHIFT(name, count) OPERATION(#name "_" #count, __m512i, _mm512_##name(a, count))
#define COMPARISON(name) OPERATION(#name, uint64_t, _mm512_##name(a, b))
#define MASKED_COMPARISON(name) OPERATION("mask_" #name, uint64_t, _mm512_mask_##name(mask, a, b))

// clang-format off
constexpr Operation kOperations[] = {
    BINARY(add_epi8), BINARY(add_epi16), BINARY(add_epi32), BINARY(add_epi64), BINARY(sub_epi8),
    BINARY(min_epu8), BINARY(min_epu16), BINARY(min_epu32), BINARY(min_epu64), BINARY(max_epu8),
    OPERATION("min_epu8_32", __m256i, _mm256_min_epu8(half(a), half(b))),
    OPERATION("min_epu16_32", __m256i, _mm256_min_epu16(half(a), half(b))),
    OPERATION("min_epu8_16", __m128i, _mm_min_epu8(quarter(a), quarter(b))),
    OPERATION("min_epu16_16", __m128i, _mm_min_epu16(quarter(a), quarter(b))),
    BINARY(avg_epu8), BINARY(mul_epu32), BINARY(maddubs_epi16), TERNARY(dpbusd_epi32),
    BINARY(sad_epu8), MASKED(add_epi8),
    OPERATION("minpos_epu16", __m128i, _mm_minpos_epu16(quarter(a))),
    OPERATION("reduce_add_epi64", uint64_t, _mm512_reduce_add_epi64(a)),
    OPERATION("reduce_min_epu32", uint64_t, _mm512_reduce_min_epu32(a)),
    OPERATION("reduce_min_epu64", uint64_t, _mm512_reduce_min_epu64(a)),

    BINARY(and_si512), BINARY(andnot_si512), BINARY(or_si512), BINARY(xor_si512),
    OPERATION("ternarylogic_f8", __m512i, _mm512_ternarylogic_epi64(a, b, c, 0xf8)),
    OPERATION("ternarylogic_96", __m512i, _mm512_ternarylogic_epi64(a, b, c, 0x96)),
    OPERATION("ternarylogic_02", __m512i, _mm512_ternarylogic_epi64(a, b, c, 0x02)),
    OPERATION("ternarylogic_ca", __m512i, _mm512_ternarylogic_epi64(a, b, c, 0xca)),
    SHIFT(slli_epi16, 0), SHIFT(slli_epi16, 5), SHIFT(slli_epi16, 15), SHIFT(slli_epi16, 16),
    SHIFT(srli_epi16, 0), SHIFT(srli_epi16, 5), SHIFT(srli_epi16, 15), SHIFT(srli_epi16, 255),
    SHIFT(slli_epi32, 7), SHIFT(slli_epi32, 32), SHIFT(srli_epi32, 16), SHIFT(srli_epi32, 40),
    SHIFT(slli_epi64, 33), SHIFT(slli_epi64, 64), SHIFT(srli_epi64, 32), SHIFT(srli_epi64, 200),
    OPERATION("srli_epi16_16", __m128i, _mm_srli_epi16(quarter(a), 8)),
    SHIFT(rol_epi32, 1), SHIFT(rol_epi32, 33), SHIFT(rol_epi64, 1), SHIFT(rol_epi64, 40),
    SHIFT(ror_epi32, 1), SHIFT(ror_epi32, 31), SHIFT(ror_epi64, 1), SHIFT(ror_epi64, 64),
    OPERATION("shldi_epi16_1", __m512i, _mm512_shldi_epi16(a, b, 1)),
    OPERATION("shldi_epi16_19", __m512i, _mm512_shldi_epi16(a, b, 19)),
    OPERATION("shrdi_epi16_1", __m512i, _mm512_shrdi_epi16(a, b, 1)),
    OPERATION("shrdi_epi16_16", __m512i, _mm512_shrdi_epi16(a, b, 16)),
    OPERATION("gf2p8affine_0", __m512i, _mm512_gf2p8affine_epi64_epi8(a, b, 0)),
    OPERATION("gf2p8affine_63", __m512i, _mm512_gf2p8affine_epi64_epi8(a, b, 0x63)),
    BINARY(multishift_epi64_epi8), UNARY(popcnt_epi64),
    OPERATION("bzhi_u32", uint64_t, _bzhi_u32(static_cast<unsigned>(word(a)), operands.b[0] % 64)),
    OPERATION("bzhi_u64", uint64_t, _bzhi_u64(word(a), operands.b[0])),
    OPERATION("lzcnt_u32", uint64_t,
              _lzcnt_u32(static_cast<unsigned>(word(a) >> operands.b[0] % 64))),
    OPERATION("lzcnt_u64", uint64_t, _lzcnt_u64(word(a) >> operands.b[0] % 64)),
    OPERATION("pdep_u64", uint64_t, _pdep_u64(word(a), mask)),
    OPERATION("popcnt_u64", uint64_t, _mm_popcnt_u64(word(a))),

    COMPARISON(cmpeq_epi8_mask), COMPARISON(cmpneq_epi8_mask), COMPARISON(cmplt_epu8_mask),
    COMPARISON(cmpge_epu8_mask), MASKED_COMPARISON(cmplt_epu8_mask),
    MASKED_COMPARISON(cmpgt_epu8_mask), COMPARISON(test_epi8_mask), COMPARISON(test_epi32_mask),
    COMPARISON(testn_epi8_mask), MASKED_COMPARISON(testn_epi8_mask),
    OPERATION("movepi8_mask", uint64_t, _mm512_movepi8_mask(a)),
    OPERATION("movm_epi8", __m512i, _mm512_movm_epi8(mask)),
    OPERATION("mask_mov_epi8", __m512i, _mm512_mask_mov_epi8(a, mask, b)),
    OPERATION("maskz_mov_epi8", __m512i, _mm512_maskz_mov_epi8(mask, a)),

    BINARY(permutexvar_epi8), MASKED(permutexvar_epi8), ZEROED(permutexvar_epi8),
    TERNARY(permutex2var_epi8), TERNARY(permutex2var_epi16),
    BINARY(shuffle_epi8),
    OPERATION("shuffle_i64x2_88", __m512i, _mm512_shuffle_i64x2(a, b, 0x88)),
    OPERATION("shuffle_i64x2_1b", __m512i, _mm512_shuffle_i64x2(a, b, 0x1b)),
    BINARY(unpacklo_epi64), BINARY(unpackhi_epi64),
    OPERATION("mask_compress_epi8", __m512i, _mm512_mask_compress_epi8(a, mask, b)),
    OPERATION("mask_expand_epi8", __m512i, _mm512_mask_expand_epi8(a, mask, b)),
    OPERATION("cvtepi32_epi8", __m128i, _mm512_cvtepi32_epi8(a)),
    OPERATION("cvtepi16_epi8", __m256i, _mm512_cvtepi16_epi8(a)),
    OPERATION("cvtepi32_epi16", __m256i, _mm512_cvtepi32_epi16(a)),
    OPERATION("cvtepi64_epi32", __m256i, _mm512_cvtepi64_epi32(a)),
    OPERATION("cvtepu16_epi32", __m512i, _mm512_cvtepu16_epi32(half(a))),
    OPERATION("cvtepu16_epi64", __m512i, _mm512_cvtepu16_epi64(quarter(a))),
    OPERATION("cvtepu32_epi64", __m512i, _mm512_cvtepu32_epi64(half(a))),
    OPERATION("extracti128", __m128i, _mm256_extracti128_si256(half(a), 1)),
    OPERATION("extracti64x4", __m256i, _mm512_extracti64x4_epi64(a, 1)),
    OPERATION("inserti64x4", __m512i, _mm512_inserti64x4(a, half(b), 1)),
    OPERATION("broadcast_i32x4", __m512i, _mm512_broadcast_i32x4(quarter(a))),
    OPERATION("mask_loadu_epi8", __m512i, _mm512_mask_loadu_epi8(a, mask, operands.b)),
    OPERATION("maskz_loadu_epi8", __m512i, _mm512_maskz_loadu_epi8(mask, operands.b)),
    {"mask_storeu_epi8", [](const Operands& operands, unsigned char (&result)[64]) {
       _mm512_mask_storeu_epi8(result, operands.mask, _mm512_loadu_si512(operands.a));
     }},
};
// clang-format on

}  // namespace
}  // namespace memswap::test

MEMSWAP_AVX512_END

namespace memswap::test {

std::span<const Operation> MEMSWAP_OPERATIONS() { return kOperations; }

#if !defined(MEMSWAP_EMULATES_AVX512)
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2") &&
         __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vpopcntdq") &&
         __builtin_cpu_supports("gfni") && __builtin_cpu_supports("bmi2");
}
#endif

}  // namespace memswap::test
