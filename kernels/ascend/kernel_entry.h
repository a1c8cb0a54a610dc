// How an entry of a kernel is declared.
#pragma once

#include "entries.h"

// CANN 9 (kernels.asc) has a word for a kernel of vector cores alone, CANN 8 a statement.
#if defined(MEMSWAP_ASCEND_ASC)
#define MEMSWAP_KERNEL extern "C" __global__ __vector__ void
#define MEMSWAP_VECTOR_CORES_ONLY
#else
#define MEMSWAP_KERNEL extern "C" __global__ __aicore__ void
#define MEMSWAP_VECTOR_CORES_ONLY KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
#endif
