// The frames in golden/: what was encoded, as patterns. Canonical unless `fast`; portable; checked.
#pragma once

#include "memswap/codec.h"
#include "memswap/frame.h"
#include "patterns.h"

namespace memswap::test {

struct GoldenFrame {
  const char* name;  // golden/<name>.msf
  frame::Dtype dtype;
  frame::Layout layout;
  Pattern pattern;
  uint64_t seed;
  uint64_t elements;
  uint32_t mode;  // of the first block
  bool fast = false;
  uint8_t center = 0;
};

// clang-format off
inline constexpr GoldenFrame kGoldenFrames[] = {
    {"bf16-empty", frame::Dtype::kBf16, frame::Layout::kDense, {Kind::kNormal, 0}, 1, 0, frame::kNone},
    {"bf16-lq2", frame::Dtype::kBf16, frame::Layout::kDense, {Kind::kOutliers, 3}, 1, 1000, frame::kLq2},
    {"bf16-lq3", frame::Dtype::kBf16, frame::Layout::kDense, {Kind::kOutliers, 9}, 1, 1000, frame::kLq3},
    {"bf16-lq3-tail", frame::Dtype::kBf16, frame::Layout::kDense, {Kind::kDecay, 13}, 1, 3000, frame::kLq3},
    {"bf16-normal", frame::Dtype::kBf16, frame::Layout::kDense, {Kind::kNormal, 0}, 1, 1024, frame::kLq2},
    {"bf16-fw2", frame::Dtype::kBf16, frame::Layout::kDense, {Kind::kConstant, 1}, 1, 1024, frame::kFw2},
    {"bf16-fw3", frame::Dtype::kBf16, frame::Layout::kDense, {Kind::kWindow, 3}, 1, 1024, frame::kFw3},
    {"bf16-fw4", frame::Dtype::kBf16, frame::Layout::kDense, {Kind::kWindow, 4}, 1, 1024, frame::kFw4},
    {"bf16-fw5", frame::Dtype::kBf16, frame::Layout::kDense, {Kind::kWindow, 5}, 1, 1024, frame::kFw5},
    {"bf16-fw6", frame::Dtype::kBf16, frame::Layout::kDense, {Kind::kWindow, 6}, 1, 1024, frame::kFw6},
    {"bf16-fw7", frame::Dtype::kBf16, frame::Layout::kDense, {Kind::kWindow, 7}, 1, 1024, frame::kFw7},
    {"bf16-fw8", frame::Dtype::kBf16, frame::Layout::kDense, {Kind::kRandomBits, 0}, 1, 1000, frame::kFw8},
    {"bf16-nan", frame::Dtype::kBf16, frame::Layout::kDense, {Kind::kNotANumber, 0}, 1, 1000, frame::kFw8},
    {"bf16-subnormal", frame::Dtype::kBf16, frame::Layout::kDense, {Kind::kSubnormal, 3}, 1, 1000, frame::kLq3},
    {"bf16-outlier", frame::Dtype::kBf16, frame::Layout::kDense, {Kind::kSpikes, 10}, 1, 3000, frame::kLq2},
    {"bf16-outlier-quarter", frame::Dtype::kBf16, frame::Layout::kDense, {Kind::kSpikes, 2}, 1, 1000, frame::kLq2},
    {"bf16-outlier-channels", frame::Dtype::kBf16, frame::Layout::kDense, {Kind::kChannels, 16}, 1, 1024, frame::kLq2},
    {"bf16-outlier-median", frame::Dtype::kBf16, frame::Layout::kDense, {Kind::kOutliers, 36}, 2, 1024, frame::kFw8},
    {"bf16-outlier-sparse", frame::Dtype::kBf16, frame::Layout::kSparse, {Kind::kSpikes, 6}, 1, 1500, frame::kZeros},
    {"fp32-outlier", frame::Dtype::kFp32, frame::Layout::kDense, {Kind::kSpikes, 8}, 1, 1000, frame::kLq2},
    {"fp64-outlier-channels", frame::Dtype::kFp64, frame::Layout::kDense, {Kind::kChannels, 5}, 1, 1000, frame::kLq2},
    {"bf16-two-tiles", frame::Dtype::kBf16, frame::Layout::kDense, {Kind::kMixed, 0}, 1, 8192 + 1100, frame::kLq2},
    {"bf16-fast", frame::Dtype::kBf16, frame::Layout::kDense, {Kind::kNormal, 0}, 2, 1500, frame::kLq2, true, 128},
    {"bf16-fast-fw8", frame::Dtype::kBf16, frame::Layout::kDense, {Kind::kNormal, 0}, 2, 1000, frame::kFw8, true, 3},
    {"bf16-fast-above", frame::Dtype::kBf16, frame::Layout::kDense, {Kind::kNormal, 0}, 2, 1000, frame::kLq2, true, 125},
    {"bf16-fast-below", frame::Dtype::kBf16, frame::Layout::kDense, {Kind::kOutliers, 16}, 2, 1000, frame::kLq2, true, 145},
    {"bf16-sparse", frame::Dtype::kBf16, frame::Layout::kSparse, {Kind::kSparse, 8}, 1, 1500, frame::kZeros},
    {"bf16-sparse-signed", frame::Dtype::kBf16, frame::Layout::kSparse, {Kind::kSignedSparse, 8}, 1, 1500, frame::kSignedZeros},
    {"bf16-sparse-literal", frame::Dtype::kBf16, frame::Layout::kSparse, {Kind::kRandomBits, 0}, 1, 1024, frame::kLiteral},
    {"bf16-sparse-as-long-as-literal", frame::Dtype::kBf16, frame::Layout::kSparse, {Kind::kOutliers, 14}, 5, 1024, frame::kLiteral},
    {"bf16-sparse-shorter-than-literal", frame::Dtype::kBf16, frame::Layout::kSparse, {Kind::kOutliers, 14}, 12, 1024, frame::kZeros},
    {"bf16-sparse-zeros", frame::Dtype::kBf16, frame::Layout::kSparse, {Kind::kConstant, 0}, 1, 1500, frame::kZeros},
    {"bf16-ints-constant", frame::Dtype::kBf16, frame::Layout::kInts, {Kind::kConstant, 1}, 1, 1500, frame::kReference},
    {"bf16-raw", frame::Dtype::kBf16, frame::Layout::kRaw, {Kind::kRandomBits, 0}, 1, 1000, frame::kLiteral},
    {"fp16-lq2", frame::Dtype::kFp16, frame::Layout::kDense, {Kind::kOutliers, 3}, 1, 1000, frame::kLq2},
    {"fp16-lq3", frame::Dtype::kFp16, frame::Layout::kDense, {Kind::kOutliers, 9}, 1, 1024, frame::kLq3},
    {"fp16-fw5", frame::Dtype::kFp16, frame::Layout::kDense, {Kind::kRandomBits, 0}, 1, 1000, frame::kFw5},
    {"fp16-fast-fw5", frame::Dtype::kFp16, frame::Layout::kDense, {Kind::kNormal, 0}, 1, 1000, frame::kFw5, true, 2},
    {"fp16-sparse", frame::Dtype::kFp16, frame::Layout::kSparse, {Kind::kSparse, 8}, 1, 1500, frame::kZeros},
    {"fp16-sparse-signed", frame::Dtype::kFp16, frame::Layout::kSparse, {Kind::kSignedSparse, 1}, 1, 1500, frame::kSignedZeros},
    {"fp32-lq2", frame::Dtype::kFp32, frame::Layout::kDense, {Kind::kOutliers, 3}, 1, 1000, frame::kLq2},
    {"fp32-lq3", frame::Dtype::kFp32, frame::Layout::kDense, {Kind::kOutliers, 9}, 1, 1000, frame::kLq3},
    {"fp32-fw8", frame::Dtype::kFp32, frame::Layout::kDense, {Kind::kRandomBits, 0}, 1, 1000, frame::kFw8},
    {"fp32-sparse", frame::Dtype::kFp32, frame::Layout::kSparse, {Kind::kSparse, 8}, 1, 1000, frame::kZeros},
    {"fp32-sparse-signed", frame::Dtype::kFp32, frame::Layout::kSparse, {Kind::kSignedSparse, 1}, 1, 1000, frame::kSignedZeros},
    {"fp32-upcast-lq2", frame::Dtype::kFp32, frame::Layout::kUpcast, {Kind::kUpcastOutliers, 3}, 1, 1000, frame::kLq2},
    {"fp32-upcast-lq3", frame::Dtype::kFp32, frame::Layout::kUpcast, {Kind::kUpcastOutliers, 9}, 1, 1000, frame::kLq3},
    {"fp32-upcast-fw4", frame::Dtype::kFp32, frame::Layout::kUpcast, {Kind::kUpcastWindow, 4}, 1, 1024, frame::kFw4},
    {"fp32-upcast-fw8", frame::Dtype::kFp32, frame::Layout::kUpcast, {Kind::kUpcastWindow, 8}, 1, 1000, frame::kFw8},
    {"fp32-upcast-fast", frame::Dtype::kFp32, frame::Layout::kUpcast, {Kind::kUpcast, 0}, 1, 1000, frame::kLq2, true, 128},
    {"fp32-upcast-literal", frame::Dtype::kFp32, frame::Layout::kUpcast, {Kind::kNormal, 0}, 1, 1000, frame::kLiteral},
    {"fp64-lq2", frame::Dtype::kFp64, frame::Layout::kDense, {Kind::kOutliers, 3}, 1, 1000, frame::kLq2},
    {"fp64-fw8", frame::Dtype::kFp64, frame::Layout::kDense, {Kind::kRandomBits, 0}, 1, 1000, frame::kFw8},
    {"fp64-sparse", frame::Dtype::kFp64, frame::Layout::kSparse, {Kind::kSparse, 8}, 1, 1000, frame::kZeros},
    {"fp64-sparse-signed", frame::Dtype::kFp64, frame::Layout::kSparse, {Kind::kSignedSparse, 1}, 1, 1000, frame::kSignedZeros},
    {"e4m3-lq2", frame::Dtype::kE4m3, frame::Layout::kDense, {Kind::kOutliers, 3}, 1, 1000, frame::kLq2},
    {"e4m3-fw3", frame::Dtype::kE4m3, frame::Layout::kDense, {Kind::kWindow, 3}, 1, 1024, frame::kFw3},
    {"e4m3-fw4", frame::Dtype::kE4m3, frame::Layout::kDense, {Kind::kRandomBits, 0}, 1, 1000, frame::kFw4},
    {"e4m3-sparse", frame::Dtype::kE4m3, frame::Layout::kSparse, {Kind::kSparse, 8}, 1, 1000, frame::kZeros},
    {"e4m3-sparse-signed", frame::Dtype::kE4m3, frame::Layout::kSparse, {Kind::kSignedSparse, 8}, 1, 1000, frame::kSignedZeros},
    {"e5m2-lq2", frame::Dtype::kE5m2, frame::Layout::kDense, {Kind::kOutliers, 3}, 1, 1000, frame::kLq2},
    {"e5m2-lq3", frame::Dtype::kE5m2, frame::Layout::kDense, {Kind::kOutliers, 9}, 1, 1024, frame::kLq3},
    {"e5m2-fw5", frame::Dtype::kE5m2, frame::Layout::kDense, {Kind::kRandomBits, 0}, 1, 1000, frame::kFw5},
    {"e5m2-sparse", frame::Dtype::kE5m2, frame::Layout::kSparse, {Kind::kSparse, 8}, 1, 1000, frame::kZeros},
    {"bool-bits", frame::Dtype::kBool, frame::Layout::kBits, {Kind::kBooleans, 0}, 1, 1500, frame::kBitmap},
    {"bool-bits-literal", frame::Dtype::kBool, frame::Layout::kBits, {Kind::kRandomBits, 0}, 1, 1000, frame::kLiteral},
    {"int8-ints", frame::Dtype::kInt8, frame::Layout::kInts, {Kind::kRange, 3}, 2, 1000, frame::kReference},
    {"uint8-ints", frame::Dtype::kUint8, frame::Layout::kInts, {Kind::kRange, 7}, 5, 1000, frame::kReference},
    {"uint8-ints-literal", frame::Dtype::kUint8, frame::Layout::kInts, {Kind::kRandomBits, 0}, 1, 1000, frame::kLiteral},
    {"int16-ints", frame::Dtype::kInt16, frame::Layout::kInts, {Kind::kRange, 11}, 2, 1000, frame::kReference},
    {"uint16-ints", frame::Dtype::kUint16, frame::Layout::kInts, {Kind::kRange, 15}, 1, 1000, frame::kReference},
    {"int32-ints", frame::Dtype::kInt32, frame::Layout::kInts, {Kind::kRange, 21}, 2, 1000, frame::kReference},
    {"uint32-ints", frame::Dtype::kUint32, frame::Layout::kInts, {Kind::kRange, 7}, 1, 1000, frame::kReference},
    {"int64-ints", frame::Dtype::kInt64, frame::Layout::kInts, {Kind::kRange, 11}, 2, 1000, frame::kReference},
    {"int64-sorted", frame::Dtype::kInt64, frame::Layout::kInts, {Kind::kSorted, 5}, 1, 2500, frame::kReference},
    {"uint64-ints", frame::Dtype::kUint64, frame::Layout::kInts, {Kind::kRange, 45}, 1, 1000, frame::kReference},
    {"bits32-raw", frame::Dtype::kBits32, frame::Layout::kRaw, {Kind::kRandomBits, 0}, 1, 300, frame::kLiteral},
    {"bits64-constant", frame::Dtype::kBits64, frame::Layout::kInts, {Kind::kConstant, 1}, 1, 1500, frame::kReference},
    {"bool-bits-zeros", frame::Dtype::kBool, frame::Layout::kBits, {Kind::kConstant, 0}, 1, 1500, frame::kBitmap},
    {"bool-bits-causal", frame::Dtype::kBool, frame::Layout::kBits, {Kind::kCausal, 6}, 1, 3000, frame::kBitmap},
    {"bool-bits-longest-packed", frame::Dtype::kBool, frame::Layout::kBits, {Kind::kMixedBytes, 95}, 1, 1024, frame::kBitmap},
    {"bool-bits-shortest-plain", frame::Dtype::kBool, frame::Layout::kBits, {Kind::kMixedBytes, 96}, 1, 1024, frame::kBitmap},
    {"bf16-sparse-causal", frame::Dtype::kBf16, frame::Layout::kSparse, {Kind::kCausal, 6}, 1, 3000, frame::kZeros},
    {"bf16-sparse-packed", frame::Dtype::kBf16, frame::Layout::kSparse, {Kind::kMixedBytes, 41}, 1, 1500, frame::kZeros},
    {"fp32-sparse-packed", frame::Dtype::kFp32, frame::Layout::kSparse, {Kind::kMixedBytes, 17}, 2, 1000, frame::kZeros},
    {"e4m3-sparse-causal", frame::Dtype::kE4m3, frame::Layout::kSparse, {Kind::kCausal, 7}, 1, 3000, frame::kZeros},
};
// clang-format on

// The job that encodes a golden frame's elements; where to is the caller's to say.
inline memswap_encode_job encode_job_of(const GoldenFrame& golden, const void* elements) {
  memswap_encode_job job{};
  job.input = elements;
  job.elements = golden.elements;
  job.dtype = static_cast<uint8_t>(golden.dtype);
  job.layout = static_cast<uint8_t>(golden.layout);
  job.profile = golden.fast ? MEMSWAP_FAST : MEMSWAP_CANONICAL;
  job.center = golden.center;
  job.checksum = 1;
  return job;
}

}  // namespace memswap::test
