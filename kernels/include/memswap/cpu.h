/* The CPU backend with a chosen instruction set, for tests and benchmarks. */
#ifndef MEMSWAP_CPU_H
#define MEMSWAP_CPU_H

#include "memswap/codec.h"

#ifdef __cplusplus
extern "C" {
#endif

/* "scalar", "vector" (AVX2 or NEON) or "avx512"; NULL if the name is another one, or if the build
 * or the processor lacks it. All write the same bytes. memswap_codec_cpu() is the fastest of them.
 */
const memswap_codec* memswap_codec_cpu_with(const char* instruction_set);

#ifdef __cplusplus
}
#endif

#endif
