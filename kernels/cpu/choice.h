// What the AVX-512 path and the portable vector path know about modes without a vector at hand:
// statistics of a block's symbols E, centers, and what a choice is (docs/format.md section 5).
// Compiled for the target's baseline in both.
#pragma once

#include <stdint.h>

#include "memswap/canonical.h"
#include "memswap/frame.h"

namespace memswap::cpu {

// --- Statistics --------------------------------------------------------------------------------

struct Range {
  uint32_t minimum, maximum;
  uint32_t sum;  // only of short symbols
};

// Symbols so short that their distances are never clipped.
constexpr bool is_short(uint32_t symbol_bits) { return symbol_bits <= 5; }

// What a symbol 0 adds to a sum of min(maximum - E, 31).
inline uint32_t distance_of_zero(uint32_t maximum) {
  return maximum < canonical::kClip ? maximum : canonical::kClip;
}

// Of the symbols that are not 0.
struct Distances {
  uint32_t sum;  // of min(maximum - E, 31)
  uint32_t count;
  uint32_t lowest;  // no E is below it
};

inline bool may_have_outliers(const Distances& distances) {
  return distances.sum >= canonical::kFar * distances.count && distances.count != 0;
}

// --- Centers -----------------------------------------------------------------------------------

// What a center is computed from.
struct Crowd {
  uint32_t maximum;
  Distances distances;
};

// Section 5: the center of a code whose middle is `eighths` below the maximum.
inline uint8_t center_of(const Crowd& crowd, uint32_t eighths) {
  const uint32_t count = crowd.distances.count == 0 ? 1 : crowd.distances.count;
  const uint32_t sum = 8 * crowd.distances.sum;
  const uint32_t quotient = sum > eighths * count ? (sum - eighths * count) / (8 * count) : 0;
  return static_cast<uint8_t>(crowd.maximum + 1 - quotient);
}

// How a mode codes symbols.
enum class Code { kLq2, kLq3, kFixed };

// --- Choice ------------------------------------------------------------------------------------

inline uint32_t size_of_fixed(uint32_t bits) { return frame::kBlockElements / 8 * (bits - 2); }

// LQ3 has a plane of bits for a start, so it cannot win against anything as short.
inline constexpr uint32_t kLq3LeastUnits = frame::kBlockElements / 8 / frame::kUnitBytes;

// Which mode section 5 wants, with what it costs.
struct Choice {
  uint32_t mode;
  uint8_t center;
  uint8_t center2;
  uint32_t nonzero;
  uint32_t units;  // the most that a guessed mode may cost
};

// [Note: guessed modes]
// What LQ2 or LQ3 costs is known without counting once it has been written, and the blocks of a
// tensor are alike. So a block is taken for one of the mode that the block before it came to, and
// coded as such. Only if that turns out to be longer than what no other mode can beat, all is
// counted, and the block coded anew.
inline constexpr uint32_t kNoGuess = 0;

// From what is known before a block is written. LQ2 is guessed in vain while it is longer than LQ3
// might be.
inline uint32_t guess_after(const Choice& choice) {
  return choice.mode == frame::kLq2 && choice.units > kLq3LeastUnits ? kNoGuess : choice.mode;
}

}  // namespace memswap::cpu
