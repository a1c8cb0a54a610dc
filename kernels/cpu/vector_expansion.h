// The reverse of appending chosen lanes to a row: the bytes of a row, back in those lanes.
#pragma once

#include "vector_bytes.h"

MEMSWAP_VECTOR_BEGIN

namespace memswap::cpu::vector {
namespace {

// Which byte of a row each chosen lane has; the row is given last, as planes of a block share it.
class Expansion {
 public:
  // `chosen`: lanes of 0 or 255.
  [[gnu::always_inline]] explicit Expansion(Vector chosen)
      : places_(places_of(chosen)), counts_(count_lanes(chosen)) {}

  // The next bytes of a row in the chosen lanes, 0 in the others. A vector of the row is read.
  [[gnu::always_inline]] Vector of(const uint8_t* row) const {
    return look_up(load_halves(row, counts_), places_);
  }
  // The same, and goes on behind them.
  [[gnu::always_inline]] Vector take(const uint8_t*& row) const {
    const Vector expanded = of(row);
    row += count();
    return expanded;
  }
  uint32_t count() const { return counts_.all; }

 private:
  // Sums over a half, from its first lane to each: so many lanes are chosen up to it, and a chosen
  // lane adds 255, which is -1. In lanes that are not chosen, a look-up finds nothing.
  [[gnu::always_inline]] static Vector places_of(Vector chosen) {
    Vector sums = chosen;
    sums += move_up<1>(sums);
    sums += move_up<2>(sums);
    sums += move_up<4>(sums);
    sums += move_up<8>(sums);
    return ~(sums & chosen);
  }

  Vector places_;
  LaneCounts counts_;
};

}  // namespace
}  // namespace memswap::cpu::vector

MEMSWAP_VECTOR_END
