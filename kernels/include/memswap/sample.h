/* Which layout suits a tensor, by a sample of its blocks. */
#ifndef MEMSWAP_SAMPLE_H
#define MEMSWAP_SAMPLE_H

#include <stdint.h>

#include "memswap/codec.h"

#ifdef __cplusplus
extern "C" {
#endif

/* [Note: sampled layouts]
 * Some of a tensor's blocks of 1024 elements are encoded in every layout that fits its dtype, and
 * the layout with the fewest bytes is chosen; of equals, the one that is decoded fastest. The
 * blocks are spread over the whole tensor, one in each of as many equal parts, at a place in its
 * part that only their numbers decide: what comes again and again, a mask's rows for instance,
 * cannot hide between them, and the same tensor gets the same layout every time. That is one block
 * in 256 of a large tensor, in up to four layouts. Nothing is counted over the whole tensor,
 * because that would read it once more and gain nothing for any kind of tensor in
 * docs/benchmarks.md ("The sample decides"). */

/* How many blocks of a tensor with so many elements are looked at: all of a small one. */
uint32_t memswap_sample_count(uint64_t elements);

/* The number of the i-th of them, i < memswap_sample_count(elements). They ascend. Where not all
 * blocks are looked at, each of these is whole. */
uint64_t memswap_sample_block(uint64_t elements, uint32_t i);

/* The memswap::frame::Layout for `elements` elements of `dtype` (memswap::frame::Dtype) at `input`,
 * which is host memory, aligned to their width. `launch`: as of a CPU encode; NULL is zeroed. */
uint8_t memswap_choose_layout(const void* input, uint64_t elements, uint8_t dtype,
                              const memswap_launch* launch);

/* The same where the sampled blocks have been copied out of the tensor, one behind another (the
 * last of them as long as it is there): `elements` is the whole tensor's. */
uint8_t memswap_choose_layout_of_sample(const void* sample, uint64_t elements, uint8_t dtype,
                                        const memswap_launch* launch);

#ifdef __cplusplus
}
#endif

#endif
