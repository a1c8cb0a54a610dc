// Fibers, their scheduler, and the checks of collectives. Accesses to memory: memory.cpp.
#include "emulator.h"

#include <setjmp.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>

#include "internal.h"

namespace emulator {

Index threadIdx, blockIdx, blockDim, gridDim;
Machine machine;
int questions = 0;
std::vector<std::string> errors;
std::vector<Launch> launches;
std::set<Site> seen_sites;
Site skipped_site;

namespace {

constexpr size_t kStackBytes = 256 * 1024;
constexpr uint32_t kMaxErrors = 20;
constexpr int kInvalidValue = 1;

uint64_t random_state = 1;

// What a fiber waits for.
struct Waiting {
  enum { kNothing, kLanes, kBlock } what = kNothing;
  Exchange kind{};
  uint32_t mask = 0;
  uint64_t value = 0;
  uint32_t parameter = 0;
  Site site;
};

struct Fiber {
  ucontext_t start;
  jmp_buf place;
  bool is_started = false;
  bool is_finished = false;
  Waiting waiting;
  uint64_t result = 0;
};

std::vector<Fiber> fibers;
std::vector<uint32_t> runnable;
std::vector<unsigned char*> stacks;
std::vector<unsigned char> shared;
std::map<const void*, uint32_t> shared_limits;
jmp_buf scheduler;
uint32_t current = 0;
bool is_aborted = false;
void (*body_function)(void*);
void* body_context;

void fiber_main() {
  body_function(body_context);
  fibers[current].is_finished = true;
  _longjmp(scheduler, 1);
}

// Back to the scheduler; returns when the fiber is chosen again.
void leave() {
  if (_setjmp(fibers[current].place) == 0) {
    _longjmp(scheduler, 1);
  }
}

void enter(uint32_t thread) {
  current = thread;
  threadIdx.x = thread;
  Fiber& fiber = fibers[thread];
  if (_setjmp(scheduler) != 0) {
    return;
  }
  if (fiber.is_started) {
    _longjmp(fiber.place, 1);
  }
  fiber.is_started = true;
  setcontext(&fiber.start);
}

void release(uint32_t thread) {
  fibers[thread].waiting = {};
  runnable.push_back(thread);
}

// All lanes of the mask have arrived: everyone's result.
void complete(uint32_t first, uint32_t mask, const Waiting& as) {
  uint64_t values[32] = {}, all = 0;
  uint32_t ballot = 0, add = 0, low = ~0u, high = 0;
  for (uint32_t lane = 0; lane < 32; ++lane) {
    if (mask >> lane & 1) {
      const uint64_t value = values[lane] = fibers[first + lane].waiting.value;
      ballot |= static_cast<uint32_t>(value != 0) << lane;
      add += static_cast<uint32_t>(value);
      low = std::min(low, static_cast<uint32_t>(value));
      high = std::max(high, static_cast<uint32_t>(value));
    }
  }
  switch (as.kind) {
    case Exchange::kBallot:
      all = ballot;
      break;
    case Exchange::kAdd:
      all = add;
      break;
    case Exchange::kMin:
      all = low;
      break;
    case Exchange::kMax:
      all = high;
      break;
    default:
      break;
  }
  for (uint32_t lane = 0; lane < 32; ++lane) {
    if ((mask >> lane & 1) == 0) {
      continue;
    }
    Fiber& fiber = fibers[first + lane];
    const uint32_t parameter = fiber.waiting.parameter;
    uint32_t from = lane;
    switch (as.kind) {
      case Exchange::kIndex:
        from = parameter % 32;
        break;
      case Exchange::kUp:
        from = lane >= parameter ? lane - parameter : lane;
        break;
      case Exchange::kDown:
        from = lane + parameter < 32 ? lane + parameter : lane;
        break;
      case Exchange::kXor:
        from = lane ^ parameter;
        break;
      default:
        break;
    }
    const bool is_shuffle = as.kind <= Exchange::kXor;
    fiber.result = is_shuffle ? values[from] : all;
    release(first + lane);
  }
  if (as.kind == Exchange::kBarrier) {
    memory::pass_warp_barrier(first, mask);
  }
}

void arrive(Waiting waiting) {
  Fiber& mine = fibers[current];
  mine.waiting = std::move(waiting);
  const Waiting& as = mine.waiting;
  const uint32_t first = current / 32 * 32;
  if ((as.mask >> (current % 32) & 1) == 0) {
    fail("a lane is not in the mask of its collective");
  }
  bool is_complete = true;
  for (uint32_t lane = 0; lane < 32; ++lane) {
    if ((as.mask >> lane & 1) == 0) {
      continue;
    }
    const Fiber& other = fibers[first + lane];
    if (other.is_finished) {
      fail("a lane of the mask has left the kernel");
    }
    if (other.waiting.what == Waiting::kBlock) {
      fail("a lane of the mask waits at the thread block's barrier");
    }
    if (other.waiting.what == Waiting::kNothing) {
      is_complete = false;
    } else if (other.waiting.kind != as.kind || other.waiting.mask != as.mask ||
               other.waiting.site != as.site) {
      fail("lanes of a warp are at different collectives: " + other.waiting.site.first + ":" +
           std::to_string(other.waiting.site.second) + " and " + as.site.first + ":" +
           std::to_string(as.site.second));
    }
  }
  if (is_complete) {
    const Waiting completed = as;
    complete(first, completed.mask, completed);
  }
  leave();
}

bool is_skipped(const Site& site) {
  seen_sites.insert(site);
  return site == skipped_site;
}

Site site_of(const char* file, int line) {
  const char* slash = strrchr(file, '/');
  return {slash != nullptr ? slash + 1 : file, line};
}

void run_block(uint32_t threads) {
  while (stacks.size() < threads) {
    void* stack = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    stacks.push_back(static_cast<unsigned char*>(stack));
  }
  fibers.clear();
  fibers.resize(threads);
  runnable.clear();
  for (uint32_t i = 0; i < threads; ++i) {
    getcontext(&fibers[i].start);
    fibers[i].start.uc_stack.ss_sp = stacks[i];
    fibers[i].start.uc_stack.ss_size = kStackBytes;
    fibers[i].start.uc_link = nullptr;
    makecontext(&fibers[i].start, fiber_main, 0);
    runnable.push_back(i);
  }
  is_aborted = false;
  while (!runnable.empty() && !is_aborted) {
    const size_t chosen = next_random() % runnable.size();
    const uint32_t thread = runnable[chosen];
    runnable[chosen] = runnable.back();
    runnable.pop_back();
    enter(thread);
  }
  if (is_aborted) {
    return;
  }
  for (uint32_t i = 0; i < threads; ++i) {
    if (!fibers[i].is_finished) {
      const Site& site = fibers[i].waiting.site;
      errors.push_back("thread " + std::to_string(i) + " waits forever at " + site.first + ":" +
                       std::to_string(site.second));
      return;
    }
  }
}

}  // namespace

int current_device() {
  static std::vector<std::array<uint32_t, 3>> known;
  const std::array device{machine.processors, machine.blocks_per_processor, machine.shared_bytes};
  const auto found = std::find(known.begin(), known.end(), device);
  if (found == known.end()) {
    known.push_back(device);
    return static_cast<int>(known.size()) - 1;
  }
  return static_cast<int>(found - known.begin());
}

uint64_t next_random() {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state;
}

void fail(const std::string& what) {
  if (errors.size() < kMaxErrors) {
    errors.push_back("thread " + std::to_string(threadIdx.x) + " of block " +
                     std::to_string(blockIdx.x) + ": " + what);
  }
  is_aborted = true;
  _longjmp(scheduler, 1);
}

uint32_t current_thread() { return current; }
bool is_on_stack(const void* at) {
  const unsigned char* stack = stacks[current];
  return at >= stack && at < stack + kStackBytes;
}
std::pair<unsigned char*, size_t> shared_range() { return {shared.data(), shared.size()}; }

void maybe_preempt() {
  if (next_random() % 64 == 0) {
    runnable.push_back(current);
    leave();
  }
}

void allow_shared(const void* kernel, uint32_t bytes) { shared_limits[kernel] = bytes; }
uint32_t allowed_shared(const void* kernel) {
  const auto limit = shared_limits.find(kernel);
  return limit == shared_limits.end() ? 48 * 1024 : limit->second;
}
unsigned char* shared_memory() {
  unsigned char* first = shared.data();
  return first + (16 - reinterpret_cast<uintptr_t>(first) % 16) % 16;
}

float about(float value) {
  switch (next_random() % 3) {
    case 0:
      return std::nextafterf(std::nextafterf(value, 0.0f), 0.0f);
    case 1:
      return std::nextafterf(std::nextafterf(value, HUGE_VALF), HUGE_VALF);
    default:
      return value;
  }
}

void sync_warp(const char* file, int line) {
  const Site site = site_of(file, line);
  if (!is_skipped(site)) {
    arrive({Waiting::kLanes, Exchange::kBarrier, ~0u, 0, 0, site});
  }
}

void sync_block(const char* file, int line) {
  const Site site = site_of(file, line);
  if (is_skipped(site)) {
    return;
  }
  fibers[current].waiting = {Waiting::kBlock, Exchange::kBarrier, 0, 0, 0, site};
  for (const Fiber& fiber : fibers) {
    if (fiber.waiting.what == Waiting::kBlock && fiber.waiting.site != site) {
      fail("threads of a thread block are at different barriers");
    }
    if (fiber.waiting.what != Waiting::kBlock) {
      leave();
      return;
    }
  }
  memory::pass_block_barrier();
  for (uint32_t i = 0; i < fibers.size(); ++i) {
    release(i);
  }
  leave();
}

void fence(const char* file, int line) {
  if (!is_skipped(site_of(file, line))) {
    blocks::fence(memory::now());
    maybe_preempt();
  }
}

uint64_t exchange(Exchange kind, uint32_t mask, uint64_t value, uint32_t parameter) {
  arrive({Waiting::kLanes, kind, mask, value, parameter, {}});
  return fibers[current].result;
}

int run(const Launch& launch, void (*body)(void*), void* context) {
  if (machine.fail_launch != 0) {
    return machine.last_error = machine.fail_launch;
  }
  const uint32_t allowed = allowed_shared(launch.kernel);
  if (launch.blocks == 0 || launch.threads == 0 || launch.threads > 1024 ||
      launch.shared_bytes > allowed || allowed > machine.shared_bytes) {
    return machine.last_error = kInvalidValue;
  }
  launches.push_back(launch);
  random_state = machine.seed * 0x9e3779b97f4a7c15u | 1;
  body_function = body;
  body_context = context;
  blockDim.x = launch.threads;
  gridDim.x = launch.blocks;
  std::vector<uint32_t> order(launch.blocks);
  for (uint32_t i = 0; i < launch.blocks; ++i) {
    order[i] = i;
    std::swap(order[i], order[next_random() % (i + 1)]);
  }
  memory::begin_launch();
  for (const uint32_t block : order) {
    blockIdx.x = block;
    shared.resize(launch.shared_bytes + 16);
    for (unsigned char& byte : shared) {
      byte = static_cast<unsigned char>(next_random() >> 32);
    }
    memory::begin_block(launch.threads);
    run_block(launch.threads);
  }
  memory::end_launch();
  return 0;
}

}  // namespace emulator
