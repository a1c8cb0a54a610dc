// From a dtype that is known at run time, and from whether to store around the caches, to functions
// that have it as a constant, for every instruction set.
#pragma once

#include <stdint.h>

#include <type_traits>

#include "memswap/frame.h"

namespace memswap::cpu {

template <uint32_t kWidth>
using UnsignedOf = std::conditional_t<
    kWidth == 1, uint8_t,
    std::conditional_t<kWidth == 2, uint16_t, std::conditional_t<kWidth == 4, uint32_t, uint64_t>>>;

// Whether functions that store around the caches are compiled: they are half of what there is to
// compile. The fuzzer, which codes nothing that is large enough for them, leaves them out.
#if defined(MEMSWAP_CPU_WITHOUT_STREAMING)
inline constexpr bool kHasStreaming = false;
#else
inline constexpr bool kHasStreaming = true;
#endif

// Calls visit with streaming as a constant.
template <typename Function, typename Visit>
inline Function for_streaming(bool streaming, Visit visit) {
  if constexpr (kHasStreaming) {
    if (streaming) {
      return visit.template operator()<true>();
    }
  }
  return visit.template operator()<false>();
}

// Calls visit with the dtype as a constant; NULL where it is no float.
template <typename Function, typename Visit>
inline Function for_float(frame::Dtype dtype, Visit visit) {
  using frame::Dtype;
  switch (dtype) {
    case Dtype::kBf16:
      return visit.template operator()<Dtype::kBf16>();
    case Dtype::kFp16:
      return visit.template operator()<Dtype::kFp16>();
    case Dtype::kFp32:
      return visit.template operator()<Dtype::kFp32>();
    case Dtype::kFp64:
      return visit.template operator()<Dtype::kFp64>();
    case Dtype::kE4m3:
      return visit.template operator()<Dtype::kE4m3>();
    case Dtype::kE5m2:
      return visit.template operator()<Dtype::kE5m2>();
    default:
      return nullptr;
  }
}

// The same with streaming as a constant as well.
template <typename Function, typename Visit>
inline Function for_float(frame::Dtype dtype, bool streaming, Visit visit) {
  return for_float<Function>(dtype, [&]<frame::Dtype kDtype>() -> Function {
    return for_streaming<Function>(streaming, [&]<bool kStreaming>() -> Function {
      return visit.template operator()<kDtype, kStreaming>();
    });
  });
}

// Calls visit with the width of the dtype as a constant.
template <typename Function, typename Visit>
inline Function for_width(frame::Dtype dtype, Visit visit) {
  switch (frame::width_of(dtype)) {
    case 1:
      return visit.template operator()<1>();
    case 2:
      return visit.template operator()<2>();
    case 4:
      return visit.template operator()<4>();
    default:
      return visit.template operator()<8>();
  }
}

// The same with streaming as a constant as well.
template <typename Function, typename Visit>
inline Function for_width(frame::Dtype dtype, bool streaming, Visit visit) {
  return for_width<Function>(dtype, [&]<uint32_t kWidth>() -> Function {
    return for_streaming<Function>(streaming, [&]<bool kStreaming>() -> Function {
      return visit.template operator()<kWidth, kStreaming>();
    });
  });
}

}  // namespace memswap::cpu
