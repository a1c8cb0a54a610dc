#include "emulated/masks.h"

#include <functional>

#include "loops.h"

using namespace memswap::emulated;

namespace {

constexpr auto kShareABit = [](auto a, auto b) { return (a & b) != 0; };

}  // namespace

__mmask64 _mm512_cmpeq_epi8_mask(__m512i a, __m512i b) {
  return mask_where<uint8_t>(a, b, std::equal_to<>());
}
__mmask64 _mm512_cmpneq_epi8_mask(__m512i a, __m512i b) {
  return mask_where<uint8_t>(a, b, std::not_equal_to<>());
}
__mmask64 _mm512_cmplt_epu8_mask(__m512i a, __m512i b) {
  return mask_where<uint8_t>(a, b, std::less<>());
}
__mmask64 _mm512_cmpge_epu8_mask(__m512i a, __m512i b) {
  return mask_where<uint8_t>(a, b, std::greater_equal<>());
}
__mmask64 _mm512_mask_cmplt_epu8_mask(__mmask64 chosen, __m512i a, __m512i b) {
  return chosen & mask_where<uint8_t>(a, b, std::less<>());
}
__mmask64 _mm512_mask_cmpgt_epu8_mask(__mmask64 chosen, __m512i a, __m512i b) {
  return chosen & mask_where<uint8_t>(a, b, std::greater<>());
}

__mmask64 _mm512_test_epi8_mask(__m512i a, __m512i b) {
  return mask_where<uint8_t>(a, b, kShareABit);
}
__mmask16 _mm512_test_epi32_mask(__m512i a, __m512i b) {
  return static_cast<__mmask16>(mask_where<uint32_t>(a, b, kShareABit));
}
__mmask64 _mm512_testn_epi8_mask(__m512i a, __m512i b) { return ~_mm512_test_epi8_mask(a, b); }
__mmask64 _mm512_mask_testn_epi8_mask(__mmask64 chosen, __m512i a, __m512i b) {
  return chosen & _mm512_testn_epi8_mask(a, b);
}

__mmask64 _mm512_movepi8_mask(__m512i a) {
  return mask_where<uint8_t>(a, a, [](uint8_t byte, uint8_t) { return byte >= 128; });
}
__m512i _mm512_movm_epi8(__mmask64 a) {
  return make_lanes<uint8_t>([&](size_t i) { return is_chosen(a, i) ? 255 : 0; });
}

__m512i _mm512_mask_mov_epi8(__m512i other, __mmask64 chosen, __m512i a) {
  return merge(other, chosen, a);
}
__m512i _mm512_maskz_mov_epi8(__mmask64 chosen, __m512i a) { return merge(__m512i{}, chosen, a); }
