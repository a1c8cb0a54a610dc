// Which operation takes which element type on Atlas A2 (vector ISA dav-c220), as a table that the
// operations assert at compile time. The vendor's own headers accept some combinations that then
// fail in the device compiler or on the chip; here they do not compile.
#pragma once

#include <cstdint>
#include <type_traits>

#include "scalar_types.h"

namespace ascend_emulator::types {

template <class T, class... Allowed>
inline constexpr bool is_one_of = (std::is_same_v<T, Allowed> || ...);

template <class T>
inline constexpr bool bitwise = is_one_of<T, int16_t, uint16_t>;
template <class T>
inline constexpr bool shift = is_one_of<T, int16_t, uint16_t, int32_t, uint32_t>;
template <class T>
inline constexpr bool arithmetic = is_one_of<T, int16_t, half, int32_t, float>;
template <class T>
inline constexpr bool floating = is_one_of<T, half, float>;
template <class T>
inline constexpr bool duplicate =
    is_one_of<T, int16_t, uint16_t, half, bfloat16_t, int32_t, uint32_t, float>;
template <class T>
inline constexpr bool wide_lanes = duplicate<T>;  // 16 or 32 bits, any kind: Copy, Brcb, Gather
template <class T>
inline constexpr bool compare = is_one_of<T, half, float, int32_t>;
template <class T>
inline constexpr bool atomic = is_one_of<T, int8_t, int16_t, half, bfloat16_t, int32_t, float>;

// The pattern of a GatherMask has the width of its data.
template <class T, class Pattern>
inline constexpr bool gather_mask =
    (is_one_of<T, int16_t, uint16_t, half, bfloat16_t> && std::is_same_v<Pattern, uint16_t>) ||
    (is_one_of<T, int32_t, uint32_t, float> && std::is_same_v<Pattern, uint32_t>);

template <class To, class From>
inline constexpr bool cast =
    (is_one_of<From, uint8_t, int8_t> && std::is_same_v<To, half>) ||
    (std::is_same_v<From, int16_t> && is_one_of<To, half, float>) ||
    (std::is_same_v<From, half> && is_one_of<To, uint8_t, int8_t, int16_t, int32_t, float>) ||
    (std::is_same_v<From, bfloat16_t> && is_one_of<To, int32_t, float>) ||
    (std::is_same_v<From, int32_t> && is_one_of<To, int16_t, float, int64_t>) ||
    (std::is_same_v<From, float> &&
     is_one_of<To, int16_t, int32_t, int64_t, half, bfloat16_t, float>) ||
    (std::is_same_v<From, int64_t> && is_one_of<To, int32_t, float>);

// Conversions that lose nothing, or only saturate: the mode is CAST_NONE.
template <class To, class From>
inline constexpr bool cast_takes_none_only =
    is_one_of<From, uint8_t, int8_t> || (std::is_same_v<From, half> && std::is_same_v<To, float>) ||
    (std::is_same_v<From, bfloat16_t> && std::is_same_v<To, float>) ||
    (std::is_same_v<From, int16_t> && std::is_same_v<To, float>) ||
    (std::is_same_v<From, int32_t> && is_one_of<To, int16_t, int64_t>) ||
    (std::is_same_v<From, int64_t> && std::is_same_v<To, int32_t>);
// Conversions that always need a named rounding.
template <class To, class From>
inline constexpr bool cast_needs_rounding =
    (std::is_same_v<From, half> && is_one_of<To, int16_t, int32_t>) ||
    (std::is_same_v<From, float> && is_one_of<To, int16_t, int32_t, int64_t, bfloat16_t>) ||
    (std::is_same_v<From, bfloat16_t> && std::is_same_v<To, int32_t>);

}  // namespace ascend_emulator::types
