// Conversion between element types.
#pragma once

#include "elementwise.h"

namespace ascend_emulator {

template <class To, class From>
To convert(From value, AscendC::RoundMode mode) {
  if constexpr (std::is_integral_v<To>) {
    if constexpr (std::is_integral_v<From>) {
      const int64_t wide = static_cast<int64_t>(value);
      const int64_t low = std::numeric_limits<To>::min();
      const int64_t high = static_cast<int64_t>(std::numeric_limits<To>::max());
      return static_cast<To>(std::clamp(wide, low, high));
    } else {
      const double wide = static_cast<double>(static_cast<float>(value));
      if (std::isnan(wide)) {
        return 0;
      }
      const double rounded = round_double(wide, mode);
      // Saturates; 2^63 is not an int64_t, so the upper bound is compared as a double.
      if (rounded >= static_cast<double>(std::numeric_limits<To>::max())) {
        return std::numeric_limits<To>::max();
      }
      if (rounded <= static_cast<double>(std::numeric_limits<To>::min())) {
        return std::numeric_limits<To>::min();
      }
      return static_cast<To>(rounded);
    }
  } else if constexpr (std::is_same_v<To, float>) {
    if constexpr (std::is_same_v<From, float>) {
      return static_cast<float>(round_double(static_cast<double>(value), mode));
    } else if constexpr (sizeof(From) >= 4) {
      return static_cast<float>(
          decode_float(encode_float(static_cast<double>(value), 8, 23, mode), 8, 23));
    } else {
      return static_cast<float>(value);  // exact
    }
  } else {
    if (mode == AscendC::RoundMode::CAST_NONE || mode == AscendC::RoundMode::CAST_RINT) {
      return To(static_cast<float>(value));
    }
    constexpr int exponent_bits = std::is_same_v<To, half> ? 5 : 8;
    To result;
    result.bits = static_cast<uint16_t>(
        encode_float(static_cast<double>(value), exponent_bits, 15 - exponent_bits, mode));
    return result;
  }
}

}  // namespace ascend_emulator

namespace AscendC {

template <class To, class From>
void Cast(const LocalTensor<To>& dst, const LocalTensor<From>& src, const RoundMode& mode,
          const uint32_t count) {
  static_assert(table::cast<To, From>,
                "rule types: Cast has no such pair of types on Atlas A2 (uint8_t reaches 16-bit "
                "lanes through half)");
  const std::string call =
      ascend_emulator::call_name<To>("Cast") + " from " + ascend_emulator::type_name<From>();
  if (table::cast_takes_none_only<To, From> && mode != RoundMode::CAST_NONE) {
    ascend_emulator::violate("cast", call, "round mode ", static_cast<int>(mode),
                             ", expected CAST_NONE");
  }
  if (table::cast_needs_rounding<To, From> && mode == RoundMode::CAST_NONE) {
    ascend_emulator::violate("cast", call, "CAST_NONE, expected a rounding");
  }
  if (mode == RoundMode::CAST_ODD && !(std::is_same_v<From, float> && std::is_same_v<To, half>)) {
    ascend_emulator::violate("cast", call, "CAST_ODD, which only float to half has");
  }
  if (count == 0) {
    return;
  }
  const ascend_emulator::Access from = ascend_emulator::contiguous(call, "src", false, src, count);
  const ascend_emulator::Access to = ascend_emulator::contiguous(call, "dst", true, dst, count);
  if (sizeof(To) != sizeof(From) || dst.GetPhyAddr() != src.GetPhyAddr()) {
    ascend_emulator::need_disjoint(
        call, "dst and src", dst.GetPhyAddr(), dst.GetPhyAddr() + uint64_t{count} * sizeof(To),
        src.GetPhyAddr(), src.GetPhyAddr() + uint64_t{count} * sizeof(From));
  }
  To* target = ascend_emulator::ub_pointer(dst);
  const From* source = ascend_emulator::ub_pointer(src);
  const RoundMode chosen = mode;
  ascend_emulator::core().issue(PIPE_V, call, {from, to}, [=] {
    for (uint32_t i = 0; i < count; ++i) {
      target[i] = ascend_emulator::convert<To, From>(source[i], chosen);
    }
  });
}

}  // namespace AscendC
