// Whether what thread blocks do to the same memory is ordered: fences and atomic operations.
#include <map>
#include <vector>

#include "emulator.h"
#include "internal.h"

namespace emulator::blocks {
namespace {

uint64_t clock_ticks = 0;

struct Access {
  uint32_t block;
  Stamp stamp;
  uint64_t when;
  bool is_write;
  bool is_atomic;
};

// Everything of its thread block that is ordered before it is before whatever is ordered behind it.
// An atomic operation is the same for the byte that it is about.
struct Fence {
  uint32_t block;
  Stamp stamp;
  uint64_t when;
  const unsigned char* only = nullptr;
};

// A fence of the running block, and the fences of others whose atomic operations its thread had
// seen.
struct Acquired {
  uint32_t block;
  Stamp stamp;
  std::vector<Fence> fences;
};

std::map<const unsigned char*, std::vector<Access>> accesses;  // by byte
std::map<const unsigned char*, std::vector<Fence>> released;   // by word of atomic operations
std::vector<std::vector<Fence>> seen;                          // by thread of the running block
std::vector<std::vector<Fence>> last_fence;                    // none or one, likewise
std::vector<Acquired> acquired;

bool is_before(const unsigned char* at, const Access& access, const Fence& fence) {
  return access.block == fence.block && access.when < fence.when &&
         is_ordered(access.stamp, fence.stamp) && (fence.only == nullptr || fence.only == at);
}

bool is_before_now(const unsigned char* at, const Access& access, const Stamp& now) {
  if (access.block == blockIdx.x) {
    return is_ordered(access.stamp, now);
  }
  for (const Acquired& one : acquired) {
    for (const Fence& fence : one.fences) {
      if (one.block == blockIdx.x && is_before(at, access, fence) && is_ordered(one.stamp, now)) {
        return true;
      }
    }
  }
  return false;
}

}  // namespace

void begin_launch() {
  accesses.clear();
  released.clear();
}

void begin_block(uint32_t threads) {
  seen.assign(threads, {});
  last_fence.assign(threads, {});
  acquired.clear();
}

void touch(const unsigned char* at, size_t bytes, bool is_write, bool is_atomic, const Stamp& now) {
  for (size_t i = 0; i < bytes; ++i) {
    for (const Access& before : accesses[at + i]) {
      const bool is_conflict = (before.is_write || is_write) && !(before.is_atomic && is_atomic);
      if (is_conflict && !is_before_now(at + i, before, now)) {
        fail("memory of several blocks is touched without a fence, or a barrier, after thread " +
             std::to_string(before.stamp.thread) + " of block " + std::to_string(before.block));
      }
    }
    accesses[at + i].push_back({blockIdx.x, now, ++clock_ticks, is_write, is_atomic});
  }
  if (is_atomic) {
    std::vector<Fence>& here = released[at];
    seen[now.thread].insert(seen[now.thread].end(), here.begin(), here.end());
    here.insert(here.end(), last_fence[now.thread].begin(), last_fence[now.thread].end());
    for (size_t i = 0; i < bytes; ++i) {
      here.push_back({blockIdx.x, now, clock_ticks + 1, at + i});
    }
  }
}

void fence(const Stamp& now) {
  last_fence[now.thread] = {{blockIdx.x, now, ++clock_ticks}};
  acquired.push_back({blockIdx.x, now, seen[now.thread]});
}

}  // namespace emulator::blocks
