// Payloads of layout ints (docs/format.md): the block's minimum, then planes of the distances above
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

// Bits of the greatest distance. What the scalar unit counts in 0 is not documented.
__aicore__ inline uint32_t bit_length(uint64_t range) {
  return range == 0 ? 0 : 64 - static_cast<uint32_t>(ScalarCountLeadingZero(range));
}

// What the record says of a block whose distances have `bits` bits.
__aicore__ inline void set_reference(TileRecord* record, uint32_t i, uint32_t bits,
                                     uint32_t width) {
  if (bits == 8 * width) {
    record->set(i, frame::kLiteral, kBlockLanes * width / frame::kUnitBytes, 0);
  } else {
    record->set(i, frame::kReference, (kMinimumBytes + kBlockLanes / 8 * bits) / frame::kUnitBytes,
                bits);
  }
}

// Puts payloads together, one block after another.
class ReferenceWriter {
 public:
  __aicore__ static constexpr uint32_t unified_bytes(uint32_t block_bytes) {
    return 2 * unified(kPlanesAt + block_bytes);
  }

  __aicore__ inline void init(TPipe* pipe, uint32_t block_bytes) {
    pipe->InitBuffer(slots_, 2, kPlanesAt + block_bytes);
  }

  // A payload of `bits` bits per element to `to`; put(plane, shift, width) writes one plane.
  template <class Put>
  __aicore__ inline void store(GM_ADDR to, uint32_t bits, uint64_t minimum, Put put) {
    Bytes slot = slots_.AllocTensor<uint8_t>();
    const LocalTensor<uint32_t> words = slot.ReinterpretCast<uint32_t>();
    uint64_t first[2] = {1, 0};
    uint64_t second[2] = {2, 0};
    Duplicate(words, static_cast<uint32_t>(minimum), first, 1, 1, 8);
    Duplicate(words, static_cast<uint32_t>(minimum >> 32), second, 1, 1, 8);
    for_each_plane(bits, [&](uint32_t shift, uint32_t width, uint32_t at)
                             __aicore__ { put(slot[kPlanesAt + at], shift, width); });
    slots_.EnQue(slot);
    slot = slots_.DeQue<uint8_t>();
    store_bytes(to, slot, kMinimumBytes);
    if (bits != 0) {
      store_bytes(to + kMinimumBytes, slot[kPlanesAt], kBlockLanes / 8 * bits);
    }
    slots_.FreeTensor(slot);
  }

 private:
  TQue<TPosition::VECOUT, 1> slots_;
};

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
  // read(block, slot, bits) makes the elements of a block that is not literal. Returns error bits.
  template <class Read>
  __aicore__ static inline uint32_t decode_blocks(const Plan& plan, const Bytes& x,
                                                  const Bytes& slots, Read read) {
    uint32_t errors = 0;
    for (uint32_t b = 0; b < plan.blocks; ++b) {
      const Bytes block = x[b * kBlockBytes];
      const Bytes slot = slots[b * kSlotBytes];
      bool good = true;
      if (plan.mode[b] == frame::kLiteral) {
        good = read_literal(block, block, 0, slot, plan.units[b], kBlockBytes);
      } else if (is_reference(plan, b)) {
        read(block, slot, plan.center[b]);
      } else {
        clear_block(block, kBlockBytes);
        good = false;
      }
      errors |= bad_payload_unless(good);
    }
    return errors;
  }

 private:
  // Whether a block's mode, length and number of bits go together.
  __aicore__ static inline bool is_reference(const Plan& plan, uint32_t b) {
    const uint32_t bits = plan.center[b];
    return bits < 8 * kWidth &&
           plan.units[b] * frame::kUnitBytes == kMinimumBytes + kBlockLanes / 8 * bits;
  }
};

}  // namespace memswap::ascend
