/* The seam between memswap and a codec backend: plain C, no torch, no device header.
 *
 * Every pointer below is readable (and, for outputs, writable) by the device that runs the work.
 * Nothing here allocates, and nothing waits: on a device, calls enqueue work on a stream and
 * return. The caller keeps a job's buffers alive until that work has ended; the job itself may go
 * as soon as the call returns. */
#ifndef MEMSWAP_CODEC_H
#define MEMSWAP_CODEC_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MEMSWAP_CODEC_VERSION 6

/* How an encoder chooses. The decoder never needs to know. */
enum memswap_profile {
  MEMSWAP_CANONICAL = 0, /* docs/format.md section 5: every backend writes the same bytes */
  MEMSWAP_FAST = 1       /* dense and upcast: the centre is `center`, no statistics pass */
};

/* One tensor to encode. */
typedef struct memswap_encode_job {
  const void* input;          /* `elements` elements; aligned to their width */
  uint64_t elements;          /* 0 .. 2^41 */
  uint8_t dtype;              /* memswap::frame::Dtype */
  uint8_t layout;             /* memswap::frame::Layout that fits the dtype */
  uint8_t profile;            /* memswap_profile */
  uint8_t center;             /* fast profile: center_sum / blocks of an earlier frame */
  uint8_t checksum;           /* 1: write checksums */
  void* frame;                /* 128-byte aligned; Sections::bytes(var_capacity) bytes */
  uint64_t var_capacity;      /* units of 8 bytes */
  void* overflow;             /* 8-byte aligned arena for tiles that do not fit into var, or NULL */
  uint64_t overflow_capacity; /* units, at most 2^31 - 1 */
  uint64_t* overflow_cursor;  /* units in use; bumped atomically. NULL iff overflow is */
  void* report; /* 128 bytes of host memory that the device can write, 4-byte aligned, or
                   NULL: the finished header is written there as well. Needs
                   memswap_codec::reports, and a workspace where that is of use */
} memswap_encode_job;

/* One frame to decode. */
typedef struct memswap_decode_job {
  const void* frame;          /* 128-byte aligned */
  uint64_t frame_bytes;       /* nothing outside these bytes is read, whatever the frame says */
  const void* overflow;       /* arena that the frame may point into, or NULL */
  uint64_t overflow_capacity; /* units; nothing beyond is read */
  void* output;               /* `elements` elements; nothing else is written */
  uint64_t elements;          /* what the caller expects; a frame that says otherwise is an error */
  uint8_t dtype;              /* likewise */
  uint8_t verify;             /* 1: compare checksums, where the frame has them */
  uint8_t layout_hint; /* 0: unknown; else 1 + the memswap::frame::Layout that the frame should
                         have: where that decides on a kernel, one launch instead of two. A
                         frame of another layout may then be an error (kBadHeader) */
  uint32_t* status;    /* memswap::frame::Status bits are OR-ed into it; the output is
                          meaningless unless it stays 0 */
} memswap_decode_job;

/* Runs task(context, i) for every i in 0..count-1, on any threads, and returns when all ended. */
typedef void (*memswap_parallel_for)(void* pool, size_t count,
                                     void (*task)(void* context, size_t i), void* context);

/* Where and how the work runs. Zeroed: the default stream, everything the device has. */
typedef struct memswap_launch {
  void* stream;            /* native stream handle (cudaStream_t, aclrtStream); CPU: unused */
  uint32_t max_processors; /* at most so many SMs or cores at once; 0: no bound. CPU: tasks that
                              parallel_for is asked for at most; 0: one */
  memswap_parallel_for parallel_for; /* CPU: NULL runs in the calling thread */
  void* pool;                        /* first argument of parallel_for */
  void* workspace; /* encode: memswap_codec::workspace_bytes of the device's memory, aligned to 128
                      bytes, or NULL: then each encode may take another launch. All zero before the
                      first encode that gets it; each leaves it so. Encodes that share it are in
                      order: on one stream */
} memswap_launch;

/* A backend: one per device type. Functions return 0, or a code that `message` explains; then what
 * was enqueued before the failure still runs, and what it writes is worthless. What the elements or
 * the frame contain never makes a function fail: that shows in Header::status (encode) and in
 * *status (decode). Callable from any thread at once. */
typedef struct memswap_codec {
  uint32_t version; /* MEMSWAP_CODEC_VERSION */
  const char* name; /* "cpu", "cuda", ... */
  int (*encode)(const memswap_encode_job* job, const memswap_launch* launch);
  int (*decode)(const memswap_decode_job* job, const memswap_launch* launch);
  const char* (*message)(int code); /* never NULL; valid until this thread asks again */
  uint32_t spare_tiles;     /* an encode may leave the room of so many tiles in var unused, and then
                               needs it in the overflow arena beyond what var lacks; at least 1 */
  uint32_t check_first;     /* 1: no hardware has confirmed this backend. Let it encode and decode
                               something on a device before it is trusted with tensors there */
  uint64_t workspace_bytes; /* of memswap_launch::workspace; 0: none is of use */
  uint32_t reports;         /* 1: encodes fill memswap_encode_job::report */
  uint32_t maps_host; /* 1: kernels reach pinned host memory, so the overflow arena may be there;
                         its cursor is the device's in any case */
} memswap_codec;

/* Codes that every backend shares; others are the device runtime's own. */
#define MEMSWAP_CODEC_OK 0
#define MEMSWAP_CODEC_BAD_ARGUMENT (-1) /* misaligned or null pointer, layout that does not fit */
#define MEMSWAP_CODEC_NOT_SUPPORTED (-2)

/* The backends that this library was built with. */
const memswap_codec* memswap_codec_cpu(void);
const memswap_codec* memswap_codec_cuda(void);
const memswap_codec* memswap_codec_ascend(void); /* encodes that share an arena: on one stream */

#ifdef __cplusplus
}
#endif

#endif
