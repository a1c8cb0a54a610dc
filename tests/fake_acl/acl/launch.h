// How kernels reach the fake: the emulated ones of kernels/ascend and the operators of torch/.
// A C interface, so that whoever is loaded later finds it by name (dlsym) and links to nothing.
#pragma once

#include <cstddef>

extern "C" {

// Bytes of device or pinned memory that the kernel reads or writes.
struct fake_acl_span {
  const void* begin;
  size_t bytes;
  int write;
};

// Runs run(context), then destroy(context), in stream order. `name` is copied; `spans` are all that
// run touches. destroy is called exactly once, also on failure. Returns an aclError; counted, and
// made to fail, under the name "launch".
int fake_acl_launch(void* stream, const char* name, const fake_acl_span* spans, size_t span_count,
                    void (*run)(void*), void (*destroy)(void*), void* context);

// Tells the machine that an allocator above gave out (or, with `poison`, took back) memory in the
// order of this stream: nobody may use it there before, or after, without a wait. Never fails.
void fake_acl_change_owner(void* stream, void* begin, size_t bytes, int poison);

}  // extern "C"
