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

namespace memory {
void begin_launch();
void end_launch();
void begin_block(uint32_t threads);
void pass_warp_barrier(uint32_t first_thread, uint32_t mask);
void pass_tile_barrier(uint32_t first_thread);
}  // namespace memory

}  // namespace emulator
