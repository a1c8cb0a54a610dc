// What the bytes of a fuzzer's input mean (fuzz_decode.cpp).
#pragma once

#include <stdint.h>

namespace memswap::test {

// Byte 0.
enum FuzzKind : uint8_t {
  // Byte 1: in its low 3 bits, eighths of the rest that are an arena; then a frame as it is.
  kFuzzFrame = 0,
  // The same, but the header is made to agree with itself and with the size.
  kFuzzRepaired = 1,
  // Bytes 1-5: dtype, layout (kFuzzChosenLayout: by sample), options, center, how much of the worst
  // case is in var (255: all); then a tensor's bytes.
  kFuzzTensor = 2,
  // Bytes 1-5 the same; 6, 7: how many elements; then a few of which all are drawn.
  kFuzzDrawn = 3
};
inline constexpr uint8_t kFuzzKinds = 4;
inline constexpr uint8_t kFuzzChosenLayout = 6;  // behind those that there are
inline constexpr uint32_t kFuzzFrameHeaderBytes = 2;
inline constexpr uint32_t kFuzzTensorHeaderBytes = 6;
inline constexpr uint32_t kFuzzDrawnHeaderBytes = 8;

// Bits of the options.
enum FuzzOptions : uint8_t {
  kFuzzFast = 1,
  kFuzzChecksum = 2,
  kFuzzNoise = 4,   // drawn: the low bits are random
  kFuzzOffset = 8,  // and up: how many elements behind a multiple of 128 bytes tensors begin
};

// Enough for a whole block of any dtype as a frame, and for many of the narrow ones.
inline constexpr uint32_t kMaxFuzzBytes = 8448;

}  // namespace memswap::test
