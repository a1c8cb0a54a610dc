// An emulator of an Atlas A2 vector core, in the place of the AscendC header of the same name: it
// compiles kernel sources with a host compiler and executes them under rules stricter than the
// chip's. Test-only, written from the public AscendC API documentation. What it does not have (such
// as SyncAll, matrix pipes or counter mode) does not compile.
//
// Not proven by it: speed, bank conflicts, the device compiler, the order of atomic additions.
#pragma once

#define __aicore__
#define __global__
#define __gm__
#define __ubuf__
#define __vector__
#define GM_ADDR uint8_t*
#define KERNEL_TASK_TYPE_DEFAULT(type) static_assert(true)
#define MEMSWAP_ASCEND_EMULATOR 1

#include "emulator/cast.h"
#include "emulator/compare_select.h"
#include "emulator/data_copy.h"
#include "emulator/elementwise.h"
#include "emulator/gather.h"
#include "emulator/launch.h"
#include "emulator/queues.h"
#include "emulator/reduce.h"
#include "emulator/synchronization.h"
#include "emulator/transpose.h"
