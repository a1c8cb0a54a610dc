// Between the emulator's files.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <string>
#include <utility>

namespace emulator {

uint64_t next_random();
[[noreturn]] void fail(const std::string& what);  // ends the thread block
uint32_t current_thread();
bool is_on_stack(const void* at);
std::pair<unsigned char*, size_t> shared_range();
void maybe_preempt();

// When a thread did something: how many barriers it had passed.
inline constexpr uint32_t kNobody = 0xffffffff;
struct Stamp {
  uint32_t thread = kNobody;
  uint32_t warp_epoch = 0;
  uint32_t block_epoch = 0;
};

// Whether barriers order two stamps of the same thread block.
inline bool is_ordered(const Stamp& before, const Stamp& after) {
  if (before.thread == kNobody || before.thread == after.thread) {
    return true;
  }
  return before.thread / 32 == after.thread / 32 ? before.warp_epoch < after.warp_epoch
                                                 : before.block_epoch < after.block_epoch;
}

namespace blocks {
void begin_launch();
void begin_block(uint32_t threads);
void touch(const unsigned char* at, size_t bytes, bool is_write, bool is_atomic, const Stamp& now);
void fence(const Stamp& now);
}  // namespace blocks

namespace memory {
Stamp now();
void begin_launch();
void end_launch();
void begin_block(uint32_t threads);
void pass_warp_barrier(uint32_t first_thread, uint32_t mask);
void pass_block_barrier();
}  // namespace memory

}  // namespace emulator
