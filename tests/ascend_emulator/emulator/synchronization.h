// Flags, barriers, the vector mask register, and who am I.
#pragma once

#include "queues.h"

namespace ascend_emulator {

template <AscendC::HardEvent kEvent>
int user_event(const char* call, int32_t id) {
  static_assert(event_index(kEvent) < kEvents,
                "rule event: a vector core has the pipes S, V, MTE2 and MTE3");
  if (id < 0 || id >= kUserEventIds) {
    violate("event", call, kEventNames[event_index(kEvent)], " id ", id, ", expected 0 to ",
            kUserEventIds - 1);
  }
  return event_index(kEvent);
}

}  // namespace ascend_emulator

namespace AscendC {

template <HardEvent kEvent>
void SetFlag(int32_t id) {
  const int event = ascend_emulator::user_event<kEvent>("SetFlag", id);
  ascend_emulator::Core& core = ascend_emulator::core();
  if (core.user_set[event][id]) {
    ascend_emulator::violate("event", "SetFlag", ascend_emulator::kEventNames[event], " id ", id,
                             " is set already: two SetFlag without a WaitFlag between them");
  }
  for (const ascend_emulator::Buffer& buffer : core.buffers) {
    // A queue of this position holds the id for its own flag.
    const bool in = buffer.position == TPosition::VECIN;
    const int ready = ascend_emulator::event_index(in ? HardEvent::MTE2_V : HardEvent::V_MTE3);
    const int freed = ascend_emulator::event_index(in ? HardEvent::V_MTE2 : HardEvent::MTE3_V);
    if (buffer.owner >= 0 &&
        ((event == ready && buffer.ready_id == id) || (event == freed && buffer.free_id == id))) {
      ascend_emulator::violate("event", "SetFlag", ascend_emulator::kEventNames[event], " id ", id,
                               " is in use by a queue: take ids from AllocEventID or FetchEventID");
    }
  }
  core.user_set[event][id] = true;
  core.pipelines.set_flag(event, id);
}

template <HardEvent kEvent>
void WaitFlag(int32_t id) {
  const int event = ascend_emulator::user_event<kEvent>("WaitFlag", id);
  ascend_emulator::Core& core = ascend_emulator::core();
  if (!core.user_set[event][id]) {
    ascend_emulator::violate("event", "WaitFlag", ascend_emulator::kEventNames[event], " id ", id,
                             " was never set: the core would hang");
  }
  core.user_set[event][id] = false;
  core.pipelines.wait_flag(event, id);
}

template <pipe_t kPipe>
void PipeBarrier() {
  static_assert(kPipe != PIPE_S, "rule event: there is no PipeBarrier<PIPE_S>");
  ascend_emulator::Core& core = ascend_emulator::core();
  if (kPipe != PIPE_V || core.vector_barriers++ != core.skipped_barrier) {
    core.pipelines.barrier(kPipe);
  }
}

template <class T, MaskMode kMode = MaskMode::NORMAL>
void SetVectorMask(const uint64_t high, const uint64_t low) {
  static_assert(kMode == MaskMode::NORMAL, "rule mask: the emulator has no counter mode");
  ascend_emulator::lanes_of_bits<T, true>("SetVectorMask", low, high, 1);
}
template <class T, MaskMode kMode = MaskMode::NORMAL>
void SetVectorMask(int32_t lanes) {
  static_assert(kMode == MaskMode::NORMAL, "rule mask: the emulator has no counter mode");
  ascend_emulator::lanes_of_mask<T, true>("SetVectorMask", static_cast<uint64_t>(lanes), 1);
}
inline void ResetMask() {
  ascend_emulator::Core& core = ascend_emulator::core();
  core.mask[0] = core.mask[1] = ~uint64_t{0};
  core.mask_spoiled_by = nullptr;
}
inline void SetMaskNorm() {}

inline int64_t GetBlockIdx() { return ascend_emulator::core().block; }
inline int64_t GetBlockNum() { return ascend_emulator::core().blocks; }
inline int64_t GetSubBlockIdx() { return 0; }
inline int64_t GetSystemCycle() { return 0; }
inline int64_t ScalarCountLeadingZero(uint64_t value) {
  return value == 0 ? 64 : __builtin_clzll(value);
}
[[noreturn]] inline void Trap() {
  ascend_emulator::violate("trap", "Trap", "the kernel stopped itself");
}

}  // namespace AscendC
