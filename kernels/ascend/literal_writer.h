// Literal blocks on their way out.
#pragma once

#include "moves.h"

namespace memswap::ascend {

// Stores elements of a step from where they were loaded. To be ended before the queue gives these
// away.
class LiteralWriter {
 public:
  __aicore__ inline explicit LiteralWriter(TPipe* pipe) : pipe_(pipe) {}

  __aicore__ inline void store(GM_ADDR to, const Bytes& from, uint32_t bytes) {
    if (!stored_) {
      hand_over<HardEvent::V_MTE3>(pipe_);  // and, by V's own wait, what MTE2 loaded
      stored_ = true;
    }
    store_bytes(to, from, bytes);
  }
  __aicore__ inline void end() {
    if (stored_) {
      hand_over<HardEvent::MTE3_V>(pipe_);
    }
  }

 private:
  TPipe* pipe_;
  bool stored_ = false;
};

}  // namespace memswap::ascend
