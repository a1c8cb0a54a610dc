// Payloads of shape ints (docs/format.md): the block's minimum, then planes of the distances above
// it. In UB the planes begin behind a block of 32 bytes with the minimum.
#pragma once

#include "planes.h"
#include "raw.h"

namespace memswap::ascend {

constexpr uint32_t kMinimumBytes = 8;
constexpr uint32_t kPlanesAt = kUnifiedBlockBytes;

template <class Visit>
__aicore__ inline void for_each_plane(uint32_t bits, Visit visit) {
  uint32_t at = 0;
  uint32_t shift = 0;
  for (; bits - shift >= 8; shift += 8) {
    visit(shift, 8u, at);
    at += kBlockLanes;
  }
  for (uint32_t width = 4; width >= 1; width /= 2) {
    if (((bits & 7u) & width) != 0) {
      visit(shift, width, at);
      shift += width;
      at += kBlockLanes / 8 * width;
    }
  }
}

template <uint32_t kBytes>
class IntsReaderBase {
 public:
  static constexpr uint32_t kWidth = kBytes;
  static constexpr uint32_t kSlabBytes = 0;
  static constexpr uint32_t kBlockBytes = kBlockLanes * kWidth;
  static constexpr uint32_t kSlotBytes = kPlanesAt + kBlockBytes;
  static constexpr uint32_t kMaxUnits = kBlockBytes / frame::kUnitBytes;

  __aicore__ static constexpr bool takes(uint32_t mode) {
    return mode == frame::kReference || mode == frame::kLiteral;
  }

  __aicore__ inline void load(const Bytes& slot, GM_ADDR from, uint32_t mode, uint32_t units) {
    const uint32_t bytes = units * frame::kUnitBytes;
    const uint32_t head = mode == frame::kLiteral ? bytes : kMinimumBytes;
    load_bytes(slot, from, head);
    if (bytes > head) {
      load_bytes(slot[kPlanesAt], from + head, bytes - head);
    }
  }

 protected:
  // Whether a block's mode, length and number of bits go together.
  __aicore__ static inline bool is_reference(const Plan& plan, uint32_t b) {
    const uint32_t bits = plan.center[b];
    return bits < 8 * kWidth &&
           plan.units[b] * frame::kUnitBytes == kMinimumBytes + kBlockLanes / 8 * bits;
  }
};

}  // namespace memswap::ascend
