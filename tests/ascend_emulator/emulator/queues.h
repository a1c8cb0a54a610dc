// TPipe, TQue and TBuf: the arena of UB, the life of each buffer, and the flags that a queue sets
// and waits for on the kernel's behalf.
#pragma once

#include <deque>

#include "tensors.h"

namespace ascend_emulator {

inline constexpr int event_index(AscendC::HardEvent event) { return static_cast<int>(event); }

// An id that no queue holds; `limit` 6 for the kernel's own, 8 for queues.
inline int take_event_id(const char* call, int event, int limit, bool hold) {
  for (int id = 0; id < limit; ++id) {
    if (!core().held[event][id]) {
      core().held[event][id] = hold;
      return id;
    }
  }
  violate("event", call, "no event id of ", kEventNames[event], " is left of ", limit);
}

inline void queue_set(int event, int* id) {
  *id = take_event_id("TQue", event, kEventIds, true);
  if (core().user_set[event][*id]) {
    violate("event", "TQue", "flag ", kEventNames[event], " id ", *id,
            " of a queue is set by the kernel itself: take ids from AllocEventID or FetchEventID");
  }
  core().pipelines.set_flag(event, *id);
}

inline void queue_wait(int event, int* id) {
  core().pipelines.wait_flag(event, *id);
  core().held[event][*id] = false;
  *id = -1;
}

}  // namespace ascend_emulator

using TEventID = int8_t;

namespace AscendC {

using ::TEventID;

template <TPosition kPosition = TPosition::LCM>
class TBuf {
 public:
  template <class T>
  LocalTensor<T> Get() {
    return Get<T>(static_cast<uint32_t>(bytes_ / sizeof(T)));
  }
  template <class T>
  LocalTensor<T> Get(uint32_t elements) {
    return GetWithOffset<T>(elements, 0);
  }
  template <class T>
  LocalTensor<T> GetWithOffset(uint32_t elements, uint32_t offset) {
    if (buffer_ < 0) {
      ascend_emulator::violate("queue", "TBuf.Get", "before InitBuffer");
    }
    if (offset + elements * sizeof(T) > bytes_) {
      ascend_emulator::violate("unified bounds", "TBuf.Get", "bytes to ",
                               offset + elements * sizeof(T), " of ", bytes_);
    }
    return LocalTensor<T>(buffer_, 0, begin_ + offset, elements * sizeof(T));
  }

 private:
  friend class TPipe;
  int buffer_ = -1;
  uint64_t begin_ = 0;
  uint64_t bytes_ = 0;
};

template <TPosition kPosition, int32_t kDepth, auto kMask = 0>
class TQue {
  static_assert(kPosition == TPosition::VECIN || kPosition == TPosition::VECOUT,
                "rule queue: a vector core's queues stand at VECIN or VECOUT");
  static_assert(kDepth >= 1, "rule queue: a queue has a depth of at least 1");
  static constexpr bool kIn = kPosition == TPosition::VECIN;
  static constexpr int kReady =
      ascend_emulator::event_index(kIn ? HardEvent::MTE2_V : HardEvent::V_MTE3);
  static constexpr int kFreed =
      ascend_emulator::event_index(kIn ? HardEvent::V_MTE2 : HardEvent::MTE3_V);
  using State = ascend_emulator::Buffer::State;

 public:
  template <class T>
  LocalTensor<T> AllocTensor() {
    for (size_t i = 0; i < buffers_.size(); ++i) {
      const size_t index = (next_ + i) % buffers_.size();
      ascend_emulator::Buffer& buffer = at(buffers_[index]);
      if (buffer.state != State::kFree) {
        continue;
      }
      next_ = (index + 1) % buffers_.size();
      if (buffer.free_id >= 0) {
        ascend_emulator::queue_wait(kFreed, &buffer.free_id);
      }
      buffer.state = State::kAllocated;
      for (const int other : buffers_) {
        if (other != buffers_[index] && at(other).state != State::kFree) {
          ++ascend_emulator::core().tally.ahead;
          break;
        }
      }
      return LocalTensor<T>(buffers_[index], buffer.generation, buffer.begin, buffer.bytes);
    }
    ascend_emulator::violate("queue", "TQue.AllocTensor", "none of ", buffers_.size(),
                             " buffers is free: the core would hang");
  }

  template <class T>
  bool EnQue(const LocalTensor<T>& tensor) {
    ascend_emulator::Buffer& buffer = own("TQue.EnQue", tensor, State::kAllocated);
    if (waiting_.size() >= static_cast<size_t>(kDepth)) {
      ascend_emulator::violate("queue", "TQue.EnQue", waiting_.size() + 1,
                               " tensors enqueued, expected at most the depth, ", kDepth);
    }
    buffer.state = State::kEnqueued;
    ascend_emulator::queue_set(kReady, &buffer.ready_id);
    waiting_.push_back(tensor.buffer());
    return true;
  }

  template <class T>
  LocalTensor<T> DeQue() {
    if (waiting_.empty()) {
      ascend_emulator::violate("queue", "TQue.DeQue", "the queue is empty: the core would hang");
    }
    const int index = waiting_.front();
    waiting_.pop_front();
    ascend_emulator::Buffer& buffer = at(index);
    ascend_emulator::queue_wait(kReady, &buffer.ready_id);
    buffer.state = State::kDequeued;
    return LocalTensor<T>(index, buffer.generation, buffer.begin, buffer.bytes);
  }

  // A tensor that was never enqueued may be freed as well.
  template <class T>
  void FreeTensor(LocalTensor<T>& tensor) {
    const int index = tensor.buffer();
    ascend_emulator::Buffer& buffer = own(
        "TQue.FreeTensor", tensor,
        index >= 0 && at(index).state == State::kAllocated ? State::kAllocated : State::kDequeued);
    buffer.state = State::kFree;
    ++buffer.generation;
    ascend_emulator::queue_set(kFreed, &buffer.free_id);
    ascend_emulator::core().set_initialized(buffer.begin, buffer.begin + buffer.bytes, false);
  }

  bool VacantInQue() const { return waiting_.size() < static_cast<size_t>(kDepth); }
  bool HasTensorInQue() const { return !waiting_.empty(); }
  int32_t GetTensorCountInQue() const { return static_cast<int32_t>(waiting_.size()); }
  bool HasIdleBuffer() const {
    for (const int index : buffers_) {
      if (at(index).state == State::kFree) {
        return true;
      }
    }
    return false;
  }

 private:
  friend class TPipe;

  static ascend_emulator::Buffer& at(int index) {
    return ascend_emulator::core().buffers[static_cast<size_t>(index)];
  }

  template <class T>
  ascend_emulator::Buffer& own(const char* call, const LocalTensor<T>& tensor, State expected) {
    if (tensor.buffer() < 0 || at(tensor.buffer()).owner != id_) {
      ascend_emulator::violate("queue", call, "a tensor of another queue");
    }
    ascend_emulator::Buffer& buffer = at(tensor.buffer());
    if (buffer.generation != tensor.generation()) {
      ascend_emulator::violate("queue", call, "a tensor that was freed before: generation ",
                               tensor.generation(), ", the buffer is at ", buffer.generation);
    }
    if (buffer.state != expected) {
      ascend_emulator::violate("queue", call, "a tensor that is ",
                               ascend_emulator::state_name(buffer.state), ", expected ",
                               ascend_emulator::state_name(expected));
    }
    return buffer;
  }

  int id_ = -1;
  std::vector<int> buffers_;
  size_t next_ = 0;
  std::deque<int> waiting_;
};

class TPipe {
 public:
  TPipe() {
    if (ascend_emulator::core().pipe_alive) {
      ascend_emulator::violate("pipe", "TPipe", "a second TPipe while one is alive");
    }
    ascend_emulator::core().pipe_alive = true;
  }
  TPipe(const TPipe&) = delete;
  TPipe& operator=(const TPipe&) = delete;
  ~TPipe() { Destroy(); }
  void Destroy() {
    if (alive_) {
      alive_ = false;
      ascend_emulator::core().pipe_alive = false;
    }
  }

  template <TPosition kPosition, int32_t kDepth, auto kMask>
  bool InitBuffer(TQue<kPosition, kDepth, kMask>& queue, uint8_t number, uint32_t bytes) {
    if (queue.id_ >= 0) {
      ascend_emulator::violate("pipe", "TPipe.InitBuffer", "a queue that has its buffers already");
    }
    if (number == 0) {
      ascend_emulator::violate("pipe", "TPipe.InitBuffer", "0 buffers, expected at least 1");
    }
    queue.id_ = ascend_emulator::core().queues++;
    for (int i = 0; i < number; ++i) {
      queue.buffers_.push_back(
          add(kPosition, bytes, ascend_emulator::Buffer::State::kFree, queue.id_));
    }
    return true;
  }

  template <TPosition kPosition>
  bool InitBuffer(TBuf<kPosition>& buffer, uint32_t bytes) {
    buffer.buffer_ = add(kPosition, bytes, ascend_emulator::Buffer::State::kScratch, -1);
    const ascend_emulator::Buffer& added = ascend_emulator::core().buffers.back();
    buffer.begin_ = added.begin;
    buffer.bytes_ = added.bytes;
    return true;
  }

  template <HardEvent kEvent>
  TEventID AllocEventID() {
    return static_cast<TEventID>(
        ascend_emulator::take_event_id("TPipe.AllocEventID", ascend_emulator::event_index(kEvent),
                                       ascend_emulator::kUserEventIds, true));
  }
  template <HardEvent kEvent>
  void ReleaseEventID(TEventID id) {
    bool& held = ascend_emulator::core().held[ascend_emulator::event_index(kEvent)][id];
    if (!held) {
      ascend_emulator::violate("event", "TPipe.ReleaseEventID", "id ", int{id},
                               " was not allocated");
    }
    held = false;
  }
  TEventID FetchEventID(HardEvent event) {
    return static_cast<TEventID>(
        ascend_emulator::take_event_id("TPipe.FetchEventID", ascend_emulator::event_index(event),
                                       ascend_emulator::kUserEventIds, false));
  }
  template <HardEvent kEvent>
  TEventID FetchEventID() {
    return FetchEventID(kEvent);
  }

 private:
  static int add(TPosition position, uint32_t bytes, ascend_emulator::Buffer::State state,
                 int owner) {
    ascend_emulator::Core& core = ascend_emulator::core();
    const uint64_t rounded = (uint64_t{bytes} + 31) / 32 * 32;
    if (bytes == 0) {
      ascend_emulator::violate("pipe", "TPipe.InitBuffer", "a buffer of 0 bytes");
    }
    if (core.arena_used + rounded > ascend_emulator::kUsableBytes) {
      ascend_emulator::violate("pipe", "TPipe.InitBuffer",
                               "UB is full: ", core.arena_used + rounded,
                               " bytes, expected at most ", ascend_emulator::kUsableBytes);
    }
    if (core.buffers.size() >= ascend_emulator::kMaxBuffers) {
      ascend_emulator::violate("pipe", "TPipe.InitBuffer", core.buffers.size() + 1,
                               " buffers, expected at most ", ascend_emulator::kMaxBuffers);
    }
    int& count = core.buffers_of_position[static_cast<int>(position)];
    if (owner >= 0 && ++count > ascend_emulator::kMaxBuffersPerPosition) {
      ascend_emulator::violate("pipe", "TPipe.InitBuffer", count,
                               " queue buffers at one position, expected at most ",
                               ascend_emulator::kMaxBuffersPerPosition);
    }
    core.buffers.push_back({core.arena_used, rounded, position, state, 0, owner});
    core.arena_used += rounded;
    core.tally.unified_bytes = std::max(core.tally.unified_bytes, core.arena_used);
    return static_cast<int>(core.buffers.size()) - 1;
  }

  bool alive_ = true;
};

}  // namespace AscendC
