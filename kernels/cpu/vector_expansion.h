// The reverse of appending chosen lanes to a row: the bytes of a row, back in those lanes. For AVX2
// and NEON; AVX-512 has an instruction.
#pragma once

#if defined(__x86_64__)
#include "vector_avx2.h"
#else
#include "vector_neon.h"
#endif

MEMSWAP_VECTOR_BEGIN

namespace memswap::cpu::MEMSWAP_ISA {
namespace {

// How many of the bytes' fields of 2 bits are 0, added to sums.
inline Sums add_zero_fields2(Sums sums, Vector fields) {
  // By 4 bits, that is two fields.
  alignas(16) static constexpr uint8_t kZeroFields[16] = {2, 1, 1, 1, 1, 0, 0, 0,
                                                          1, 0, 0, 0, 1, 0, 0, 0};
  const Vector table = repeat16(kZeroFields);
  return add_bytes(sums, look_up(table, fields & 15) + look_up(table, move_bits<4, 0, 4>(fields)));
}

// How many lanes are chosen, of up to 255 sets.
class LaneCounter {
 public:
  void add(Lanes lanes) { counts_ -= lanes; }
  uint32_t total() const { return sum_of(counts_); }

 private:
  Vector counts_{};
};

// See [Note: tables of symbols].
inline constexpr uint32_t kTableSymbols = 16;
inline Vector look_up_symbols(Vector table, Vector symbols) { return look_up(table, symbols); }

// What a byte float's sign, exponent and mantissa become without a rotation in between: the lowest
// kBits bits of R at bit kAt.
template <uint32_t kBits, uint32_t kAt>
inline Vector rest_of_byte(Vector element) {
  return move_bits<7, kAt, 1>(element) | move_bits<0, kAt + 1, kBits - 1>(element);
}
// And back. The lowest bit of R is the sign.
template <uint32_t kBits, uint32_t kAt>
inline Vector rest_in_byte(Vector rest) {
  alignas(16) static constexpr uint8_t kInByte[16] = {0, 0x80, 1, 0x81, 2, 0x82, 3, 0x83,
                                                      4, 0x84, 5, 0x85, 6, 0x86, 7, 0x87};
  return look_up(repeat16(kInByte), move_bits<kAt, 0, kBits>(rest));
}
// The same of 3 bits, of which the highest is set in the lanes `high`, and the others are at kAt.
template <uint32_t kAt>
inline Vector rest3_in_byte(Vector low, Lanes high) {
  alignas(16) static constexpr uint8_t kInByte[16] = {0, 2, 0, 0, 0x80, 0x82, 0,
                                                      0, 1, 3, 0, 0,    0x81, 0x83};
  return look_up(repeat16(kInByte), increment(move_bits<kAt, 2, 2>(low), high));
}

// Whether it pays to look whether all lanes are chosen, or none, where that happens.
inline constexpr bool kLooksAtMasks = true;

// Which byte of a row each chosen lane has; the row is given last, as planes of a block share it.
class Expansion {
 public:
  [[gnu::always_inline]] explicit Expansion(Lanes chosen)
      : places_(places_of(chosen)), counts_(count_lanes(chosen)) {}

  // The next bytes of a row in the chosen lanes, 0 in the others. A vector of the row is read.
  [[gnu::always_inline]] Vector of(const uint8_t* row) const {
    return look_up(load_halves(row, counts_), places_);
  }
  // The same, and goes on behind them.
  [[gnu::always_inline]] Vector take(const uint8_t*& row) const {
    const Vector expanded = of(row);
    row += count();
    return expanded;
  }
  // And `base` where nothing expands; it is 0 elsewhere.
  [[gnu::always_inline]] Vector take_over(Vector base, const uint8_t*& row) const {
    return base | take(row);
  }
  uint32_t count() const { return counts_.all; }

 private:
  // Sums over a half, from its first lane to each: so many lanes are chosen up to it. A product
  // with 0x01010101 is the sums over 4 lanes of 1 or 0. A chosen lane is 255 instead, and the
  // inverse of 255 is -0x01010101. Each 4 lanes then add the last sum of the 4 before them, and of
  // the 8 before those. A chosen lane, which is -1, makes a number of its sum; in the others the
  // highest bit is set, and a look-up finds nothing.
  [[gnu::always_inline]] static Vector places_of(Lanes chosen) {
    using Words = Elements<uint32_t>::Vector;
    constexpr uint32_t kSums = 0u - 0x01010101u * 0x01010101u;
    static_assert(255 * kSums == 0x01010101);
    alignas(16) static constexpr uint8_t kOneBefore[16] = {128, 128, 128, 128, 3,  3,  3,  3,
                                                           7,   7,   7,   7,   11, 11, 11, 11};
    alignas(16) static constexpr uint8_t kTwoBefore[16] = {128, 128, 128, 128, 128, 128, 128, 128,
                                                           3,   3,   3,   3,   7,   7,   7,   7};
    Vector sums = reinterpret_cast<Vector>(reinterpret_cast<Words>(chosen) * kSums);
    sums += look_up(sums, repeat16(kOneBefore));
    sums += look_up(sums, repeat16(kTwoBefore));
    return sums + (chosen | 128);
  }

  Vector places_;
  LaneCounts counts_;
};

#if !defined(__x86_64__)
// As in vector_avx2.h.
inline Lanes spread_bits(const uint8_t* stream, uint32_t at, Lanes chosen) {
  const uint32_t bits = load_as<uint32_t>(stream + at / 8) >> at % 8;
  uint8_t row[sizeof bits], lanes[kLanes];
  store_as(row, bits);
  store(lanes, load_lanes(row));
  return Expansion(chosen).of(lanes);
}
#endif

}  // namespace
}  // namespace memswap::cpu::MEMSWAP_ISA

MEMSWAP_VECTOR_END
