// Shape raw: every block is literal and in its slab.
#pragma once

#include "plain_encode.h"

namespace memswap::ascend {

// A copy within UB; whole blocks of 32 bytes.
__aicore__ inline void copy_bytes(const Bytes& to, const Bytes& from, uint32_t bytes) {
  DataCopy(to.ReinterpretCast<int16_t>(), from.ReinterpretCast<int16_t>(), bytes / 2);
}

template <uint32_t kWidth>
struct Raw {
  static constexpr uint32_t kSlabBytes = kBlockLanes * kWidth;
  static constexpr uint32_t kPayloadBytes = 0;
  static constexpr uint32_t kMode = frame::kLiteral;

  __aicore__ inline void init(TPipe*) {}

  __aicore__ inline bool encode(const Bytes& x, const Bytes& slab, uint32_t, uint32_t blocks,
                                uint32_t first, TileRecord* record, PayloadWriter*) {
    copy_bytes(slab, x, blocks * kSlabBytes);
    for (uint32_t b = 0; b < blocks; ++b) {
      record->set(first + b, frame::kLiteral, 0, 0);
    }
    return true;
  }

  __aicore__ inline void load(const Bytes&, GM_ADDR, uint32_t, uint32_t) {}
  __aicore__ inline bool decode(const Bytes& x, const Bytes& slab, const Bytes&, uint32_t,
                                uint32_t bytes, uint32_t) {
    copy_bytes(x, slab, kSlabBytes);
    return bytes == 0;
  }
};

}  // namespace memswap::ascend
