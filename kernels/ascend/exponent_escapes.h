// The escapes of LQ2 and LQ3 on the way out. Which lanes they are and where stands in vectors; what
// they are is read and put into place by the scalar unit, one by one, because this vector unit has
// neither an expansion nor a scatter. Of LQ3 these are some 3 % of the elements, of LQ2, which no
// encoder on this device writes, a quarter.
#pragma once

#include "lq3_escapes.h"

namespace memswap::ascend {

// Reads one block's payload, symbol by symbol, and never beyond its end.
class EscapeReader {
 public:
  __aicore__ inline EscapeReader(const Bytes& payload, uint32_t bytes, uint32_t center,
                                 uint32_t exponent_mask)
      : payload_(payload), bytes_(bytes), center_(center), mask_(exponent_mask) {}

  // The streams are the end of a payload that has `bytes` bytes before them.
  __aicore__ inline void stands_behind(uint32_t bytes) { before_ = bytes; }

  // Puts `count` exponents at the lanes whose numbers stand in `positions`. False if the payload's
  // length is not that of its streams.
  __aicore__ inline bool patch_lq3(const Lanes& exponents, const Lanes& positions, uint32_t count) {
    const uint32_t first = kHighBitsBytes;
    uint32_t next = first + nibble_bytes(count);
    if (next > bytes_) {
      return false;
    }
    for (uint32_t i = 0; i < count; ++i) {
      const uint32_t symbol = symbol_at(first, i, 4);
      uint32_t exponent = 0;
      if (symbol < 12) {
        exponent = center_ - (symbol + 8);
      } else if (symbol == 12) {
        exponent = center_;
      } else if (symbol == 13) {
        exponent = center_ + 1;  // v = 255
      } else if (symbol == 15) {
        if (next >= bytes_) {
          return false;
        }
        exponent = payload_.GetValue(next++);
      }
      put(exponents, positions, i, exponent);
    }
    return ends_at(next);
  }

  __aicore__ inline bool patch_lq2(const Lanes& exponents, const Lanes& positions, uint32_t count) {
    const uint32_t second = (2 * count + 7) / 8;
    if (second > bytes_) {
      return false;
    }
    uint32_t seconds = 0;
    for (uint32_t i = 0; i < count; ++i) {
      seconds += symbol_at(0, i, 2) == 3 ? 1 : 0;
    }
    uint32_t next = second + nibble_bytes(seconds);
    if (next > bytes_) {
      return false;
    }
    uint32_t taken = 0;
    for (uint32_t i = 0; i < count; ++i) {
      const uint32_t symbol = symbol_at(0, i, 2);
      uint32_t exponent = 0;
      if (symbol != 3) {
        exponent = center_ - (symbol == 0 ? 0 : symbol + 3);
      } else {
        const uint32_t rare = symbol_at(second, taken++, 4);
        if (rare < 12) {
          exponent = center_ - (rare + 6);
        } else if (rare == 12) {
          exponent = center_ + 1;  // v = 255
        } else if (rare == 13) {
          exponent = center_ + 2;  // v = 254
        } else if (rare == 15) {
          if (next >= bytes_) {
            return false;
          }
          exponent = payload_.GetValue(next++);
        }
      }
      put(exponents, positions, i, exponent);
    }
    return ends_at(next);
  }

 private:
  // Nothing but the padding of the last unit is left.
  __aicore__ inline bool ends_at(uint32_t next) const {
    return round_up(before_ + next, frame::kUnitBytes) == before_ + bytes_;
  }
  __aicore__ inline uint32_t symbol_at(uint32_t stream, uint32_t i, uint32_t width) const {
    const uint32_t bit = i * width;
    return static_cast<uint32_t>(payload_.GetValue(stream + bit / 8)) >> bit % 8 &
           ((1u << width) - 1);
  }
  __aicore__ inline void put(const Lanes& exponents, const Lanes& positions, uint32_t i,
                             uint32_t exponent) const {
    const uint32_t lane = static_cast<uint32_t>(positions.GetValue(i));
    exponents.SetValue(lane, static_cast<int16_t>(exponent & mask_));
  }

  Bytes payload_;
  uint32_t bytes_;
  uint32_t before_ = 0;
  uint32_t center_;
  uint32_t mask_;
};

}  // namespace memswap::ascend
