#include "emulated/bits.h"

#include <bit>

#include "loops.h"

using namespace memswap::emulated;

namespace {

// An instruction has a byte for its count.
void check_count(unsigned count) {
  if (count > 255) {
    fault("a vector shifted by more than 255 bits");
  }
}

template <typename Lane, typename Vector>
Vector shift_left(const Vector& a, unsigned count) {
  check_count(count);
  return map<Lane>(
      a, [&](Lane lane) { return count < 8 * sizeof(Lane) ? uint64_t{lane} << count : 0; });
}

template <typename Lane, typename Vector>
Vector shift_right(const Vector& a, unsigned count) {
  check_count(count);
  return map<Lane>(a, [&](Lane lane) { return count < 8 * sizeof(Lane) ? lane >> count : 0; });
}

template <typename Lane>
__m512i rotate_left(const __m512i& a, int count) {
  return map<Lane>(a, [&](Lane lane) { return std::rotl(lane, count); });
}

}  // namespace

__m512i _mm512_and_si512(__m512i a, __m512i b) {
  return map<uint64_t>(a, b, [](uint64_t x, uint64_t y) { return x & y; });
}
__m512i _mm512_andnot_si512(__m512i a, __m512i b) {
  return map<uint64_t>(a, b, [](uint64_t x, uint64_t y) { return ~x & y; });
}
__m512i _mm512_or_si512(__m512i a, __m512i b) {
  return map<uint64_t>(a, b, [](uint64_t x, uint64_t y) { return x | y; });
}
__m512i _mm512_xor_si512(__m512i a, __m512i b) {
  return map<uint64_t>(a, b, [](uint64_t x, uint64_t y) { return x ^ y; });
}

__m512i _mm512_ternarylogic_epi64(__m512i a, __m512i b, __m512i c, Immediate<255> table) {
  const auto x = lanes_of<uint64_t>(a);
  const auto y = lanes_of<uint64_t>(b);
  const auto z = lanes_of<uint64_t>(c);
  return make_lanes<uint64_t>([&](size_t i) {
    uint64_t result = 0;
    for (unsigned row = 0; row < 8; ++row) {
      if ((table.value >> row & 1) != 0) {
        result |= ((row & 4) != 0 ? x[i] : ~x[i]) & ((row & 2) != 0 ? y[i] : ~y[i]) &
                  ((row & 1) != 0 ? z[i] : ~z[i]);
      }
    }
    return result;
  });
}

__m512i _mm512_slli_epi16(__m512i a, unsigned count) { return shift_left<uint16_t>(a, count); }
__m512i _mm512_slli_epi32(__m512i a, unsigned count) { return shift_left<uint32_t>(a, count); }
__m512i _mm512_slli_epi64(__m512i a, unsigned count) { return shift_left<uint64_t>(a, count); }
__m512i _mm512_srli_epi16(__m512i a, unsigned count) { return shift_right<uint16_t>(a, count); }
__m512i _mm512_srli_epi32(__m512i a, unsigned count) { return shift_right<uint32_t>(a, count); }
__m512i _mm512_srli_epi64(__m512i a, unsigned count) { return shift_right<uint64_t>(a, count); }
__m128i _mm_srli_epi16(__m128i a, int count) {
  return shift_right<uint16_t>(a, static_cast<unsigned>(count));
}

__m512i _mm512_rol_epi32(__m512i a, Immediate<255> count) {
  return rotate_left<uint32_t>(a, count.value);
}
__m512i _mm512_rol_epi64(__m512i a, Immediate<255> count) {
  return rotate_left<uint64_t>(a, count.value);
}
__m512i _mm512_ror_epi32(__m512i a, Immediate<255> count) {
  return rotate_left<uint32_t>(a, -count.value);
}
__m512i _mm512_ror_epi64(__m512i a, Immediate<255> count) {
  return rotate_left<uint64_t>(a, -count.value);
}

__m512i _mm512_shldi_epi16(__m512i a, __m512i b, Immediate<255> count) {
  return map<uint16_t>(a, b, [&](uint32_t upper, uint32_t lower) {
    return (upper << 16 | lower) << count.value % 16 >> 16;
  });
}
__m512i _mm512_shrdi_epi16(__m512i a, __m512i b, Immediate<255> count) {
  return map<uint16_t>(a, b, [&](uint32_t lower, uint32_t upper) {
    return (upper << 16 | lower) >> count.value % 16;
  });
}

__m512i _mm512_gf2p8affine_epi64_epi8(__m512i x, __m512i matrices, Immediate<255> added) {
  return make_lanes<uint8_t>([&](size_t i) {
    const unsigned char* const rows = matrices.byte + i / 8 * 8;
    unsigned result = static_cast<unsigned>(added.value);
    for (unsigned bit = 0; bit < 8; ++bit) {
      const unsigned row = rows[7 - bit];
      result ^= (static_cast<unsigned>(std::popcount(row & x.byte[i])) & 1) << bit;
    }
    return result;
  });
}

__m512i _mm512_multishift_epi64_epi8(__m512i from, __m512i b) {
  const auto lanes = lanes_of<uint64_t>(b);
  return make_lanes<uint8_t>([&](size_t i) { return std::rotr(lanes[i / 8], from.byte[i] % 64); });
}

__m512i _mm512_popcnt_epi64(__m512i a) {
  return map<uint64_t>(a, [](uint64_t lane) { return std::popcount(lane); });
}

unsigned _bzhi_u32(unsigned a, unsigned index) {
  return static_cast<unsigned>(_bzhi_u64(a, index));
}
unsigned long long _bzhi_u64(unsigned long long a, unsigned index) {
  const unsigned kept = index % 256;
  return kept < 64 ? a & ((1ull << kept) - 1) : a;
}
unsigned _lzcnt_u32(unsigned a) { return static_cast<unsigned>(std::countl_zero(a)); }
unsigned long long _lzcnt_u64(unsigned long long a) {
  return static_cast<unsigned long long>(std::countl_zero(a));
}

unsigned long long _pdep_u64(unsigned long long a, unsigned long long mask) {
  unsigned long long result = 0;
  for (unsigned bit = 0; bit < 64; ++bit) {
    if (is_chosen(mask, bit)) {
      result |= (a & 1) << bit;
      a >>= 1;
    }
  }
  return result;
}

long long _mm_popcnt_u64(unsigned long long a) { return std::popcount(a); }
