// What the bytes of a fuzzer's input mean (fuzz_decode.cpp).
#pragma once

#include <stdint.h>

namespace memswap::test {

// Byte 0.
enum FuzzKind : uint8_t {
  kFuzzFrame = 0,     // byte 1: eighths of the rest that are an arena; then a frame as it is
  kFuzzRepaired = 1,  // the same, but the header is made to agree with itself and with the size
  kFuzzTensor = 2     // bytes 1-5: dtype, shape, profile, center, var; then a tensor's bytes
};
inline constexpr uint8_t kFuzzKinds = 3;
inline constexpr uint32_t kFuzzFrameHeaderBytes = 2;
inline constexpr uint32_t kFuzzTensorHeaderBytes = 6;

}  // namespace memswap::test
