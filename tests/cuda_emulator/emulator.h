// Runs CUDA kernels on a CPU, to find what a GPU would show rarely or never:
//
// - every thread of a thread block is a fiber; which one runs next is random (by a seed), also in
//   the middle of code, at accesses to memory;
// - every access to memory is looked at before it happens (the kernels are compiled with
//   -fsanitize=thread, whose calls end here and not in a sanitizer): it has to lie in a registered
//   buffer or in shared memory, and where two threads touch the same byte and one of them writes,
//   a barrier of both has to be in between. Shuffles and votes are no such barriers;
// - where a buffer is shared between thread blocks, an access has to be ordered behind every one of
//   another block that it conflicts with: barriers within a block, and between blocks a fence, an
//   atomic operation, another block's on the same word, and its fence. (Blocks run one after
//   another, in random order; it is the rule that is checked, not the time.)
// - a collective that a lane of its mask does not reach is an error, as is a barrier;
// - shared memory begins with random bytes.
//
// One launch runs at a time, in the calling thread. What went wrong is in `errors`.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <set>
#include <string>
#include <utility>
#include <vector>

namespace emulator {

struct Index {
  uint32_t x;
};
extern Index threadIdx, blockIdx, blockDim, gridDim;

struct Machine {
  uint32_t processors = 3;
  uint32_t blocks_per_processor = 2;
  uint32_t shared_bytes = 227 * 1024;
  uint64_t seed = 1;
  int fail_launch = 0;  // every launch returns this
  int last_error = 0;   // what a launch returned and nobody has taken
};
extern Machine machine;

// The ordinal of a device with these properties: another machine is another device.
int current_device();
// What the runtime was asked, or told, about kernels and devices.
extern int questions;

extern std::vector<std::string> errors;

// What ran: grids and thread blocks, in order.
struct Launch {
  const void* kernel;
  uint32_t blocks;
  uint32_t threads;
  uint32_t shared_bytes;
};
extern std::vector<Launch> launches;

// A barrier in the source.
using Site = std::pair<std::string, int>;
extern std::set<Site> seen_sites;
extern Site skipped_site;  // is left out: {"", 0} for none

// Memory that kernels may touch while this lives. What is not shared between blocks belongs, byte
// by byte, to the thread that writes it, atomic operations apart.
class Registered {
 public:
  Registered(const void* first, size_t bytes, const char* name, bool is_shared = false);
  ~Registered();
  Registered(const Registered&) = delete;
  Registered& operator=(const Registered&) = delete;
};

void allow_shared(const void* kernel, uint32_t bytes);
uint32_t allowed_shared(const void* kernel);
unsigned char* shared_memory();
float about(float value);

void sync_warp(const char* file, int line);
void sync_block(const char* file, int line);
void fence(const char* file, int line);

enum class Exchange { kIndex, kUp, kDown, kXor, kBallot, kAdd, kMin, kMax, kBarrier };
uint64_t exchange(Exchange kind, uint32_t mask, uint64_t value, uint32_t parameter);

void before_atomic(const void* at, size_t bytes);
template <class Value, class Change>
__attribute__((no_sanitize("thread"))) Value atomic(Value* at, Change change) {
  before_atomic(at, sizeof(Value));
  const Value old = *at;
  *at = change(old);
  return old;
}

int run(const Launch& launch, void (*body)(void*), void* context);
template <class Context>
int run(const Launch& launch, void (*body)(void*), Context context) {
  const Registered registered(&context, sizeof(context), "the launch");
  return run(launch, body, static_cast<void*>(&context));
}

}  // namespace emulator
