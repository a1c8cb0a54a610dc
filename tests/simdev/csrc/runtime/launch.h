/* The C face of the runtime, for native code under test that launches kernels on a raw stream.
 * Every function returns 0, or 1 with the reason in simdev_last_error(). A stream is the native
 * handle of a torch.Stream. */
#ifndef SIMDEV_LAUNCH_H_
#define SIMDEV_LAUNCH_H_

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  const void* begin;
  size_t bytes;
  int write;
} simdev_span;

/* Runs run(context), then destroy(context), in stream order. `name` is copied. The spans are all
 * the device and pinned memory that run touches. destroy is called exactly once, also on failure.
 */
int simdev_launch(void* stream, const char* name, const simdev_span* spans, size_t span_count,
                  void (*run)(void*), void (*destroy)(void*), void* context);
/* Either end may be device memory, pinned memory or plain host memory. As with cudaMemcpyAsync, the
 * call returns early only where plain host memory does not force it to wait: a plain source is
 * staged, a plain destination waited for. */
int simdev_memcpy_async(void* destination, const void* source, size_t bytes, void* stream);
int simdev_memset_async(void* destination, int value, size_t bytes, void* stream);
/* Of the calling thread; valid until its next call. */
const char* simdev_last_error(void);

#ifdef __cplusplus
}
#endif
#endif
