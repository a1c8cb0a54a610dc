// half and bfloat16_t: IEEE conversions with denormals and all rounding modes, arithmetic in float
// rounded once (exact for one operation: float has more than twice the digits).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace AscendC {
enum class RoundMode {
  CAST_NONE = 0,
  CAST_RINT,
  CAST_FLOOR,
  CAST_CEIL,
  CAST_ROUND,
  CAST_TRUNC,
  CAST_ODD
};
}  // namespace AscendC

namespace ascend_emulator {

// An integral double in one of the modes. CAST_NONE rounds like CAST_RINT where it must.
inline double round_double(double value, AscendC::RoundMode mode) {
  switch (mode) {
    case AscendC::RoundMode::CAST_FLOOR:
      return std::floor(value);
    case AscendC::RoundMode::CAST_CEIL:
      return std::ceil(value);
    case AscendC::RoundMode::CAST_ROUND:
      return std::round(value);
    case AscendC::RoundMode::CAST_TRUNC:
      return std::trunc(value);
    case AscendC::RoundMode::CAST_ODD: {
      const double down = std::trunc(value);
      return down == value || std::fmod(down, 2.0) != 0.0 ? down : down + std::copysign(1.0, value);
    }
    default:
      return std::nearbyint(value);
  }
}

// A binary float with `exponent_bits` and `mantissa_bits` from a double.
inline uint32_t encode_float(double value, int exponent_bits, int mantissa_bits,
                             AscendC::RoundMode mode) {
  const uint32_t sign = std::signbit(value) ? 1u << (exponent_bits + mantissa_bits) : 0;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const uint32_t infinity = ((1u << exponent_bits) - 1) << mantissa_bits;
  if (std::isnan(value)) {
    return sign | infinity | 1u << (mantissa_bits - 1);
  }
  if (std::isinf(value)) {
    return sign | infinity;
  }
  if (value == 0.0) {
    return sign;
  }
  int exponent = 0;
  std::frexp(value, &exponent);
  exponent = std::max(exponent - 1, 1 - bias);
  // In units of the last place, the sign kept: floor and ceil are about the signed value.
  const double units = round_double(std::ldexp(value, mantissa_bits - exponent), mode);
  const uint64_t magnitude = static_cast<uint64_t>(std::fabs(units));
  const uint64_t bits = magnitude + (static_cast<uint64_t>(exponent + bias - 1) << mantissa_bits);
  return sign | static_cast<uint32_t>(bits < infinity ? bits : infinity);
}

inline double decode_float(uint32_t bits, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const uint32_t mantissa = bits & ((1u << mantissa_bits) - 1);
  const uint32_t exponent = bits >> mantissa_bits & ((1u << exponent_bits) - 1);
  const double sign = bits >> (exponent_bits + mantissa_bits) & 1 ? -1.0 : 1.0;
  if (exponent == (1u << exponent_bits) - 1) {
    return mantissa != 0 ? std::numeric_limits<double>::quiet_NaN()
                         : sign * std::numeric_limits<double>::infinity();
  }
  if (exponent == 0) {
    return sign * std::ldexp(static_cast<double>(mantissa), 1 - bias - mantissa_bits);
  }
  return sign * std::ldexp(static_cast<double>(mantissa + (1u << mantissa_bits)),
                           static_cast<int>(exponent) - bias - mantissa_bits);
}

template <int kExponentBits, int kMantissaBits>
struct SmallFloat {
  uint16_t bits;

  SmallFloat() = default;
  SmallFloat(float value) : bits(from_float(value)) {}  // NOLINT: a literal converts, as on device
  operator float() const {                              // NOLINT
    const uint32_t exponent = bits >> kMantissaBits & kExponents;
    if (exponent == 0 || exponent == kExponents) {
      return static_cast<float>(decode_float(bits, kExponentBits, kMantissaBits));
    }
    const uint32_t single = static_cast<uint32_t>(bits >> 15) << 31 |
                            (((bits & 0x7fffu) << kDropped) + (kBiasDifference << 23));
    float value;
    std::memcpy(&value, &single, 4);
    return value;
  }

 private:
  static constexpr uint32_t kExponents = (1u << kExponentBits) - 1;
  static constexpr uint32_t kDropped = 23 - kMantissaBits;
  static constexpr uint32_t kBiasDifference = 127 - ((1u << (kExponentBits - 1)) - 1);

  static uint16_t from_float(float value) {
    uint32_t single;
    std::memcpy(&single, &value, 4);
    const uint32_t magnitude = single & 0x7fffffffu;
    const uint32_t sign = single >> 31 << 15;
    if (magnitude == 0) {
      return static_cast<uint16_t>(sign);
    }
    // Normal in both formats, and not rounded up to infinity: ties to even, in integers.
    const uint32_t rounded = magnitude + (magnitude >> kDropped & 1) + (1u << (kDropped - 1)) - 1;
    if (magnitude > (kBiasDifference << 23 | 0x7fffffu) &&
        rounded < (kBiasDifference + kExponents) << 23 && magnitude < 0x7f000000u) {
      return static_cast<uint16_t>(sign | (rounded - (kBiasDifference << 23)) >> kDropped);
    }
    return static_cast<uint16_t>(encode_float(static_cast<double>(value), kExponentBits,
                                              kMantissaBits, AscendC::RoundMode::CAST_RINT));
  }
};

}  // namespace ascend_emulator

using half = ascend_emulator::SmallFloat<5, 10>;
using bfloat16_t = ascend_emulator::SmallFloat<8, 7>;
static_assert(sizeof(half) == 2 && sizeof(bfloat16_t) == 2);
