// memswap_codec_ascend() on the emulator: the host side as it is, with its launches executed here.
#pragma once

#include <cstddef>

extern "C" {

// Bytes of device memory that a kernel reads or writes, at addresses that are known before it runs.
struct memswap_emulated_span {
  const void* begin;
  size_t bytes;
  int write;
};

// Runs run(context), then destroy(context), in the order of `stream`; destroy in any case, and run
// never after a nonzero return, which becomes the launch's error.
typedef int (*memswap_emulated_stream)(void* stream, const char* kernel,
                                       const memswap_emulated_span* spans, size_t span_count,
                                       void (*run)(void*), void (*destroy)(void*), void* context);

// How kernels are launched from now on. Null: at once, in the calling thread. Kernels run one at a
// time in any case.
void memswap_ascend_emulate(memswap_emulated_stream on);

}  // extern "C"
