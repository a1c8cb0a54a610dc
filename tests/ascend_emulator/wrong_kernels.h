// What a kernel is that breaks one rule and no other, and what the emulator must say.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "kernel_operator.h"

namespace wrong_kernels {

using namespace AscendC;  // NOLINT: kernel code is written so
using ascend_emulator::memory;

struct WrongKernel {
  const char* name;
  const char* rule;
  const char* message;  // part of what must be said
  uint32_t blocks;
  std::function<void(GM_ADDR in, GM_ADDR out)> run;  // 64 KiB each; `in` is written, `out` is not
};

constexpr uint32_t kBytes = 65536;

// Scratch tensors of a kernel that needs no queue, filled with numbers by the vector unit.
struct Scratch {
  TPipe pipe;
  TBuf<TPosition::VECCALC> a, b, c;
  LocalTensor<uint16_t> x, y, z;
  explicit Scratch(bool filled = true) {
    pipe.InitBuffer(a, 8192);
    pipe.InitBuffer(b, 8192);
    pipe.InitBuffer(c, 8192);
    x = a.Get<uint16_t>();
    y = b.Get<uint16_t>();
    z = c.Get<uint16_t>();
    if (filled) {
      Duplicate(x, (uint16_t)1, 4096);
      Duplicate(y, (uint16_t)2, 4096);
      Duplicate(z, (uint16_t)3, 4096);
      PipeBarrier<PIPE_V>();
    }
  }
};

template <class T>
GlobalTensor<T> global(GM_ADDR address, uint64_t elements = kBytes / sizeof(T)) {
  GlobalTensor<T> tensor;
  tensor.SetGlobalBuffer(reinterpret_cast<T*>(address), elements);
  return tensor;
}

// Orders what `from` did before what `to` will do.
template <HardEvent kEvent>
void hand_over(int32_t id = 0) {
  SetFlag<kEvent>(id);
  WaitFlag<kEvent>(id);
}

}  // namespace wrong_kernels
