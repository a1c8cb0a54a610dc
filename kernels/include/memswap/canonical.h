// Constants of the canonical encoder's centres (docs/format.md section 5), shared by every backend.
//
// [Note: outliers]
// One Inf among ordinary elements is so far above them that their distances from it are all
// clipped, and a centre computed from those is a centre of nothing. Where the mean distance is so
// large that this may have happened, a sample of the exponents is asked for its median; if most of
// the sample is near it, only the exponents near it count. If it is not, the block is like random
// bits, and no centre would do.
#pragma once

#include <stdint.h>

namespace memswap::canonical {

inline constexpr uint32_t kClip = 31;  // of a distance from the maximum
inline constexpr uint32_t kFar = 16;   // mean distance from which on the sample is asked
inline constexpr uint32_t kSamples = 32;
inline constexpr uint32_t kSampleStep = 33;  // odd: meets all columns of rows of 2^k elements
inline constexpr uint32_t kMedianStep = 8;   // the median is rounded down to a multiple
inline constexpr uint32_t kBelowMedian = 12;
inline constexpr uint32_t kWindow = 32;  // no distance in it is clipped
inline constexpr uint32_t kHighestWindow = 256 - kWindow;

// What the centres c2 and c3 lie below the maximum, beside the mean distance, in eighths.
inline constexpr uint32_t kLq2Eighths = 7;
inline constexpr uint32_t kLq3Eighths = 19;

// Only distances between exponents of so many bits are ever clipped.
inline constexpr uint32_t kOutlierBits = 8;

}  // namespace memswap::canonical
