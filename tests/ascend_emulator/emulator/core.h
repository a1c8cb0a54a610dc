// One vector core while it runs one block: its unified buffer, pipes and vector mask.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "global_memory.h"
#include "pipelines.h"

namespace AscendC {
enum class TPosition : uint8_t {
  GM,
  A1,
  A2,
  B1,
  B2,
  C1,
  C2,
  CO1,
  CO2,
  VECIN,
  VECOUT,
  VECCALC,
  LCM
};
using QuePosition = TPosition;
enum class MaskMode : uint8_t { NORMAL, COUNTER };
}  // namespace AscendC

namespace ascend_emulator {

inline constexpr uint64_t kUnifiedBytes = 192 * 1024;
inline constexpr uint64_t kSystemBytes = 256;        // at the top, always taken
inline constexpr uint64_t kScratchBytes = 8 * 1024;  // below, Select's and the compiler's
inline constexpr uint64_t kUsableBytes = kUnifiedBytes - kSystemBytes - kScratchBytes;
inline constexpr uint32_t kRepeatBytes = 256;
inline constexpr int kMaxBuffers = 64;
inline constexpr int kMaxBuffersPerPosition = 8;

// What kernels cost that were launched with it.
struct Tally {
  uint64_t scalar_accesses = 0;  // reads and writes of UB and GM by the scalar unit
  uint64_t ahead = 0;            // tensors taken from a queue while another of it is in use
  uint64_t longest_load = 0;     // bytes that one instruction moves
  uint64_t longest_store = 0;
  uint64_t unified_bytes = 0;  // of UB that buffers took, at most
  // Of each launch: repeats of 256 bytes that vector instructions take for their widest operands.
  std::vector<uint64_t> vector_repeats;
};

struct Options {
  Order order = Order::kRandom;
  uint64_t seed = 0;
  bool report_hazards = true;    // false: show what a missing edge does to the bytes
  int64_t skipped_barrier = -1;  // a mutation: this PipeBarrier<PIPE_V> of block 0 does nothing
  Tally* tally = nullptr;        // adds up what launches cost
};

// A buffer of a queue or a TBuf.
struct Buffer {
  enum class State : uint8_t { kFree, kAllocated, kEnqueued, kDequeued, kScratch };
  uint64_t begin;
  uint64_t bytes;
  AscendC::TPosition position;
  State state;
  uint32_t generation;  // grows when the buffer is freed: older tensors must not be used
  int owner;            // queue
  int ready_id = -1;    // event id between EnQue and DeQue
  int free_id = -1;     // event id between FreeTensor and the next AllocTensor
};

inline const char* state_name(Buffer::State state) {
  static constexpr const char* names[] = {"free", "allocated", "enqueued", "dequeued", "scratch"};
  return names[static_cast<int>(state)];
}

class Core {
 public:
  Core(GlobalMemory& global, const Options& options, int block, int blocks)
      : global_memory(global),
        pipelines(options.order, options.seed * 1000003 + static_cast<uint64_t>(block),
                  options.report_hazards, kUnifiedBytes),
        block(block),
        blocks(blocks),
        skipped_barrier(block == 0 ? options.skipped_barrier : -1),
        tally(options.tally != nullptr ? *options.tally : own_tally_),
        unified(kUnifiedBytes + 64),
        initialized_(kUnifiedBytes, 0) {
    std::mt19937_64 random(options.seed ^ 0x9e3779b97f4a7c15u);
    for (size_t i = 0; i < unified.size(); i += sizeof(uint64_t)) {
      const uint64_t word = random();
      std::memcpy(&unified[i], &word, sizeof(word));
    }
  }

  uint8_t* ub(uint64_t address) { return unified.data() + address; }

  void need_initialized(const std::string& call, const Footprint& footprint) const {
    constexpr uint64_t kAll = 0x0101010101010101u;
    for (const Touch& touch : footprint.touches) {
      uint64_t words[4];
      std::memcpy(words, &initialized_[touch.block * kBlockBytes], sizeof(words));
      if ((words[0] & words[1] & words[2] & words[3]) == kAll) {
        continue;
      }
      for (uint32_t i = 0; i < kBlockBytes; ++i) {
        if ((touch.bytes >> i & 1) != 0 && !initialized_[touch.block * kBlockBytes + i]) {
          violate("uninitialized", call, "reads UB byte ", touch.block * kBlockBytes + i,
                  ", which nothing has written since it was allocated");
        }
      }
    }
  }

  void set_initialized(const Footprint& footprint, bool value) {
    for (const Touch& touch : footprint.touches) {
      uint8_t* bytes = &initialized_[touch.block * kBlockBytes];
      if (touch.bytes == ~0u) {
        std::memset(bytes, value, kBlockBytes);
        continue;
      }
      for (uint32_t i = 0; i < kBlockBytes; ++i) {
        bytes[i] = (touch.bytes >> i & 1) != 0 ? value : bytes[i];
      }
    }
  }

  void set_initialized(uint64_t begin, uint64_t end, bool value) {
    std::memset(&initialized_[begin], value, end - begin);
  }
  bool is_initialized(uint64_t address) const { return initialized_[address] != 0; }

  // Reads and writes of UB are checked and noted, then the operation is handed to its pipe.
  void issue(pipe_t pipe, const std::string& name, const std::vector<Access>& accesses,
             std::function<void()> run) {
    tally.scalar_accesses += pipe == PIPE_S ? 1 : 0;
    if (pipe == PIPE_V && !tally.vector_repeats.empty()) {
      size_t widest = 0;  // in blocks of 32 bytes
      for (const Access& access : accesses) {
        widest = std::max(widest, access.footprint.touches.size());
      }
      constexpr size_t in_repeat = kRepeatBytes / kBlockBytes;
      tally.vector_repeats.back() += (widest + in_repeat - 1) / in_repeat;
    }
    for (const Access& access : accesses) {
      if (access.space == Space::kUnified && !access.write) {
        need_initialized(name, access.footprint);
      }
    }
    for (const Access& access : accesses) {
      if (access.space == Space::kUnified && access.write) {
        set_initialized(access.footprint, true);
      }
    }
    pipelines.issue(pipe, name, accesses, std::move(run));
  }

  // What must hold when a block has ended.
  void finish() {
    for (const Buffer& buffer : buffers) {
      if (buffer.state == Buffer::State::kAllocated || buffer.state == Buffer::State::kEnqueued ||
          buffer.state == Buffer::State::kDequeued) {
        violate("queue", "end of the kernel", "a tensor of ", buffer.bytes, " bytes is still ",
                state_name(buffer.state), ", expected free");
      }
    }
    for (int event = 0; event < kEvents; ++event) {
      for (int id = 0; id < kEventIds; ++id) {
        if (user_set[event][id]) {
          violate("event", "end of the kernel", "flag ", kEventNames[event], " id ", id,
                  " was set and never waited for");
        }
      }
    }
    pipelines.drain();
    global_memory.check_flushed(block);
    global_memory.check_guards("end of the kernel");
    if (atomic != Atomic::kNone) {
      violate("atomic", "end of the kernel", "SetAtomicAdd or SetAtomicMax without SetAtomicNone");
    }
  }

  GlobalMemory& global_memory;
  Pipelines pipelines;
  const int block;
  const int blocks;
  const int64_t skipped_barrier;
  Tally& tally;
  int64_t vector_barriers = 0;
  std::vector<uint8_t> unified;
  std::vector<Buffer> buffers;
  int buffers_of_position[16] = {};
  int queues = 0;
  bool pipe_alive = false;
  uint64_t arena_used = 0;
  // Flags between SetFlag and WaitFlag, and ids that a queue or AllocEventID holds.
  bool user_set[kEvents][kEventIds] = {};
  bool held[kEvents][kEventIds] = {};
  // The vector mask register.
  uint64_t mask[2] = {~uint64_t{0}, ~uint64_t{0}};
  AscendC::MaskMode mask_mode = AscendC::MaskMode::NORMAL;
  const char* mask_spoiled_by = nullptr;
  // Of SetAtomicAdd and SetAtomicMax.
  Atomic atomic = Atomic::kNone;
  void (*combine)(void* to, const void* from) = nullptr;
  int atomic_element_bytes = 0;
  std::string atomic_type;

 private:
  Tally own_tally_;
  std::vector<uint8_t> initialized_;
};

// The core whose block this thread runs.
inline Core*& current_core() {
  static thread_local Core* core = nullptr;
  return core;
}

inline Core& core() {
  if (current_core() == nullptr) {
    violate("launch", "device code", "called outside EMU_LAUNCH");
  }
  return *current_core();
}

}  // namespace ascend_emulator
