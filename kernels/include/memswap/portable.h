/* Frames that can leave the machine: docs/format.md section 1, *portable*. */
#ifndef MEMSWAP_PORTABLE_H
#define MEMSWAP_PORTABLE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Rewrites the frame in `frame_bytes` bytes of host memory, and in the arena of `overflow_capacity`
 * units (NULL and 0: none), so that its payloads follow each other in the order of their tiles and
 * end where the frame ends. Writes nothing beyond `out_bytes` bytes at `out`, which must not
 * overlap the frame or the arena. Payloads are not decoded.
 *
 * Returns 0 or bits of memswap::frame::Status: kBadHeader or kBadRecord for a damaged frame,
 * kNoRoom if `out_bytes` is too small. *written is the size of the portable frame after 0 and after
 * kNoRoom, else 0: call once with `out` NULL and `out_bytes` 0 to learn it. */
uint32_t memswap_frame_portable(const void* frame, uint64_t frame_bytes, const void* overflow,
                                uint64_t overflow_capacity, void* out, uint64_t out_bytes,
                                uint64_t* written);

#ifdef __cplusplus
}
#endif

#endif
