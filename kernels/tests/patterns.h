// Deterministic tensors for the tests of every backend: header-only C++17, integers only, any
// element by itself, so that a test on another machine or in another language makes the same bytes.
//
// splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014), as
// a counter: random(seed, i) = mix(seed + (i + 1) * 0x9e3779b97f4a7c15) with
//   z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9; z = (z ^ (z >> 27)) * 0x94d049bb133111eb; z ^ (z >>
//   31).
// Element i of a pattern takes word = random(seed, 2 i) and more = random(seed, 2 i + 1).
#pragma once

#include <stdint.h>
#include <string.h>

#include "memswap/frame.h"

namespace memswap::test {

inline uint64_t splitmix64(uint64_t seed, uint64_t counter) {
  uint64_t z = seed + (counter + 1) * UINT64_C(0x9e3779b97f4a7c15);
  z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
  z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
  return z ^ (z >> 31);
}

enum class Kind : uint8_t {
  kConstant,        // all bits are those of random(seed, parameter); 0: all bits 0
  kSign,            // the sign bit alone: -0, or the smallest integer
  kRandomBits,      // every bit random
  kWindow,          // floats: E uniform in a window of 2^parameter values
  kOutliers,        // floats: E uniform in a window of `parameter` values, one in 64 anywhere below
  kNormal,          // floats: about a normal distribution's exponents; scale moves with parameter
  kDecay,           // floats: each octave below the largest is `parameter` sixteenths as likely
  kSubnormal,       // floats: exponent 0; one in `parameter` as in kNormal, if not 0
  kNotANumber,      // floats: exponent all ones and any mantissa, one in two as in kNormal
  kSparse,          // +0, and `parameter` of 16 as in kNormal
  kSignedSparse,    // +-0, and `parameter` of 16 as in kNormal
  kRange,           // integers: base + uniform in `parameter` bits
  kSorted,          // integers: increasing by `parameter` with some noise
  kBooleans,        // 0 and 1; one in 2^parameter is anything, if parameter is not 0
  kUpcast,          // fp32: kNormal with 16 low bits 0; one in 2^parameter has others, if not 0
  kUpcastWindow,    // fp32: kWindow with 16 low bits 0
  kUpcastOutliers,  // fp32: kOutliers with 16 low bits 0
  kMixed,           // every block of 1024 is another one of the first kMixedPatterns of kPatterns
  kSpikes,          // floats: kNormal, and one in 2^parameter is Inf, NaN or one of the largest
  kChannels,        // floats: kNormal, and every parameter-th is larger by a large power of two
  kMixedBytes,      // ones (floats: kNormal) and zeros: of the 128 bytes of a block's bitmap,
                    // `parameter` are mixed, and the others 0x00 or 0xff
  kCausal           // rows of 2^parameter: one more one (floats: kNormal) in each, the others 0
};

struct Pattern {
  Kind kind;
  uint8_t parameter;
};

// What kMixed picks from: each (layout, mode) of the format is reached by one of them.
inline constexpr Pattern kPatterns[] = {
    {Kind::kConstant, 0},       {Kind::kConstant, 1},     {Kind::kSign, 0},
    {Kind::kRandomBits, 0},     {Kind::kWindow, 2},       {Kind::kWindow, 3},
    {Kind::kWindow, 4},         {Kind::kWindow, 5},       {Kind::kWindow, 6},
    {Kind::kWindow, 7},         {Kind::kWindow, 8},       {Kind::kOutliers, 1},
    {Kind::kOutliers, 3},       {Kind::kOutliers, 6},     {Kind::kOutliers, 9},
    {Kind::kOutliers, 16},      {Kind::kNormal, 0},       {Kind::kNormal, 1},
    {Kind::kNormal, 200},       {Kind::kSubnormal, 0},    {Kind::kSubnormal, 3},
    {Kind::kSubnormal, 40},     {Kind::kNotANumber, 0},   {Kind::kSparse, 0},
    {Kind::kSparse, 1},         {Kind::kSparse, 8},       {Kind::kSparse, 15},
    {Kind::kSparse, 16},        {Kind::kSignedSparse, 0}, {Kind::kSignedSparse, 1},
    {Kind::kSignedSparse, 8},   {Kind::kRange, 1},        {Kind::kRange, 3},
    {Kind::kRange, 7},          {Kind::kRange, 8},        {Kind::kRange, 11},
    {Kind::kRange, 15},         {Kind::kRange, 21},       {Kind::kRange, 31},
    {Kind::kRange, 45},         {Kind::kRange, 63},       {Kind::kSorted, 1},
    {Kind::kSorted, 5},         {Kind::kBooleans, 0},     {Kind::kBooleans, 10},
    {Kind::kUpcast, 0},         {Kind::kUpcast, 11},      {Kind::kUpcastWindow, 3},
    {Kind::kUpcastWindow, 4},   {Kind::kUpcastWindow, 5}, {Kind::kUpcastWindow, 6},
    {Kind::kUpcastWindow, 7},   {Kind::kUpcastWindow, 8}, {Kind::kUpcastOutliers, 3},
    {Kind::kUpcastOutliers, 9}, {Kind::kDecay, 12},       {Kind::kDecay, 14},
    {Kind::kSpikes, 10},        {Kind::kSpikes, 4},       {Kind::kSpikes, 2},
    {Kind::kChannels, 64},      {Kind::kChannels, 5},     {Kind::kChannels, 2},
    {Kind::kMixedBytes, 0},     {Kind::kMixedBytes, 40},  {Kind::kMixedBytes, 95},
    {Kind::kMixedBytes, 96},    {Kind::kMixedBytes, 127}, {Kind::kMixedBytes, 128},
    {Kind::kCausal, 5},         {Kind::kCausal, 10},
};
inline constexpr uint32_t kMixedPatterns = 57;  // golden frames hold them
inline constexpr uint32_t kPatternCount = sizeof(kPatterns) / sizeof(kPatterns[0]);

// The fields of IEEE-like floats, for integers a guess by width that the patterns are as good with.
struct FloatFields {
  uint32_t exponent_bits;
  uint32_t mantissa_bits;
};

inline FloatFields float_fields(frame::Dtype dtype) {
  switch (dtype) {
    case frame::Dtype::kBf16:
      return {8, 7};
    case frame::Dtype::kE4m3:
      return {4, 3};
    case frame::Dtype::kE5m2:
      return {5, 2};
    default:
      break;
  }
  switch (frame::width_of(dtype)) {
    case 1:
      return {4, 3};
    case 2:
      return {5, 10};
    case 4:
      return {8, 23};
    default:
      return {11, 52};
  }
}

inline uint64_t low_bits(uint32_t bits) {
  return bits >= 64 ? ~UINT64_C(0) : (UINT64_C(1) << bits) - 1;
}

// Element `index`, in the low bits.
inline uint64_t element_of(Pattern pattern, frame::Dtype dtype, uint64_t seed, uint64_t index) {
  const uint32_t width_bits = 8 * frame::width_of(dtype);
  const FloatFields fields = float_fields(dtype);
  const uint64_t word = splitmix64(seed, 2 * index);
  const uint64_t more = splitmix64(seed, 2 * index + 1);
  const uint64_t parameter = pattern.parameter;

  // A float with this (biased) exponent and the word's sign and mantissa.
  const auto with_exponent = [&](uint64_t exponent) {
    const uint64_t mantissa = word & low_bits(fields.mantissa_bits);
    const uint64_t sign = (word >> 63) << (width_bits - 1);
    return sign | (exponent & low_bits(fields.exponent_bits)) << fields.mantissa_bits | mantissa;
  };
  // E is the upper 8 bits of an exponent of 11.
  const uint32_t below_e = fields.exponent_bits > 8 ? fields.exponent_bits - 8 : 0;
  const auto with_symbol = [&](uint64_t symbol) {
    return with_exponent(symbol << below_e | (more >> 32 & low_bits(below_e)));
  };
  const uint64_t symbols = low_bits(fields.exponent_bits - below_e) + 1;
  // Each octave below the largest is half as likely, as it is in a normal distribution.
  const auto normal = [&](uint64_t scale) {
    const uint64_t largest =
        (low_bits(fields.exponent_bits) / 2 + scale) & low_bits(fields.exponent_bits);
    uint64_t octave = 0;
    for (uint64_t coins = more | UINT64_C(1) << 40; (coins & 1) == 0; coins >>= 1) {
      ++octave;
    }
    return with_exponent(largest > octave ? largest - octave : 0);
  };

  const uint64_t one_or_normal = frame::split_of(dtype).exponent_bits == 0 ? 1 : normal(0);

  uint64_t element = 0;
  switch (pattern.kind) {
    case Kind::kConstant:
      element = parameter == 0 ? 0 : splitmix64(seed, parameter);
      break;
    case Kind::kSign:
      element = UINT64_C(1) << (width_bits - 1);
      break;
    case Kind::kRandomBits:
      element = word;
      break;
    case Kind::kWindow: {
      const uint64_t window = parameter >= 8 ? 256 : UINT64_C(1) << parameter;
      const uint64_t size = window < symbols ? window : symbols;
      element = with_symbol((symbols - size) / 2 + more % size);
      break;
    }
    case Kind::kOutliers:
      element = with_symbol((more >> 16) % 64 == 0 ? (more >> 8) % (symbols / 2)
                                                   : symbols / 2 + more % parameter);
      break;
    case Kind::kNormal:
      element = normal(parameter);
      break;
    case Kind::kDecay: {
      uint64_t octave = 0;
      for (uint64_t dice = more; octave < 40 && (dice & 15) < parameter; ++octave) {
        dice = splitmix64(dice, octave);
      }
      element = with_symbol(symbols * 3 / 4 > octave ? symbols * 3 / 4 - octave : 0);
      break;
    }
    case Kind::kSubnormal:
      element = parameter != 0 && word % parameter == 0 ? normal(0) : with_exponent(0);
      break;
    case Kind::kNotANumber:
      element = (more & 64) != 0 ? normal(0) : with_exponent(~UINT64_C(0));
      break;
    case Kind::kSparse:
      element = (more >> 50) % 16 < parameter ? normal(0) : 0;
      break;
    case Kind::kSignedSparse:
      element = (more >> 50) % 16 < parameter ? normal(0) : (word >> 63) << (width_bits - 1);
      break;
    case Kind::kRange:
      // Around 0 for an even seed, so that signed integers have both signs.
      element = (word & low_bits(pattern.parameter)) +
                ((seed & 1) != 0 ? splitmix64(seed, 0) : ~UINT64_C(0));
      break;
    case Kind::kSorted:
      element = index * parameter + word % 4;
      break;
    case Kind::kBooleans:
      element = parameter != 0 && more >> (64 - parameter) == 0 ? word : word >> 63;
      break;
    case Kind::kUpcast:
      element = normal(0);
      if (parameter == 0 || more >> (64 - parameter) != 0) {
        element &= ~UINT64_C(0xffff);
      }
      break;
    case Kind::kUpcastWindow:
      element = element_of({Kind::kWindow, pattern.parameter}, dtype, seed, index);
      element &= ~UINT64_C(0xffff);
      break;
    case Kind::kUpcastOutliers:
      element = element_of({Kind::kOutliers, pattern.parameter}, dtype, seed, index);
      element &= ~UINT64_C(0xffff);
      break;
    case Kind::kSpikes:
      element = (more >> 44 & low_bits(pattern.parameter)) == 0
                    ? with_exponent(low_bits(fields.exponent_bits) - (more >> 60) % 3)
                    : normal(0);
      break;
    case Kind::kChannels:
      element = index % parameter == parameter / 2
                    ? with_symbol(symbols * 7 / 8 + (more >> 44) % (symbols / 8))
                    : normal(0);
      break;
    case Kind::kMixedBytes: {
      // The first `parameter` places of a permutation of the 128; 0, and 1, differ within a byte.
      const uint64_t byte = index / 8;
      const uint64_t bits = splitmix64(~seed, byte);
      const bool mixed = byte * 37 % 128 < parameter;
      const uint64_t bit = index % 8;
      const bool is_one =
          mixed ? bit == 0 || (bit != 7 && (bits >> bit & 1) != 0) : (bits & 1) != 0;
      element = is_one ? one_or_normal : 0;
      break;
    }
    case Kind::kCausal: {
      const uint64_t row = index >> parameter;
      element = (index & low_bits(pattern.parameter)) <= row ? one_or_normal : 0;
      break;
    }
    case Kind::kMixed: {
      const uint64_t block = index / frame::kBlockElements;
      const Pattern chosen = kPatterns[(splitmix64(~seed, 0) + block) % kMixedPatterns];
      return element_of(chosen, dtype, seed, index);
    }
  }
  return element & low_bits(width_bits);
}

// Writes elements first .. first + count - 1 at `out`, little-endian.
inline void fill(Pattern pattern, frame::Dtype dtype, uint64_t seed, uint64_t first, uint64_t count,
                 void* out) {
  const uint32_t width = frame::width_of(dtype);
  unsigned char* bytes = static_cast<unsigned char*>(out);
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t element = element_of(pattern, dtype, seed, first + i);
    for (uint32_t byte = 0; byte < width; ++byte) {
      bytes[i * width + byte] = static_cast<unsigned char>(element >> (8 * byte));
    }
  }
}

}  // namespace memswap::test
