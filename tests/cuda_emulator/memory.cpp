// Every access of a kernel to memory ends here before it happens.
#include <stdint.h>

#include <algorithm>
#include <vector>

#include "emulator.h"
#include "internal.h"

extern "C" {
extern const char __executable_start, _end;  // the linker's: the program's own data
}

namespace emulator {
namespace {

struct Byte {
  Stamp write, read;
  bool is_atomic = false;
  bool has_readers_of_warp = false;   // more than `read` in this epoch, of its warp
  bool has_readers_of_other = false;  // and of other warps
};

struct Buffer {
  const unsigned char* first;
  size_t bytes;
  const char* name;
  bool is_shared;
  std::vector<uint32_t> writers;  // of this launch
};

std::vector<Buffer> buffers;
std::vector<Byte> shadow;
std::vector<uint32_t> warp_epochs, block_epochs;
bool is_running = false;

void look_at_shared(size_t at, size_t bytes, bool is_write, bool is_atomic) {
  const Stamp stamp = memory::now();
  for (size_t i = at; i < at + bytes; ++i) {
    Byte& byte = shadow[i];
    if (!is_ordered(byte.write, stamp) && !(is_atomic && byte.is_atomic)) {
      fail("shared byte " + std::to_string(i) + " is " + (is_write ? "written" : "read") +
           " without a barrier after thread " + std::to_string(byte.write.thread) + " wrote it");
    }
    if (is_write) {
      const bool is_after_readers =
          is_ordered(byte.read, stamp) &&
          (!byte.has_readers_of_warp || byte.read.thread / 32 != stamp.thread / 32 ||
           byte.read.warp_epoch < stamp.warp_epoch) &&
          (!byte.has_readers_of_other || byte.read.block_epoch < stamp.block_epoch);
      if (!is_after_readers) {
        fail("shared byte " + std::to_string(i) + " is written without a barrier after thread " +
             std::to_string(byte.read.thread) + " read it");
      }
      byte.write = stamp;
      byte.is_atomic = is_atomic;
    } else {
      const bool is_same_epoch =
          byte.read.thread != kNobody && byte.read.block_epoch == stamp.block_epoch;
      const bool is_same_warp = byte.read.thread / 32 == stamp.thread / 32;
      byte.has_readers_of_other = is_same_epoch && (byte.has_readers_of_other || !is_same_warp);
      byte.has_readers_of_warp = is_same_epoch && is_same_warp &&
                                 byte.read.warp_epoch == stamp.warp_epoch &&
                                 (byte.has_readers_of_warp || byte.read.thread != stamp.thread);
      byte.read = stamp;
    }
  }
}

void look(const void* address, size_t bytes, bool is_write, bool is_atomic) {
  if (!is_running) {
    return;
  }
  const unsigned char* at = static_cast<const unsigned char*>(address);
  const auto [shared, shared_bytes] = shared_range();
  if (at >= shared && at < shared + shared_bytes) {
    if (at + bytes > shared + shared_bytes) {
      fail("an access passes the end of shared memory");
    }
    look_at_shared(static_cast<size_t>(at - shared), bytes, is_write, is_atomic);
    maybe_preempt();
    return;
  }
  if (is_on_stack(at)) {
    return;
  }
  if (bytes > 1 && bytes <= 16 && reinterpret_cast<uintptr_t>(at) % bytes != 0) {
    fail("an access of " + std::to_string(bytes) + " bytes is not aligned");
  }
  for (Buffer& buffer : buffers) {
    if (at < buffer.first || at + bytes > buffer.first + buffer.bytes) {
      continue;
    }
    if (buffer.is_shared) {
      blocks::touch(at, bytes, is_write, is_atomic, memory::now());
      maybe_preempt();
      return;
    }
    const uint32_t me = blockIdx.x * 1024 + threadIdx.x;
    const size_t first = static_cast<size_t>(at - buffer.first);
    for (size_t i = first; i < first + bytes && !is_atomic; ++i) {
      uint32_t& writer = buffer.writers[i];
      if (writer != kNobody && writer != me) {
        fail(std::string("byte ") + std::to_string(i) + " of " + buffer.name +
             " is written by one thread and touched by another");
      }
      writer = is_write ? me : writer;
    }
    maybe_preempt();
    return;
  }
  if (!is_write && at >= reinterpret_cast<const unsigned char*>(&__executable_start) &&
      at < reinterpret_cast<const unsigned char*>(&_end)) {
    return;
  }
  std::string where;
  for (const Buffer& buffer : buffers) {
    if (at + bytes + 65536 > buffer.first && at < buffer.first + buffer.bytes + 65536) {
      where += std::string(" (") + std::to_string(at - buffer.first) + " of " +
               std::to_string(buffer.bytes) + " bytes of " + buffer.name + ")";
    }
  }
  fail(std::string(is_write ? "a write" : "a read") + " outside every buffer" + where);
}

}  // namespace

Registered::Registered(const void* first, size_t bytes, const char* name, bool is_shared) {
  buffers.push_back({static_cast<const unsigned char*>(first), bytes, name, is_shared, {}});
}
Registered::~Registered() { buffers.pop_back(); }

void before_atomic(const void* at, size_t bytes) { look(at, bytes, true, true); }

namespace memory {

Stamp now() {
  const uint32_t thread = current_thread();
  return {thread, warp_epochs[thread], block_epochs[thread]};
}

void begin_launch() {
  blocks::begin_launch();
  for (Buffer& buffer : buffers) {
    buffer.writers.assign(buffer.bytes, kNobody);
  }
  is_running = true;
}
void end_launch() { is_running = false; }

void begin_block(uint32_t threads) {
  blocks::begin_block(threads);
  shadow.assign(shared_range().second, {});
  warp_epochs.assign(threads, 0);
  block_epochs.assign(threads, 0);
}

void pass_warp_barrier(uint32_t first_thread, uint32_t mask) {
  for (uint32_t lane = 0; lane < 32; ++lane) {
    warp_epochs[first_thread + lane] += mask >> lane & 1;
  }
}

void pass_block_barrier() {
  for (size_t i = 0; i < warp_epochs.size(); ++i) {
    ++warp_epochs[i];
    ++block_epochs[i];
  }
}

}  // namespace memory
}  // namespace emulator

// What -fsanitize=thread calls.
#define READ_WRITE(size)                                                                 \
  void __tsan_read##size(void* at) { emulator::look(at, size, false, false); }           \
  void __tsan_write##size(void* at) { emulator::look(at, size, true, false); }           \
  void __tsan_unaligned_read##size(void* at) { emulator::look(at, size, false, false); } \
  void __tsan_unaligned_write##size(void* at) { emulator::look(at, size, true, false); }

extern "C" {
READ_WRITE(1)
READ_WRITE(2)
READ_WRITE(4)
READ_WRITE(8)
READ_WRITE(16)
void __tsan_read_range(void* at, unsigned long bytes) { emulator::look(at, bytes, false, false); }
void __tsan_write_range(void* at, unsigned long bytes) { emulator::look(at, bytes, true, false); }
// Of the host's code: what it remembers of devices.
unsigned __tsan_atomic32_load(const volatile unsigned* at, int) {
  return __atomic_load_n(at, __ATOMIC_SEQ_CST);
}
void __tsan_atomic32_store(volatile unsigned* at, unsigned value, int) {
  __atomic_store_n(at, value, __ATOMIC_SEQ_CST);
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
}
