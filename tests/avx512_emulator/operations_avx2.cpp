// What processors without AVX-512 have of operations.cpp, by the same names: 64 bytes as two
// halves.
#include "operations.h"
#include "vector_lanes.h"

MEMSWAP_VECTOR_BEGIN

namespace memswap::test {
namespace {

inline __m256i load(const unsigned char* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}
inline __m128i quarter(const unsigned char* from) { return _mm256_castsi256_si128(load(from)); }
inline uint64_t word(const unsigned char* from) {
  uint64_t result;
  __builtin_memcpy(&result, from, sizeof(result));
  return result;
}
inline void put(unsigned char* to, __m256i result) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), result);
}
inline void put(unsigned char* to, __m128i result) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), result);
}
inline void put(unsigned char* to, uint64_t result) {
  __builtin_memcpy(to, &result, sizeof(result));
}

#define HALVES(name, ...)                                            \
  {name, [](const Operands& operands, unsigned char (&result)[64]) { \
     for (size_t at = 0; at < 64; at += 32) {                        \
       const __m256i a = load(operands.a + at);                      \
       [[maybe_unused]] const __m256i b = load(operands.b + at);     \
       put(result + at, __VA_ARGS__);                                \
     }                                                               \
   }}
#define BINARY(name) HALVES(#name, _mm256_##name(a, b))
#define LOGIC(name) HALVES(#name "_si512", _mm256_##name##_si256(a, b))
#define SHIFT(name, count) HALVES(#name "_" #count, _mm256_##name(a, count))
#define SINGLE(name, ...) \
  {name, [](const Operands& in, unsigned char (&result)[64]) { put(result, __VA_ARGS__); }}

// Of a mask with a bit for each of 32 bytes.
#define HALF_MASKS(name, ...)                                                      \
  {name, [](const Operands& operands, unsigned char (&result)[64]) {               \
     for (size_t at = 0; at < 64; at += 32) {                                      \
       const __m256i a = load(operands.a + at);                                    \
       [[maybe_unused]] const __m256i b = load(operands.b + at);                   \
       const auto mask = static_cast<uint32_t>(_mm256_movemask_epi8(__VA_ARGS__)); \
       __builtin_memcpy(result + at / 8, &mask, sizeof(mask));                     \
     }                                                                             \
   }}

// clang-format off
constexpr Operation kOperations[] = {
    BINARY(add_epi8), BINARY(add_epi16), BINARY(add_epi32), BINARY(add_epi64), BINARY(sub_epi8),
    BINARY(min_epu8), BINARY(min_epu16), BINARY(min_epu32), BINARY(max_epu8),
    BINARY(avg_epu8), BINARY(mul_epu32), BINARY(maddubs_epi16), BINARY(sad_epu8),
    SINGLE("min_epu8_32", _mm256_min_epu8(load(in.a), load(in.b))),
    SINGLE("min_epu16_32", _mm256_min_epu16(load(in.a), load(in.b))),
    SINGLE("min_epu8_16", _mm_min_epu8(quarter(in.a), quarter(in.b))),
    SINGLE("min_epu16_16", _mm_min_epu16(quarter(in.a), quarter(in.b))),
    SINGLE("minpos_epu16", _mm_minpos_epu16(quarter(in.a))),

    LOGIC(and), LOGIC(andnot), LOGIC(or), LOGIC(xor),
    SHIFT(slli_epi16, 0), SHIFT(slli_epi16, 5), SHIFT(slli_epi16, 15), SHIFT(slli_epi16, 16),
    SHIFT(srli_epi16, 0), SHIFT(srli_epi16, 5), SHIFT(srli_epi16, 15), SHIFT(srli_epi16, 255),
    SHIFT(slli_epi32, 7), SHIFT(slli_epi32, 32), SHIFT(srli_epi32, 16), SHIFT(srli_epi32, 40),
    SHIFT(slli_epi64, 33), SHIFT(slli_epi64, 64), SHIFT(srli_epi64, 32), SHIFT(srli_epi64, 200),
    SINGLE("srli_epi16_16", _mm_srli_epi16(quarter(in.a), 8)),
    SINGLE("bzhi_u32", uint64_t{_bzhi_u32(static_cast<unsigned>(word(in.a)), in.b[0] % 64)}),
    SINGLE("bzhi_u64", uint64_t{_bzhi_u64(word(in.a), in.b[0])}),
    SINGLE("pdep_u64", uint64_t{_pdep_u64(word(in.a), in.mask)}),
    SINGLE("popcnt_u64", static_cast<uint64_t>(_mm_popcnt_u64(word(in.a)))),

    HALF_MASKS("cmpeq_epi8_mask", _mm256_cmpeq_epi8(a, b)),
    HALF_MASKS("cmpge_epu8_mask", _mm256_cmpeq_epi8(_mm256_max_epu8(a, b), a)),
    HALF_MASKS("testn_epi8_mask",
               _mm256_cmpeq_epi8(_mm256_and_si256(a, b), _mm256_setzero_si256())),
    HALF_MASKS("movepi8_mask", a),

    BINARY(shuffle_epi8), BINARY(unpacklo_epi64), BINARY(unpackhi_epi64),
    SINGLE("extracti128", _mm256_extracti128_si256(load(in.a), 1)),
};
// clang-format on

}  // namespace
}  // namespace memswap::test

MEMSWAP_VECTOR_END

namespace memswap::test {

std::span<const Operation> avx2_operations() { return kOperations; }

bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") &&
         __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt");
}

}  // namespace memswap::test
